"""Every public transform: how the tests call it, and what it must return.

`find` walks the package, so a new transform without a row here fails the suite.
"""

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_unitnorm as oun

Blocks = Callable[[Sequence[np.ndarray | None]], list[h.Block]]


def inverse(n: float, _: float) -> float:
    return 1 / n


def clip(n: float, _: float, limit: float) -> float:
    return min(1.0, limit / n)


def clip_torch(n: float, _: float, limit: float) -> float:
    return min(1.0, limit / (n + 1e-6))


def soft_clip(n: float, _: float, limit: float) -> float:
    return 1.0 if math.isinf(limit) else limit / (limit + n)


def clip_to_param(n: float, m: float, ratio: float) -> float:
    return min(1.0, ratio * max(m, 1e-3) / n)


def keep(n: float, _: float) -> float:
    return 1.0


def whole_while_finite(leaves: Sequence[np.ndarray | None]) -> list[h.Block]:
    """One block in the warm-up, where no bad leaf spoils the others."""
    finite = all(x is None or np.isfinite(x).all() for x in leaves)
    return h.whole(leaves) if finite else h.each(leaves)


def shrink(n: Any) -> Any:
    """A scale of the user's own, for numpy and jax alike."""
    return 1 / (1 + n)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One public transform.

    Attributes:
      name: its name in the package.
      kind: "normalise", "clip" (identity below a threshold), "scale" (always
        multiplies), "keep" (changes nothing), or "value" (element by element).
      blocks: who shares a norm.
      scale: the block's norm and its parameter's, and the threshold, to the scale.
      thresholds: names of the arguments that may be schedules.
      args: the other arguments that it needs.
      rms: whether it measures root mean squares.
      memory: whether its thresholds follow the history of norms. The scale is then
        that of the first step.
    """

    name: str
    kind: str
    blocks: Blocks
    scale: Callable[..., float]
    thresholds: tuple[str, ...] = ()
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rms: bool = False
    memory: bool = False

    @property
    def factory(self) -> Callable[..., optax.GradientTransformationExtraArgs]:
        return getattr(oun, self.name)

    def make(
        self, *thresholds: Any, **options: Any
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the transform; all thresholds but the first may be left out."""
        named = dict(zip(self.thresholds, thresholds, strict=False))
        return self.factory(**named, **self.args, **options)

    def start(self, tx: optax.GradientTransformation, params: Any) -> Any:
        """A first state, where one is needed."""
        return tx.init(params) if self.memory else None

    def takes(self, option: str) -> bool:
        return option in inspect.signature(self.factory).parameters

    @property
    def norm_based(self) -> bool:
        return self.kind != "value"


ROWS = [
    Row("normalize_to_unit_global_norm", "normalise", h.whole, inverse),
    Row("normalize_to_unit_leaf_norm", "normalise", h.each, inverse),
    Row(
        "normalize_to_unit_group_norm",
        "normalise",
        h.alternate,
        inverse,
        args={"groups": h.alternate_labels},
    ),
    Row("normalize_to_unit_global_rms", "normalise", h.whole, inverse, rms=True),
    Row("normalize_to_unit_leaf_rms", "normalise", h.each, inverse, rms=True),
    Row("clip_by_global_norm", "clip", h.whole, clip, ("max_norm",)),
    Row("clip_by_leaf_norm", "clip", h.each, clip, ("max_norm",)),
    Row(
        "clip_by_group_norm",
        "clip",
        h.alternate,
        clip,
        ("max_norm",),
        {"groups": h.alternate_labels},
    ),
    Row("clip_by_global_rms", "clip", h.whole, clip, ("max_rms",), rms=True),
    Row("clip_by_leaf_rms", "clip", h.each, clip, ("max_rms",), rms=True),
    Row("clip_by_value", "value", h.each, keep, ("max_value", "min_value")),
    Row("soft_clip_by_global_norm", "scale", h.whole, soft_clip, ("max_norm",)),
    Row("clip_by_param_norm", "clip", h.param_units, clip_to_param, ("ratio",)),
    Row("record_norm", "keep", h.whole, keep),
    Row(
        "scale_from_norm",
        "scale",
        h.whole,
        lambda n, _: shrink(n),
        args={"fn": shrink},
    ),
    Row(
        "clip_by_global_norm_percentile",
        "clip",
        h.whole,
        clip,
        ("max_norm",),
        {"percentile": 50, "window": 4},
        memory=True,
    ),
    Row(
        "clip_by_global_norm_zscore",
        "clip",
        h.whole,
        clip,
        ("max_norm",),
        {"warmup": 4},
        memory=True,
    ),
    Row(
        "clip_by_leaf_norm_ema",
        "clip",
        whole_while_finite,
        clip,
        ("max_norm",),
        {"warmup": 4},
        memory=True,
    ),
    Row(
        "skip_spikes",
        "keep",
        h.whole,
        keep,
        args={"inner": optax.identity()},
        memory=True,
    ),
    Row("clip_like_keras", "clip", h.whole, clip, ("global_clipnorm",)),
    Row("clip_like_torch", "clip", h.whole, clip_torch, ("max_norm",)),
]


def find() -> list[str]:
    """Names of the package's public functions that return a transform."""
    transforms = (
        optax.GradientTransformation,
        optax.GradientTransformationExtraArgs,
    )
    return [
        name
        for name, member in sorted(vars(oun).items())
        if not name.startswith("_")
        and inspect.isfunction(member)
        and typing.get_type_hints(member).get("return") in transforms
    ]


FOUND = [row for row in ROWS if row.name in find()]


def having(**wanted: Any) -> list[Row]:
    """The rows whose fields are as wanted, or among the values wanted."""

    def fits(row: Row) -> bool:
        pairs = ((getattr(row, k), v) for k, v in wanted.items())
        return all(a in v if isinstance(v, tuple) else a == v for a, v in pairs)

    return [row for row in FOUND if fits(row)]


def one_of_a_kind(rows: Sequence[Row]) -> list[Row]:
    """One row for each way to share a norm and to scale by it."""
    kinds = {(row.blocks, row.kind, row.rms, row.memory): row for row in reversed(rows)}
    return list(kinds.values())[::-1]


def some_slow(rows: Sequence[Row]) -> pytest.MarkDecorator:
    """One row for each scope by default, with and without memory; others are slow."""
    first = {(row.blocks, row.memory): row.name for row in reversed(rows)}
    params = [
        pytest.param(
            row,
            id=row.name,
            marks=() if row.name in first.values() else pytest.mark.slow,
        )
        for row in rows
    ]
    return pytest.mark.parametrize("row", params)


def taking(option: str, **wanted: Any) -> list[Row]:
    """The rows whose factory has an option of this name."""
    return [row for row in having(**wanted) if row.takes(option)]


def measure(row: Row, parts: list[np.ndarray], ord: float) -> float:
    """The norm or root mean square of a block; inf where float32 has no room."""
    n = h.norm(parts, ord)
    if n > h.MAX32:
        return math.inf
    return n / math.sqrt(sum(p.size for p in parts)) if row.rms else n


def expected(
    row: Row,
    grads: Any,
    thresholds: Sequence[float] = (),
    params: Any = None,
    *,
    ord: float = 2,
    mask: Any = None,
    min_norm: float = 0.0,
    nonfinite: str = "propagate",
    blocks: Blocks | None = None,
) -> tuple[Any, float]:
    """The update in float64, and the smallest scale."""
    leaves, treedef = jax.tree.flatten(grads)
    chosen = [True] * len(leaves) if mask is None else jax.tree.leaves(mask)
    counted = [
        h.wide(x) if h.counts(x) and c else None
        for x, c in zip(leaves, chosen, strict=True)
    ]
    if row.kind == "value":
        return treedef.unflatten(_by_value(leaves, counted, thresholds)), 1.0
    out = [x if w is None else w.copy() for x, w in zip(leaves, counted, strict=True)]
    held = [h.wide(x) if h.counts(x) else x for x in jax.tree.leaves(params)]
    smallest = math.inf
    for block in (blocks or row.blocks)(counted):
        n = measure(row, [counted[i][at] for i, at in block], ord)
        m = h.norm([held[i][at] for i, at in block], ord) if held else 0.0
        scale = 1.0
        if not math.isfinite(n):
            scale = 0.0 if nonfinite == "zero" else math.nan
        elif n > 0 and row.kind != "keep":
            floored = max(n, min_norm) if row.kind == "normalise" else n
            scale = row.scale(floored, m, *thresholds)
            smallest = min(smallest, scale)
        for i, at in block:
            if not math.isfinite(n) and row.kind != "keep":
                out[i][at] = scale
            elif row.kind != "keep":
                out[i][at] = out[i][at] * scale
    return treedef.unflatten(out), min(smallest, math.inf)


def _by_value(leaves: Any, counted: Any, thresholds: Sequence[float]) -> list[Any]:
    high = thresholds[0]
    low = thresholds[1] if len(thresholds) > 1 else -high
    out = []
    for x, w in zip(leaves, counted, strict=True):
        if w is None:
            out.append(x)
        elif w.dtype.kind == "c":
            size = np.where(np.abs(w) > 0, np.abs(w), 1)
            out.append(w * np.minimum(1, high / size))
        else:
            out.append(np.clip(w, low, high))
    return out


def run(
    row: Row,
    grads: Any,
    thresholds: Sequence[float] = (),
    params: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Updates and state of the first step, parameters being the gradients if None."""
    tx = row.make(*(np.float32(t) for t in thresholds), **options)
    params = grads if params is None else params
    return tx.update(grads, tx.init(params), params)


@functools.cache
def compiled(row: Row) -> Callable[..., tuple[Any, Any]]:
    """The first step as one program of thresholds, gradients and parameters.

    Compiling one costs as much as thirty eager steps, whose inner programs are
    shared by all transforms: tests that are not about jit do without.
    """

    def update(thresholds: Any, grads: Any, params: Any) -> tuple[Any, Any]:
        tx = row.make(*thresholds)
        return tx.update(grads, tx.init(params), params)

    return jax.jit(update)


def record_in(state: Any) -> oun.NormState | None:
    """The NormState of a state, that of a rule with memory included."""
    if isinstance(state, oun.NormState):
        return state
    return getattr(state, "norm", None)


def binding(row: Row) -> tuple[float, ...]:
    """Thresholds that bind on `GRADS`: below every norm there, in every block."""
    return {0: (), 1: (0.25,), 2: (0.25,)}[len(row.thresholds)]


def loose(row: Row) -> tuple[float, ...]:
    """Thresholds that do not bind on `GRADS`."""
    return {0: (), 1: (1e6,), 2: (1e6,)}[len(row.thresholds)]


GRADS = {
    "b": h.draw(1, (3,), "bfloat16"),
    "c": h.draw(2, (2,), "complex64"),
    "h": (h.draw(3, (2, 2), "float16"), None, jnp.zeros((0, 2))),
    "s": h.draw(4, ()),
    "w": h.draw(5, (3, 2)),
}
PARAMS = {
    "b": h.draw(6, (3,), "bfloat16"),
    "c": h.draw(7, (2,), "complex64"),
    "h": (h.draw(8, (2, 2), "float16"), None, jnp.zeros((0, 2))),
    "s": h.draw(9, ()),
    "w": h.draw(10, (3, 2)),
}
