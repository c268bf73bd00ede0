"""What was done and what is in a tree: metrics of states, descriptions of leaves."""

import html
import warnings
from collections.abc import Iterator, Mapping
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
    if isinstance(node, Mapping) and set(node) == set(NormState._fields):
        node = NormState(**node)  # as flax nnx and checkpoints unpack it
    if isinstance(node, NormState):
        yield _Found(name(path), node, None, skip)
    elif isinstance(node, HistoryState):
        inner = (*path, jax.tree_util.GetAttrKey("norm"))
        yield _Found(name(inner), node.norm, node.threshold, skip)
    elif isinstance(node, SkipState):
        skip = name(path) if skip is None else skip
        for field in node._fields:
            inner = (*path, jax.tree_util.GetAttrKey(field))
            if field == "norm":
                yield _Found(name(inner), node.norm, node.threshold, skip)
            else:
                yield from _find(getattr(node, field), inner, skip)
    else:
        for key, child in _leaves.one_level(node)[0]:
            if child is not node:
                yield from _find(child, (*path, *key), skip)


def metrics(opt_state: Tree, prefix: str = "") -> dict[str, jax.Array]:
    """What every transform of an optimizer state did, as a flat dict of scalars to log.

    Finds each `NormState` however deep it lies (chain, masked, partition, MultiSteps,
    inject_hyperparams, nnx, replicated by pmap) and gives `grad_norm`, the norm before
    scaling; `grad_scale`, the smallest scale used; `clipped_fraction`, the share of
    steps on which a threshold bound; `nonfinite_steps`; and `grad_threshold` for rules
    with memory.

    A single state, or those under one `skip_spikes` (the outermost of each key), gives
    these keys; several give each its path in the state first, as in "0/grad_norm".

    Outside of traced code it warns of two mistakes that no type can show: norms that
    differ between devices (the gradients were not averaged), and sums that repeat on
    every step (averaged gradients were said to be split).

    Args:
        opt_state: an optimizer state, or any tree that holds one.
        prefix: put before every key, as in "train/".

    Returns:
        A flat dict from key to 0-d array (a vmapped state keeps its shape); empty where
        there is no NormState.

    Guarantees:
        - Found in every optax wrapper and in flax nnx (tests:
          test_monitor.py::test_found_wherever_it_is, ::test_in_flax_nnx).
        - Before the first step all is finite, and the fraction is 0 (tests:
          test_monitor.py::test_before_the_first_step).
        - Several states are told apart by path (tests:
          test_monitor.py::test_several_states_have_paths).
        - Usable under jit and scan, without warnings (tests:
          test_monitor.py::test_inside_traced_code).
        - A vmapped state keeps its shape (tests:
          test_monitor.py::test_vmapped_state_keeps_its_shape).
        - Norms that differ between devices are reported (tests:
          test_devices_stated.py::test_forgotten_averaging,
          ::test_forgotten_averaging_between_the_shards_of_one_array).
        - Sums that repeat on every step are reported, on some steps they are not
          (tests: test_devices_stated.py::test_averaged_gradients_said_to_be_split,
          ::test_one_repeated_step_is_counted_and_no_mistake).
        - Without a NormState it is empty (tests: test_monitor.py::test_adam_has_none).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_unitnorm as oun
        >>> tx = optax.chain(oun.clip_by_global_norm(2.5), optax.adam(1e-3))
        >>> grads = jnp.array([3.0, 4.0])
        >>> _, state = tx.update(grads, tx.init(grads))
        >>> for key, value in oun.metrics(state).items():
        ...     print(key, value)
        grad_norm 5.0
        grad_scale 0.5
        clipped_fraction 1.0
        nonfinite_steps 0
    """
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
    if _leaves.is_traced(state.grad_norm):
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
    """A table of the leaves of a tree: which is large, which holds NaN or inf.

    One row for each leaf that counts, those that are not finite first, then by share of
    the squared global norm: `path`, `shape`, `dtype`, `norm` (of order 2), `share`,
    `largest` (magnitude), `nan` and `inf` (number of such elements). It prints as a
    table, also in a notebook; as a tuple of rows it can be searched, and `.nonfinite`
    lists the paths of the bad leaves. For values outside of jit; under jit `leaf_norms`
    works.

    Args:
        tree: any tree of arrays and numbers, gradients as well as parameters.

    Returns:
        A tuple of rows that prints as a table.

    Raises:
        ValueError: if the tree holds traced arrays.

    Guarantees:
        - Every leaf that counts has its row, the largest first, and shares add up to 1
          (tests: test_monitor.py::test_describe_rows).
        - Shares are right at any magnitude, and any tree will do (tests:
          test_monitor.py::test_describe_anything).
        - Bad leaves are listed, with what they hold, and no good one (tests:
          test_monitor.py::test_describe_nonfinite).
        - Paths cannot inject HTML (tests:
          test_monitor.py::test_describe_escapes_paths).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, jnp.nan])}
        >>> table = oun.describe(grads)
        >>> print(table)
        path  shape  dtype    norm   share  largest  nan  inf
        b     2      float32   nan    nan%        1    1    0
        w     2      float32     5  100.0%        4    0    0
        >>> table.nonfinite
        ['b']
    """
    what = _measure.subject(tree, _scopes.each_leaf(), sharded_over=None)
    arrays = what.leaves.arrays
    if any(_leaves.is_traced(x) for x in arrays):
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
    columns = (what.leaves.at, arrays, norms, squares, finite, _stats(arrays))
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
        for i, x, norm, square, ok, (largest, nan, inf) in zip(*columns, strict=True)
    ]
    return Description(sorted(rows, key=_by_share))


def _by_share(row: LeafRow) -> float:
    return -2.0 if np.isnan(row.share) else -row.share


@jax.jit
def _stats(arrays: "list[jax.Array]") -> Any:
    def stats(x: jax.Array) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        bad = jnp.isnan(x)
        largest = jnp.max(jnp.where(bad, 0, jnp.abs(x)))
        return largest, jnp.sum(bad), jnp.sum(jnp.isinf(x))

    return [stats(x) for x in arrays]
