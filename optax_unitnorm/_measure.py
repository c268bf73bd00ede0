"""Measure: from the leaves that count to one norm a block."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_unitnorm import _devices, _fold, _leaves
from optax_unitnorm._devices import Layout
from optax_unitnorm._types import Norms, Scope, Share, Tree


class _Block(NamedTuple):
    """Where the norms of one block stand in the vector of all of them."""

    start: int
    shape: tuple[int, ...]  # () or a leaf's shape with 1 in place of summed axes

    def stop(self) -> int:
        return self.start + math.prod(self.shape)


class Plan(NamedTuple):
    """All that is static about a measurement, so that it compiles once.

    layouts, kept: one a leaf. blocks: one a leaf, where its norms stand.
    size: how many norms there are; the first `own` of them are the gradients'.
    """

    order: float
    layouts: tuple[Layout, ...]
    kept: tuple[tuple[int, ...], ...]
    blocks: tuple[_Block, ...]
    size: int
    own: int
    watch: bool
    dtype: Any


class Measured(NamedTuple):
    """Norms, and whether every device sent the same sums (see NormState)."""

    norms: Norms
    repeated: jax.Array


def shapes_of(
    leaves: _leaves.Counted, layouts: "list[Layout]"
) -> "list[tuple[int, ...]]":
    """The shapes of the whole arrays."""
    return [
        _devices.global_shape(x.shape, layout)
        for x, layout in zip(leaves.arrays, layouts, strict=True)
    ]


class Subject(NamedTuple):
    """What is measured: a tree, its counted leaves, their layouts and shares."""

    tree: Tree
    leaves: _leaves.Counted
    layouts: list[Layout]
    shares: list[Share]


def subject(
    tree: Tree,
    scope: Scope,
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    params: Tree = None,
) -> Subject:
    """Picks the leaves that count, and says where they lie and who shares a norm."""
    leaves = _leaves.count(tree, mask)
    beside = None if params is None else _beside(tree, leaves, params)
    layouts = _devices.layouts(sharded_over, tree, leaves, beside)
    shares = scope(tree, leaves, shapes_of(leaves, layouts))
    shared = [share.block is not None for share in shares]
    for i, layout, share in zip(leaves.at, layouts, shares, strict=True):
        if share.kept and layout.dims is None:
            _devices.need_dims(layout, _leaves.paths(tree)[i])
    return Subject(
        tree,
        leaves.keep(shared),
        list(itertools.compress(layouts, shared)),
        list(itertools.compress(shares, shared)),
    )


def reference_of(what: Subject, params: Tree, sharded_over: Any) -> Subject:
    """The parameters beside a subject's leaves, as blocks of their own."""
    beside = _leaves.align("params", params, what.tree)
    arrays = [_leaves.as_array(beside[i]) for i in what.leaves.at]
    for i, x, param in zip(what.leaves.at, what.leaves.arrays, arrays, strict=True):
        if x.shape != param.shape:
            raise ValueError(
                "`params` must have the shapes of the gradients; got "
                f"{param.shape} at {_leaves.paths(what.tree)[i]!r}, where the "
                f"gradient has {x.shape}."
            )
    leaves = what.leaves._replace(arrays=arrays)
    layouts = _devices.layouts(sharded_over, what.tree, leaves)
    return what._replace(leaves=leaves, layouts=layouts)


def _beside(tree: Tree, leaves: _leaves.Counted, params: Tree) -> "list[Any] | None":
    try:
        beside = _leaves.align("params", params, tree)
    except ValueError:
        return None  # other trees than ours may be passed as params
    return [beside[i] for i in leaves.at]


def plan(what: Subject, order: float, reference: "Subject | None" = None) -> Plan:
    """The static part of measuring a subject (and its parameters)."""
    blocks: list[_Block] = []
    size = own = 0
    for part in (what, reference):
        if part is None:
            continue
        known: dict[Any, _Block] = {}
        shapes = shapes_of(part.leaves, part.layouts)
        for share, shape in zip(part.shares, shapes, strict=True):
            if share.block not in known:
                kept = tuple(n if d in share.kept else 1 for d, n in enumerate(shape))
                known[share.block] = _Block(size, kept if share.kept else ())
                size = known[share.block].stop()
            blocks.append(known[share.block])
        own = own or size
    parts = [part for part in (what, reference) if part is not None]
    dtypes = [x.dtype for part in parts for x in part.leaves.arrays]
    layouts = [layout for part in parts for layout in part.layouts]
    return Plan(
        order=order,
        layouts=tuple(layouts),
        kept=tuple(share.kept for part in parts for share in part.shares),
        blocks=tuple(blocks),
        size=size,
        own=own,
        watch=_devices.can_repeat(layouts),
        dtype=_fold.accumulator(dtypes),
    )


def measure(
    what: Subject, order: float, reference: "Subject | None" = None
) -> "tuple[Measured, Plan]":
    """The norms of every block, and of everything that counts."""
    arrays = what.leaves.arrays + (reference.leaves.arrays if reference else [])
    static = plan(what, order, reference)
    if not arrays:
        return _nothing(), static
    block, total, repeated = _norms(arrays, plan=static)
    own = block[: static.own]
    norms = Norms(
        block=own,
        size=jnp.asarray(_sizes(what, static), block.dtype),
        reference=block[static.own :] if reference else None,
        total=total,
    )
    return Measured(norms, repeated), static


def _nothing() -> Measured:
    empty, zero = jnp.zeros((0,), jnp.float32), jnp.zeros((), jnp.float32)
    return Measured(Norms(empty, empty, empty, zero), jnp.zeros((), bool))


def _sizes(what: Subject, static: Plan) -> np.ndarray:
    sizes = np.zeros((static.own,), np.float64)
    rows = zip(what.leaves.arrays, what.layouts, static.blocks, strict=False)
    for x, layout, block in rows:
        each = _devices.global_size(x.shape, layout) // math.prod(block.shape)
        sizes[block.start : block.stop()] += each
    return sizes


# Compiled by itself as well: eager steps would otherwise trace and compile the
# range check anew each time.
@functools.partial(jax.jit, static_argnames=("plan",))
def _norms(arrays: "list[jax.Array]", *, plan: Plan) -> Any:
    return _devices.manually(
        functools.partial(_norms_here, plan=plan), arrays, plan.layouts
    )


def _norms_here(arrays: "list[jax.Array]", *, plan: Plan) -> Any:
    peaks = None
    if plan.order not in (1, 2, math.inf):
        fixed = [lax.stop_gradient(x) for x in arrays]
        peaks, _ = _blocks(fixed, plan, math.inf, None)
    parts, repeated = _blocks(arrays, plan, plan.order, peaks)
    own_peaks = None if peaks is None else peaks[:, : plan.own]
    whole, peak = _fold.total(parts[:, : plan.own], own_peaks, plan.order)
    block = _fold.finish(parts, peaks, plan.order, plan.dtype)
    return block, _fold.finish(whole, peak, plan.order, plan.dtype), repeated


def _blocks(
    arrays: "list[jax.Array]", plan: Plan, order: float, peaks: "jax.Array | None"
) -> "tuple[jax.Array, jax.Array]":
    """The partial sums of every block, over all devices: (slots, blocks)."""
    columns: list[_devices.Column] = []
    places: list[int] = []  # the block of each column entry
    for axes, entries in _classes(plan).items():
        pieces = None if peaks is None else [_at(peaks, plan, e) for e in entries]
        sums = _fold.local(
            arrays,
            entries,
            order,
            plan.dtype,
            whole=_devices.is_local(),
            peaks=pieces,
        )
        if any(entry.kept for entry in entries):
            sums = _embedded(sums, entries, arrays, plan)
        columns.append(_devices.Column(axes, sums))
        for entry in entries:
            block = plan.blocks[entry.leaves[0]]
            places.extend(range(block.start, block.stop()))
    entries_sums, repeated = _devices.reduce(columns, order, watch=plan.watch)
    return _fold.merge(entries_sums, tuple(places), plan.size, order), repeated


def _embedded(
    sums: jax.Array, entries: "list[_fold.Entry]", arrays: "list[jax.Array]", plan: Plan
) -> jax.Array:
    """This device's columns of each entry among those of the whole leaf."""
    start, parts = 0, []
    for entry in entries:
        i = entry.leaves[0]
        kept = [n if d in entry.kept else 1 for d, n in enumerate(arrays[i].shape)]
        stop = start + math.prod(kept)
        part = sums[:, start:stop]
        if entry.kept:
            part = part.reshape(-1, *kept)
            part = _devices.embed(part, entry.kept, plan.layouts[i])
        parts.append(part.reshape(len(sums), -1))
        start = stop
    return jnp.concatenate(parts, axis=1)


def _classes(plan: Plan) -> "dict[Any, list[_fold.Entry]]":
    """Leaves that lie alike, and of those, the ones that share a block."""
    classes: dict[Any, dict[_Block, list[int]]] = {}
    for i, (layout, block) in enumerate(zip(plan.layouts, plan.blocks, strict=True)):
        axes = frozenset(layout.all_axes())
        classes.setdefault(axes, {}).setdefault(block, []).append(i)
    return {
        tuple(sorted(axes, key=str)): [
            _fold.Entry(tuple(leaves), plan.kept[leaves[0]])
            for leaves in blocks.values()
        ]
        for axes, blocks in classes.items()
    }


def _at(peaks: jax.Array, plan: Plan, entry: _fold.Entry) -> jax.Array:
    i = entry.leaves[0]
    block, layout = plan.blocks[i], plan.layouts[i]
    peak = peaks[0, block.start : block.stop()].reshape(block.shape)
    return _devices.piece(peak, layout)


def spread(rows: jax.Array, *, plan: Plan, leaves: int) -> "list[list[jax.Array]]":
    """What rows, shape (rows, blocks), say of each leaf, to broadcast to it."""
    single = [block.start for block in plan.blocks[:leaves] if not block.shape]
    columns = _fold.split(rows, list(dict.fromkeys(single)), whole=_devices.is_local())
    # Taken apart once a block, not once a leaf: tracing is what small leaves cost.
    shared = {start: list(column) for start, column in columns.items()}
    spread: list[list[jax.Array]] = []
    for block, layout in zip(plan.blocks[:leaves], plan.layouts, strict=False):
        if not block.shape:
            spread.append(shared[block.start])
            continue
        whole = rows[:, block.start : block.stop()].reshape(-1, *block.shape)
        spread.append([_devices.piece(x, layout) for x in whole])
    return spread
