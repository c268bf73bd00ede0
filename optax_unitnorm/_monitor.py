"""What was done and what is in a tree: metrics of states, descriptions of leaves."""

import html
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_unitnorm import _devices, _leaves, _measure, _scopes
from optax_unitnorm._transform import HistoryState, NormState, SkipState
from optax_unitnorm._types import Tree


class _Found(NamedTuple):
    """A NormState in a state, where it is, and the threshold beside it."""

    path: str
    state: NormState
    threshold: Any
    skip: "str | None"  # path of the outermost skip_spikes around it


def _find(node: Any, path: tuple[Any, ...], skip: "str | None") -> Iterator[_Found]:
    """Every NormState below a node, outermost first."""
    name = _leaves.path_name
    if isinstance(node, NormState):
        yield _Found(name(path), node, None, skip)
    elif isinstance(node, HistoryState):
        inner = (*path, jax.tree_util.GetAttrKey("norm"))
        yield _Found(name(inner), node.norm, node.threshold, skip)
    elif isinstance(node, SkipState):
        skip = name(path) if skip is None else skip
        for field in node._fields:
            inner = (*path, jax.tree_util.GetAttrKey(field))
            yield from _find(getattr(node, field), inner, skip)
    else:
        for key, child in _leaves.one_level(node)[0]:
            if child is not node:
                yield from _find(child, (*path, *key), skip)


def metrics(opt_state: Tree, prefix: str = "") -> dict[str, jax.Array]:
    found = list(_find(opt_state, (), None))
    one_skip = len({f.skip for f in found}) == 1 and found[0].skip is not None
    bare = len(found) == 1 or one_skip
    result: dict[str, jax.Array] = {}
    for item in found:
        lead = prefix if bare else f"{prefix}{item.path}/"
        for key, value in _values(item).items():
            result.setdefault(lead + key, value)  # the outermost wins
    return result


def _values(item: _Found) -> dict[str, jax.Array]:
    state = NormState(*map(_unboxed, item.state))
    _warn_of_mistakes(state)
    steps, clipped = _plain(state.steps), _plain(state.clipped)
    values = {
        "grad_norm": _plain(state.grad_norm),
        "grad_scale": _plain(state.grad_scale),
        "clipped_fraction": clipped / jnp.maximum(steps, 1),
        "nonfinite_steps": _plain(state.nonfinite),
    }
    if item.threshold is not None:
        values["grad_threshold"] = _plain(_unboxed(item.threshold))
    return values


def _unboxed(value: Any) -> Any:
    """The array in a box of one (flax nnx keeps each in a variable)."""
    (leaf,) = jax.tree.leaves(value)
    return leaf


def _plain(value: Any) -> jax.Array:
    """One device's copy, where a leading axis is split over devices by pmap."""
    if _devices.leads_over_devices(value):
        value = _devices.copies(value)[0]
    return jnp.asarray(value)


def _warn_of_mistakes(state: NormState) -> None:
    if isinstance(state.grad_norm, jax.core.Tracer):
        return
    norms = _devices.copies(state.grad_norm)
    if any(not np.array_equal(norms[0], n, equal_nan=True) for n in norms[1:]):
        warnings.warn(
            "the recorded gradient norms differ between devices: the gradients were "
            "probably not averaged over devices before they came here.",
            stacklevel=4,
        )
    steps, repeated = np.max(_first(state.steps)), np.max(_first(state.repeated))
    if steps > 0 and repeated == steps:
        warnings.warn(
            "on every step all devices sent the same sum, although the leaves were "
            "said to be split over devices: gradients that are already averaged need "
            "sharded_over=None (their norm is now too large by the square root of "
            "the number of devices).",
            stacklevel=4,
        )


def _first(value: Any) -> np.ndarray:
    return _devices.copies(value)[0]


class LeafRow(NamedTuple):
    """One leaf of a described tree.

    Attributes:
        path: where it is. shape, dtype: of the leaf.
        norm: its L2 norm.
        share: of the squared norm of all finite leaves; NaN if it is not finite.
        largest: the largest magnitude, NaN elements aside.
        nan, inf: number of such elements.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    share: float
    largest: float
    nan: int
    inf: int


class Description(tuple[LeafRow, ...]):
    """Rows of a described tree; prints as a table, also in a notebook."""

    __slots__ = ()

    @property
    def nonfinite(self) -> list[str]:
        """Paths of the leaves that hold NaN or inf."""
        return [row.path for row in self if row.nan or row.inf]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.path or "(root)",
                "x".join(map(str, row.shape)) or "scalar",
                row.dtype,
                f"{row.norm:.4g}",
                f"{row.share:.1%}",
                f"{row.largest:.4g}",
                str(row.nan),
                str(row.inf),
            )
            for row in self
        ]

    def __str__(self) -> str:
        table = [LeafRow._fields, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (0, 1, 2) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Any, tag: str) -> str:
            inner = "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)
            return f"<tr>{inner}</tr>"

        body = "".join(row(cells, "td") for cells in self._cells())
        return f"<table>{row(LeafRow._fields, 'th')}{body}</table>"


def describe(tree: Tree) -> Description:
    what = _measure.subject(tree, _scopes.each_leaf(), sharded_over=None)
    arrays = what.leaves.arrays
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        raise ValueError(
            "`tree` must hold values, outside of jit, to be described; got a traced "
            "array (leaf_norms works under jit)."
        )
    norms = np.asarray(_measure.measure(what, 2.0)[0].norms.block, np.float64)
    finite = np.isfinite(norms)
    top = np.max(norms, where=finite, initial=0) or 1.0
    squares = np.where(finite, norms / top, 0) ** 2
    whole = np.sum(squares) or 1.0
    paths = _leaves.paths(tree)
    rows = [
        LeafRow(
            path=paths[i],
            shape=x.shape,
            dtype=str(x.dtype),
            norm=float(norm),
            share=float(square / whole) if ok else float("nan"),
            largest=float(largest),
            nan=int(nan),
            inf=int(inf),
        )
        for i, x, norm, square, ok, (largest, nan, inf) in zip(
            what.leaves.index, arrays, norms, squares, finite, _stats(arrays), strict=True
        )
    ]
    return Description(sorted(rows, key=lambda r: -r.share if r.share == r.share else -2))


@jax.jit
def _stats(arrays: "list[jax.Array]") -> Any:
    def stats(x: jax.Array) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        bad = jnp.isnan(x)
        largest = jnp.max(jnp.where(bad, 0, jnp.abs(x)))
        return largest, jnp.sum(bad), jnp.sum(jnp.isinf(x))

    return [stats(x) for x in arrays]
