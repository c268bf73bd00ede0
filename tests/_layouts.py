"""Meshes, one small model in four layouts, and what the device tests ask of them."""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import _helpers as h
import _transforms as t
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

# Sums over devices add the same numbers in another order. What is measured against
# is the largest entry, since gradients cancel: 4 eps a step is seen at most.
TRAIN_TOL = 16 * h.EPS32
# One bfloat16 may round to the other side.
BF16_TOL = 2.0**-8


def mesh(
    shape: tuple[int, ...] = (2, 4),
    names: tuple[str, ...] = ("data", "model"),
    kind: AxisType = AxisType.Auto,
) -> Mesh:
    """A mesh of the first devices; 8 must be there, as many as it may take."""
    assert jax.device_count() == 8, jax.devices()
    return jax.make_mesh(
        shape,
        names,
        axis_types=(kind,) * len(names),
        devices=jax.devices()[: math.prod(shape)],
    )


def smap(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, **kw: Any):
    """A jitted shard_map: eager work on many sharded leaves can deadlock on CPU."""
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **kw)
    )


def vary(tree: Any, axes: Any) -> Any:
    """Casts to varying, as programs do to keep gradients local."""
    if hasattr(lax, "pcast"):
        return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), tree)
    return jax.tree.map(lambda x: lax.pvary(x, axes), tree)


def is_spec(x: Any) -> bool:
    return isinstance(x, P)


def put(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """The tree, split over the mesh."""
    named = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
    # From copies: device_put may alias, and what it returns may be donated.
    return jax.device_put(jax.tree.map(np.array, tree), named)


def on_devices(x: jax.Array) -> list[np.ndarray]:
    """What every device holds, also where the type says that all hold the same."""
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def assert_same_everywhere(tree: Any, devices: int = 8) -> None:
    """Every device holds all of every leaf, bit for bit."""
    for leaf in jax.tree.leaves(tree):
        held = on_devices(leaf)
        assert len(held) == devices, f"on {len(held)} devices"
        for other in held:
            assert other.shape == leaf.shape, f"{other.shape} of {leaf.shape}"
            assert other.tobytes() == held[0].tobytes(), held


def assert_near(got: Any, want: Any, tol: float = TRAIN_TOL) -> None:
    """Leaf by leaf, the largest difference against the largest entry."""
    got_leaves, got_def = jax.tree.flatten(got)
    want_leaves, want_def = jax.tree.flatten(want)
    assert got_def == want_def, f"{got_def} is not {want_def}"
    for i, (g, w) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        g, w = h.wide(g), h.wide(w)
        assert g.shape == w.shape, f"leaf {i}: shape {g.shape}, not {w.shape}"
        with np.errstate(invalid="ignore"):
            apart = np.where(g == w, 0.0, np.abs(g - w))
        off = np.max(apart, initial=0.0)
        top = np.max(np.abs(w), initial=0.0, where=np.isfinite(w))
        assert off <= tol * top, f"leaf {i}: {off / top / h.EPS32:.1f} eps"


# ------------------------------------------------------------------ gradients
# On a mesh of 2 x 4 or 3 x 2: every way to split a leaf, and leaves that are whole.
SPECS = {
    "both": P("data", "model"),
    "cols": P(None, "model"),
    "flat": P(("data", "model")),
    "half": P("data"),
    "rows": P("data"),
    "whole": P(),
}
_SHAPES = {
    "both": (12, 4),
    "cols": (3, 8),
    "flat": (24,),
    "half": (6, 2),
    "rows": (6,),
    "whole": (5,),
}


def _tree(seed: int) -> dict[str, jax.Array]:
    return {
        k: h.draw(seed + i, s, "bfloat16" if k == "half" else "float32")
        for i, (k, s) in enumerate(_SHAPES.items())
    }


GRADS, PARAMS = _tree(1), _tree(20)
ORDERS = (2, 1, math.inf, 3)
NAMES = {k: tuple(a for a in jax.tree.leaves(tuple(s)) if a) for k, s in SPECS.items()}


def update_of(
    row: t.Row, ord: float, sharded_over: Any = "auto", **options: Any
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """One update of a transform from a fresh state."""
    if row.takes("ord"):
        options["ord"] = ord
    if row.norm_based:
        options["sharded_over"] = sharded_over

    def update(grads: Any, params: Any) -> tuple[Any, Any]:
        tx = row.make(*t.binding(row), **options)
        return tx.update(grads, tx.init(params), params)

    return update


def with_memory() -> list[Any]:
    """The rows that remember norms, a scalar and a vector one in the default suite."""
    always = ("clip_by_global_norm_zscore", "clip_by_leaf_norm_ema")
    return [
        pytest.param(
            row, id=row.name, marks=() if row.name in always else pytest.mark.slow
        )
        for row in t.having(memory=True)
    ]


def records(state: Any) -> list[oun.NormState]:
    """Every NormState in a state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, oun.NormState))
    return [x for x in leaves if isinstance(x, oun.NormState)]


def assert_as_worked_out(
    row: t.Row, ord: float, updates: Any, state: Any, devices: int = 8
) -> None:
    """An update of `GRADS` against float64, and its record."""
    want, smallest = t.expected(row, GRADS, t.binding(row), PARAMS, ord=ord)
    h.assert_close(updates, want)
    assert_same_everywhere(state, devices)
    for record in records(state):
        if not row.rms:
            h.assert_norm(record.grad_norm, h.tree_norm(GRADS, ord))
        if math.isfinite(smallest):
            assert_near(record.grad_scale, np.float64(smallest), 8 * h.EPS32)
        assert (record.steps, record.nonfinite, record.repeated) == (1, 0, 0)


# ---------------------------------------------------------------------- model
WIDTHS = {
    "w0": (8, 16),
    "b0": (16,),
    "w1": (16, 32),
    "b1": (32,),
    "w2": (32, 8),
    "b2": (8,),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the parameters and the batch of the model live.

    Attributes:
      shape: of the mesh.
      names: of its axes. Over "data" the batch is split, and parameters are
        gathered when they are used; over "model" the hidden layer is split.
      specs: of the parameters.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    specs: Mapping[str, P]

    def mesh(self, kind: AxisType = AxisType.Auto) -> Mesh:
        return mesh(self.shape, self.names, kind)

    @property
    def batch(self) -> P:
        return P("data") if "data" in self.names else P()


LAYOUTS = {
    "data parallel": Layout((8,), ("data",), {k: P() for k in WIDTHS}),
    "fsdp": Layout(
        (8,),
        ("data",),
        {
            "w0": P("data"),
            "b0": P("data"),
            "w1": P(None, "data"),
            "b1": P(),
            "w2": P("data"),
            "b2": P("data"),
        },
    ),
    "tensor parallel": Layout(
        (8,),
        ("model",),
        {
            "w0": P(),
            "b0": P(),
            "w1": P(None, "model"),
            "b1": P("model"),
            "w2": P("model"),
            "b2": P(),
        },
    ),
    "mixed": Layout(
        (2, 4),
        ("data", "model"),
        {
            "w0": P("data"),
            "b0": P(("data", "model")),
            "w1": P("data", "model"),
            "b1": P("model"),
            "w2": P("model", "data"),
            "b2": P(),
        },
    ),
}


def init_model() -> dict[str, jax.Array]:
    return {k: 0.3 * h.draw(i, s) for i, (k, s) in enumerate(WIDTHS.items())}


def batches(steps: int = 3) -> list[tuple[jax.Array, jax.Array]]:
    return [(h.draw(i, (16, 8)), h.draw(i + 50, (16, 8))) for i in range(steps)]


def _gathered(x: jax.Array, spec: P) -> jax.Array:
    for dim, axes in enumerate(spec):
        if axes not in (None, "model"):
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def loss_of(
    params: Any, batch: Any, layout: Layout | None = None, average: bool = True
) -> jax.Array:
    """Mean squared error of an MLP, averaged over "data" unless it is to stay local."""
    p, (x, y) = params, batch
    names = layout.names if layout is not None else ()
    if layout is not None:
        p = {k: _gathered(v, layout.specs[k]) for k, v in p.items()}
    x = jnp.tanh(x @ p["w0"] + p["b0"][None])
    x = jnp.tanh(x @ p["w1"] + p["b1"][None]) @ p["w2"]
    if "model" in names:
        x = lax.psum(x, "model")
    loss = jnp.mean((x + p["b2"][None] - y) ** 2)
    return lax.pmean(loss, "data") if average and "data" in names else loss


def step_of(
    tx: optax.GradientTransformationExtraArgs,
    grads: Callable[[Any, Any], Any],
    **extra: Any,
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """One training step, from parameters, state and batch."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads(params, batch), state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def train(step: Callable[..., Any], params: Any, state: Any, steps: int = 3):
    for batch in batches(steps):
        params, state = step(params, state, batch)
    return params, state


def train_single(tx: optax.GradientTransformationExtraArgs, steps: int = 3):
    params = init_model()
    step = jax.jit(step_of(tx, jax.grad(loss_of)))
    return train(step, params, tx.init(params), steps)


def state_specs(tx: optax.GradientTransformation, params: Any, specs: Any) -> Any:
    """The parameters' specs wherever the state holds a tree of their shape."""
    return optax.tree.map_params(
        tx,
        lambda _, spec: spec,
        jax.eval_shape(tx.init, params),
        dict(specs),
        transform_non_params=lambda _: P(),
    )


def process_env(**extra: str) -> dict[str, str]:
    """The environment of another process that shall import the same package."""
    home = pathlib.Path(oun.__file__).parent.parent
    paths = [str(home), os.environ.get("PYTHONPATH", "")]
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | extra


# ---------------------------------------------------------------- collectives
BRANCHES = ("cond", "while", "scan")


def collectives(jaxpr: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each collective, with the names of the primitives that it lies in."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in h.COLLECTIVES:
            yield name, inside
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from collectives(inner, (*inside, name))


def count(compiled_text: str, op: str) -> int:
    """How often an operation stands in a compiled program."""
    pattern = rf"^\s*(?:ROOT )?%?\S+ = .*? {op}(?:-start)?\("
    return len(re.findall(pattern, compiled_text, flags=re.M))


MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def entry(compiled_text: str) -> str:
    """The program without its branches and loops.

    The range check of the squares is a branch on CPU. Under automatic axes XLA puts
    all-reduces into it, which is safe there: the predicate is the same everywhere.
    """
    start = compiled_text.index("\nENTRY")
    return compiled_text[start : compiled_text.index("\n}", start)]


def assert_nothing_moves(compiled_text: str) -> None:
    """No leaf travels between devices."""
    for op in MOVES:
        assert count(compiled_text, op) == 0, f"{op} in the program"


def assert_all_reduces(compiled_text: str, at_most: int, at_least: int = 1) -> None:
    """So many all-reduces, and nothing that moves leaves between devices."""
    assert_nothing_moves(compiled_text)
    found = count(entry(compiled_text), "all-reduce")
    assert at_least <= found <= at_most, f"{found} all-reduces"
