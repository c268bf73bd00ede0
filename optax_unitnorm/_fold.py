"""Floating-point care: a norm of any order and magnitude, and the scaling by it.

A norm is a fold in three steps: `local` makes the partial sums of one device,
`merge` adds those of leaves that share a block (the device room adds those of
devices in between), `finish` turns them into norms.

For order 2 the partial sums have three slots: squares of ordinary numbers, of
large ones scaled down and of small ones scaled up. Sums of each slot add across
leaves and devices, so any magnitude needs no second collective.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Entry(NamedTuple):
    """Leaves (by position) whose partial sums add up on this device.

    An entry of a single leaf may keep some axes: one partial sum for each
    position along them.
    """

    leaves: tuple[int, ...]
    kept: tuple[int, ...] = ()


# Below this size XLA's CPU reductions write their operand to memory first, and a
# leaf costs a kernel or three whatever its bytes.
SMALL = 4096
# Below this size XLA's GPU compiler does not fuse three sums of a leaf into one read.
MEDIUM = 2**20


class _Packing(NamedTuple):
    """Leaves of one shape are added elementwise, to be summed once.

    below: of fewer elements than so many. together: at most so many leaves.
    """

    below: int
    together: int


_PACKED_ON_CPU = _Packing(SMALL, 64)
_PACKED_ELSEWHERE = _Packing(MEDIUM, 16)  # more would not fuse


def accumulator(dtypes: Any) -> Any:
    """float32, or float64 where a leaf has it."""
    wide = {jnp.dtype(jnp.float64), jnp.dtype(jnp.complex128)}
    return jnp.float64 if any(jnp.dtype(d) in wide for d in dtypes) else jnp.float32


class _Range(NamedTuple):
    """Where plain squares are exact enough, and the factors outside of it."""

    low: float
    high: float
    factor: float


def _range(dtype: Any) -> _Range:
    # A sum in [low, high] has lost nothing that a rounding would not have lost.
    # factor**-1 brings the squares of the largest numbers into range, factor
    # those of the smallest normal ones, with 2**40 elements to spare.
    exponent = jnp.finfo(dtype).maxexp
    return _Range(
        2.0 ** (-exponent // 2 + 4), 2.0 ** (exponent - 28), 2.0 ** (exponent // 2 + 2)
    )


def _needs_range(leaves: "list[jax.Array]") -> bool:
    # Squares of float16 and most float8 numbers cannot leave float32's range.
    return any(jnp.finfo(leaf.dtype).maxexp > 32 for leaf in leaves)


def _parts(leaf: jax.Array, dtype: Any) -> "list[jax.Array]":
    """A leaf as real arrays of the accumulator's dtype."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return [jnp.real(leaf).astype(dtype), jnp.imag(leaf).astype(dtype)]
    return [leaf.astype(dtype)]


def _magnitude(leaf: jax.Array, dtype: Any) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.abs(leaf.astype(dtype))
    # The derivative of |z| at zero is taken as zero, as it is for real numbers.
    nonzero = leaf != 0
    return jnp.where(nonzero, jnp.abs(jnp.where(nonzero, leaf, 1)), 0).astype(dtype)


def _axes(leaf: jax.Array, kept: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a for a in range(leaf.ndim) if a not in kept)


class _Cell(NamedTuple):
    """An entry's leaves in chunks; the leaves of a chunk have one shape.

    whole: whether they certainly lie on one device each.
    """

    chunks: "list[list[jax.Array]]"
    kept: tuple[int, ...]
    whole: bool


def _cell(
    leaves: "list[jax.Array]",
    entry: Entry,
    whole: bool,
    packing: _Packing = _PACKED_ON_CPU,
) -> _Cell:
    alike: dict[Any, list[jax.Array]] = {}
    for i in entry.leaves:
        leaf = leaves[i]
        packable = whole and leaf.size < packing.below
        key = (leaf.shape, leaf.dtype) if packable else i
        alike.setdefault(key, []).append(leaf)
    groups = [_chunks(group, packing.together) for group in alike.values()]
    return _Cell([chunk for group in groups for chunk in group], entry.kept, whole)


def _chunks(group: "list[jax.Array]", most: int) -> "list[list[jax.Array]]":
    """At most so many in each, and of few lengths, since each is traced once."""
    number = -(-len(group) // most)
    length = -(-len(group) // number)
    return [group[i : i + length] for i in range(0, len(group), length)]


def local(
    leaves: "list[jax.Array]",
    entries: "list[Entry]",
    order: float,
    dtype: Any,
    *,
    whole: bool,
    peaks: "list[jax.Array] | None" = None,
) -> jax.Array:
    """The partial sums of all entries side by side, shape (slots, columns).

    An entry has a column, or one for each position along the axes it keeps.

    whole: whether the leaves certainly lie on one device each. Only then are
      small ones of one shape added elementwise first, and summed a few at a time.
    peaks: for orders other than 1, 2 and inf, the largest magnitude of each
      entry's block, as `order=inf` found it.
    """
    cells = [_cell(leaves, entry, whole) for entry in entries]
    magnitude = functools.partial(_magnitude, dtype=dtype)
    if order == 2:
        packed = [_cell(leaves, entry, whole, _PACKED_ELSEWHERE) for entry in entries]
        return _squares(cells, packed, dtype)
    if order == math.inf:
        return _largest(cells, dtype)
    if order == 1:
        return _sums(cells, magnitude)
    assert peaks is not None
    return _powers(cells, peaks, order, dtype)


def _powers(
    cells: "list[_Cell]", peaks: "list[jax.Array]", order: float, dtype: Any
) -> jax.Array:
    """The sums of powers of magnitudes, in units of their block's peak."""
    # A whole power is a product or two, where any other is a call.
    whole_power = int(order) if order == int(order) else None

    def sum_of(peak: jax.Array, cell: _Cell, chunk: "list[jax.Array]") -> jax.Array:
        # In a unit of its own at first, and an exponent: what all leaves share would
        # be broadcast to the size of a leaf, in memory, by XLA for CPUs.
        top = lax.stop_gradient(_top(chunk, cell.kept, dtype))
        unit = _nonzero(top)
        first, second = _inverse(unit)
        exponent = whole_power or jnp.where(jnp.isnan(top), top, order)

        def power(leaf: jax.Array) -> jax.Array:
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                return (_magnitude(leaf, dtype) * first * second) ** exponent
            # The magnitude last: the peak's is then not kept in memory to be shared.
            return jnp.abs(leaf.astype(dtype) * first * second) ** exponent

        ratio = jnp.where(top > 0, unit / _nonzero(peak), 0)
        return _chunk_sum(cell, chunk, power) * ratio**order

    return _joined(
        [
            _columns([cell], functools.partial(sum_of, peak))
            for cell, peak in zip(cells, peaks, strict=True)
        ]
    )


def _joined(parts: "list[jax.Array]") -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _inverse(peak: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1 / peak as two factors, since it may be subnormal."""
    unit = _power_of_two(-_exponent(peak), peak.dtype)
    return unit, 1 / (peak * unit)


def _nonzero(peak: jax.Array) -> jax.Array:
    peak = lax.stop_gradient(peak)
    return jnp.where((peak > 0) & jnp.isfinite(peak), peak, 1)


def _sums(cells: "list[_Cell]", fn: Any) -> jax.Array:
    """The sums of fn, shape (1, columns)."""
    return _columns(cells, lambda cell, chunk: _chunk_sum(cell, chunk, fn))


def _columns(
    cells: "list[_Cell]", fold_chunk: Any, *, largest: bool = False
) -> jax.Array:
    """What fold_chunk makes of each chunk, those of a cell folded: (1, columns)."""
    rows = [
        fold_chunk(cell, chunk).reshape(1, -1)
        for cell in cells
        for chunk in cell.chunks
    ]
    return _by_cell(_joined(rows), cells, largest=largest)


def _by_cell(
    columns: jax.Array, cells: "list[_Cell]", *, largest: bool = False
) -> jax.Array:
    """One column for the chunks of a cell. Only cells that keep no axis have many."""
    if all(len(cell.chunks) == 1 for cell in cells):
        return columns
    start, parts = 0, []
    for cell in cells:
        many = len(cell.chunks)
        stop = start + (many if many > 1 else _width(cell))
        part = columns[:, start:stop]
        if many > 1:
            part = jnp.max(part, axis=1) if largest else _total(part.T)
            part = part[:, None]
        parts.append(part)
        start = stop
    return _joined(parts)


def _width(cell: _Cell) -> int:
    shape = cell.chunks[0][0].shape
    return math.prod(shape[a] for a in cell.kept)


def _chunk_sum(cell: _Cell, chunk: "list[jax.Array]", fn: Any) -> jax.Array:
    if cell.whole and not cell.kept and _FEW < chunk[0].size < SMALL:
        chunk = _shortened(chunk)
    term = _pairwise(jnp.add, [fn(leaf) for leaf in chunk])
    total = _short_sum(term, _axes(term, cell.kept), whole=cell.whole)
    return total if cell.kept else total.reshape(())


def _short_sum(term: jax.Array, axes: tuple[int, ...], *, whole: bool) -> jax.Array:
    """The sum over some axes, which stay as axes of length one.

    XLA's CPU reductions of few elements keep their operand in memory, and sum short
    axes in one chain of additions, 1024 and more. Both are avoided by summing few
    elements at a time.
    """
    if term.size >= SMALL:
        return jnp.sum(term, axis=axes, keepdims=True)
    if not whole:
        return _lane_sum(term, axes)
    shape = [1 if a in axes else n for a, n in enumerate(term.shape)]
    kept = [n for a, n in enumerate(term.shape) if a not in axes]
    term = jnp.moveaxis(term, axes, range(-len(axes), 0)).reshape(*kept, -1)
    while term.shape[-1] > _FEW:
        rest = -term.shape[-1] % _FEW
        term = jnp.pad(term, [(0, 0)] * len(kept) + [(0, rest)])
        term = _kept_apart(jnp.sum(term.reshape(*kept, -1, _FEW), axis=-1))
    return jnp.sum(term, axis=-1).reshape(shape)


_FEW = 16
_LANES = 31  # prime, so that no axis falls into step with them


def _shortened(chunk: "list[jax.Array]") -> "list[jax.Array]":
    """Few small leaves as about eight shorter ones of one length, zeros added."""
    parts = max(1, 8 // len(chunk))
    length = -(-chunk[0].size // parts)
    shorter: list[jax.Array] = []
    for leaf in chunk:
        flat = leaf.reshape(-1)
        for start in range(0, leaf.size, length):
            part = flat[start : start + length]
            shorter.append(jnp.pad(part, (0, length - part.size)))
    return shorter


def _lane_sum(term: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The same in one reduction, where each may cost a collective."""
    # XLA cuts an axis into windows of 32: the chain is as long as a window is large.
    if math.prod(min(term.shape[a], 32) for a in axes) <= 64:
        return jnp.sum(term, axis=axes, keepdims=True)
    lane = lax.iota(jnp.int32, term.size).reshape(*term.shape, 1) % _LANES
    own = lane == lax.broadcasted_iota(jnp.int32, (*term.shape, _LANES), term.ndim)
    lanes = jnp.where(own, term[..., None], 0)
    return jnp.sum(_kept_apart(jnp.sum(lanes, axis=axes, keepdims=True)), axis=-1)


def _kept_apart(partial: jax.Array) -> jax.Array:
    """The same numbers; XLA does not join the sum before and the one after."""
    info = jnp.finfo(partial.dtype)
    return lax.reduce_precision(partial, info.nexp, info.nmant)


def _total(values: jax.Array) -> jax.Array:
    """The sum over the first axis by halves: a chain of thousands loses bits."""
    while len(values) > 8:
        half = (len(values) + 1) // 2
        rest = values[half:]
        if len(values) % 2:
            rest = jnp.concatenate([rest, jnp.zeros_like(values[:1])])
        values = values[:half] + rest
    return jnp.sum(values, axis=0)


def _pairwise(fn: Any, terms: "list[jax.Array]") -> jax.Array:
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [fn(a, b) for a, b in pairs] + odd
    return terms[0]


def _largest(cells: "list[_Cell]", dtype: Any) -> jax.Array:
    tops = _columns(
        cells, lambda cell, chunk: _top(chunk, cell.kept, dtype), largest=True
    )
    # A maximum drops NaN on some platforms: it needs a flag beside. A sum of squares
    # carries it, and no step of it is shared with the maximum, to be kept in memory.
    nan = jnp.isnan(lax.stop_gradient(_sums(cells, _square(dtype))))
    return jnp.concatenate([tops, nan.astype(dtype)])


def _top(chunk: "list[jax.Array]", kept: tuple[int, ...], dtype: Any) -> jax.Array:
    """The largest magnitude; where axes are kept, the others stay as well."""
    top = _pairwise(jnp.maximum, [_magnitude(leaf, dtype) for leaf in chunk])
    return jnp.max(top, axis=_axes(top, kept), keepdims=bool(kept))


def _squares(cells: "list[_Cell]", packed: "list[_Cell]", dtype: Any) -> jax.Array:
    leaves = [leaf for cell in cells for chunk in cell.chunks for leaf in chunk]
    if not _needs_range(leaves):
        return _ordinary(_sums(cells, _square(dtype)))

    by_row = _sums_by_row if cells[0].whole else _sums_together

    def masked(_: Any, chunks: Any, *, add: Any) -> jax.Array:
        return _masked_squares(_refilled(packed, chunks), dtype, add)

    # On a CPU a branch costs nothing and masks cost much; on a GPU or TPU both
    # sides of a branch would be executed, while masked sums fuse into one read.
    return lax.platform_dependent(
        [cell.chunks for cell in cells],
        [cell.chunks for cell in packed],
        cpu=lambda chunks, _: _branched_squares(_refilled(cells, chunks), dtype),
        tpu=functools.partial(masked, add=_sums_apart),
        default=functools.partial(masked, add=by_row),
    )


def _square(dtype: Any, factor: "jax.Array | None" = None) -> Any:
    def square(leaf: jax.Array) -> jax.Array:
        parts = _parts(leaf, dtype)
        if factor is not None:
            parts = [part * factor for part in parts]
        return functools.reduce(jnp.add, [part * part for part in parts])

    return square


def _ordinary(sums: jax.Array) -> jax.Array:
    """The three slots, shape (3, columns), of sums in range."""
    zero = jnp.zeros_like(sums)
    return jnp.concatenate([zero, sums, zero])


def _branched_squares(cells: "list[_Cell]", dtype: Any) -> jax.Array:
    low, high, factor = _range(dtype)
    square = functools.partial(_chunk_squares, dtype=dtype)
    each = [
        square(chunk, None, kept=cell.kept, whole=cell.whole)
        for cell in cells
        for chunk in cell.chunks
    ]
    sums = _joined([x.reshape(1, -1) for x in each])
    totals = _by_cell(sums, cells)
    # Each scalar that a branch is given keeps a buffer of its own. Where they are many
    # a few are put together; not all, since its place makes a leaf's code its own.
    scalars = [x for x in each if not x.ndim]
    together = _FEW if len(scalars) > 64 else 1
    few = [
        jnp.stack(scalars[i : i + together]) for i in range(0, len(scalars), together)
    ]

    def again(operands: Any) -> jax.Array:
        # A second pass, only in the rare case, with a factor for each chunk that its
        # plain sum tells (one shared by all would be broadcast to the size of a
        # leaf, in memory).
        chunks, few = operands
        scalars = iter([x for vector in few for x in vector])
        plain = iter([x if x.ndim else next(scalars) for x in each])
        rows = [
            square(chunk, unit(next(plain)), kept=cell.kept, whole=cell.whole)
            for cell in _refilled(cells, chunks)
            for chunk in cell.chunks
        ]
        scaled, used = _joined([x.reshape(1, -1) for x in rows]), unit(sums)
        slots = [jnp.where(used == x, scaled, 0) for x in (1 / factor, 1, factor)]
        return _by_cell(jnp.concatenate(slots), cells)

    def unit(plain: jax.Array) -> jax.Array:
        plain = lax.stop_gradient(plain)
        f = jnp.where(plain > high, 1 / factor, jnp.where(plain < low, factor, 1))
        return f.astype(dtype)

    # No collective in either branch, so devices may disagree.
    return lax.cond(
        jnp.all((totals >= low) & (totals <= high)),
        lambda _: _ordinary(totals),
        again,
        ([cell.chunks for cell in cells], lax.optimization_barrier(few)),
    )


def _refilled(cells: "list[_Cell]", chunks: Any) -> "list[_Cell]":
    return [c._replace(chunks=x) for c, x in zip(cells, chunks, strict=True)]


# jit, so that leaves alike are traced once however many there are.
@functools.partial(jax.jit, static_argnames=("kept", "whole", "dtype"))
def _chunk_squares(
    chunk: "list[jax.Array]",
    factor: "jax.Array | None",
    *,
    kept: Any,
    whole: bool,
    dtype: Any,
) -> jax.Array:
    return _chunk_sum(_Cell([chunk], kept, whole), chunk, _square(dtype, factor))


@functools.partial(jax.jit, static_argnames=("kept", "dtype", "add"))
def _chunk_slots(
    chunk: "list[jax.Array]", *, kept: Any, dtype: Any, add: Any
) -> "list[jax.Array]":
    """The sums of the three slots, each of shape (1, columns)."""
    terms = [
        _pairwise(jnp.add, [_slot(leaf, which=which, dtype=dtype) for leaf in chunk])
        for which in range(3)
    ]
    return [x.reshape(1, -1) for x in add(terms, _axes(terms[0], kept))]


def _sums_apart(terms: "list[jax.Array]", axes: tuple[int, ...]) -> Any:
    return [jnp.sum(term, axis=axes) for term in terms]


def _sums_by_row(terms: "list[jax.Array]", axes: tuple[int, ...]) -> Any:
    """Of few elements each: on GPUs XLA fuses three sums of a leaf only so."""
    if len(axes) < terms[0].ndim:
        return _sums_apart(terms, axes)
    size = terms[0].size
    # As few partial sums as XLA leaves each row to one step.
    row = 128 if size < MEDIUM else min(max(4096, size // 4096), 16384)
    rows = -(-size // row)
    rest = rows * row - size
    flat = [jnp.pad(term.reshape(-1), (0, rest)).reshape(rows, row) for term in terms]
    return [jnp.sum(term, axis=1) for term in flat]


def _sums_together(terms: "list[jax.Array]", axes: tuple[int, ...]) -> Any:
    """Where a leaf may lie on many devices, and must not be reshaped."""
    if len(axes) < terms[0].ndim or terms[0].size >= MEDIUM:
        return _sums_apart(terms, axes)
    return list(jnp.sum(jnp.stack(terms, axis=-1), axis=axes))


@functools.partial(jax.jit, static_argnames=("which", "dtype"))
def _slot(leaf: jax.Array, *, which: int, dtype: Any) -> jax.Array:
    """The squares that one slot takes, zero elsewhere."""
    low, high, factor = _range(dtype)
    large, small = math.sqrt(high), math.sqrt(low) * 2.0**-20
    total = jnp.zeros((), dtype)
    for part in _parts(leaf, dtype):
        size = jnp.abs(part)
        kind = jnp.where(size >= large, 0, jnp.where(size < small, 2, 1))
        # One select, then one square: nothing for a compiler to fold back.
        raised = jnp.where(kind == 2, part * factor, part)
        ranged = jnp.where(kind == 0, part * (1 / factor), raised)
        total = total + jnp.where(kind == which, ranged * ranged, 0)
    return total


def _masked_squares(cells: "list[_Cell]", dtype: Any, add: Any) -> jax.Array:
    return _joined([_cell_slots(cell, dtype, add) for cell in cells])


def _cell_slots(cell: _Cell, dtype: Any, add: Any) -> jax.Array:
    slots = [
        _chunk_slots(chunk, kept=cell.kept, dtype=dtype, add=add)
        for chunk in cell.chunks
    ]
    # Slot by slot: put together leaf by leaf, each would take kernels of its own.
    rows = [_joined(list(row)) for row in zip(*slots, strict=True)]
    if not cell.kept:
        rows = [jnp.sum(_kept_apart(jnp.concatenate(rows)), axis=1, keepdims=True)]
    return jnp.concatenate(rows)


def merge(parts: jax.Array, blocks: "tuple[int, ...]", size: int, order: float) -> Any:
    """Adds the columns of (slots, entries) that belong to the same block."""
    if blocks == tuple(range(size)):
        return parts
    if size == 1:
        return fold(parts, order)[:, None]
    ids = np.asarray(blocks)
    segment = jax.ops.segment_max if order == math.inf else jax.ops.segment_sum
    merged = segment(parts.T, ids, num_segments=size).T
    return jnp.maximum(merged, 0) if order == math.inf else merged


def fold(parts: jax.Array, order: float) -> jax.Array:
    """All columns of (slots, entries) as one, shape (slots,)."""
    if order == math.inf:
        return jnp.max(parts, axis=1, initial=0)
    return _total(parts.T)


def total(
    parts: jax.Array, peaks: "jax.Array | None", order: float
) -> "tuple[jax.Array, jax.Array | None]":
    """The partial sums of everything, from those of all blocks."""
    if peaks is None:
        return fold(parts, order), None
    peak = fold(peaks, math.inf)
    ratio = _nonzero(peaks[0]) / _nonzero(peak[0])
    ratio = jnp.where(peaks[0] > 0, ratio, 0)
    return fold(parts * (ratio**order)[None], order), peak


def finish(
    parts: jax.Array, peaks: "jax.Array | None", order: float, dtype: Any
) -> jax.Array:
    """Norms from partial sums; parts and peaks have their slots first."""
    if order == math.inf:
        return jnp.where(parts[1] > 0, jnp.nan, parts[0])
    if order == 1:
        return parts[0]
    if order == 2:
        return _root(parts, dtype)
    assert peaks is not None
    sums = parts[0]
    some = sums > 0
    root = jnp.where(some, jnp.where(some, sums, 1) ** (1 / order), sums)
    norm = _nonzero(peaks[0]) * root
    return jnp.where(peaks[1] > 0, jnp.nan, norm)


def _root(parts: jax.Array, dtype: Any) -> jax.Array:
    factor = _range(dtype).factor
    large, middle, small = parts[0], parts[1], parts[2]
    is_large, is_middle = large != 0, middle != 0
    # Each slot in the unit of the largest one in use. The factors are selected,
    # not constant, and applied twice: their square is out of range, and a
    # compiler would fold two constants into it.
    down = jnp.where(is_large, 1 / factor, 1).astype(dtype)
    lower = jnp.where(is_middle, 1 / factor, 1).astype(dtype)
    middle = middle * down * down
    small = jnp.where(is_large, 0, small * lower * lower)
    square = large + middle + small
    unit = jnp.where(is_large, factor, jnp.where(is_middle, 1, 1 / factor))
    # sqrt has no derivative at zero; a norm of zero gets zero.
    zero = square == 0
    root = jnp.sqrt(jnp.where(zero, 1, square))
    return jnp.where(zero, 0, root * unit.astype(dtype))


class Scale(NamedTuple):
    """A scale as two factors, first * second, each well inside its range.

    A scale itself may be too large or too small for float32 (a gradient of
    norm 1e38 clipped to 1e-30) while what it makes of the gradients is not.
    `second` is a power of two, and 1 unless the scale is out of range.
    `relative` is zero and carries the derivative of the divisor's logarithm,
    for the derivative of the scale itself may be out of range as well.
    """

    first: jax.Array
    second: jax.Array
    relative: jax.Array

    def value(self) -> jax.Array:
        return self.first * self.second


def divide(num: jax.Array, den: jax.Array) -> Scale:
    """num / den as a Scale; den > 0.

    Both are brought near one by powers of two first, so that the quotient does
    not leave the range.
    """
    logarithm = jnp.log(den)
    relative = lax.stop_gradient(logarithm) - logarithm
    den = lax.stop_gradient(den)
    dtype = num.dtype
    room = jnp.finfo(dtype).maxexp - 5  # 123 in float32
    above, below = _exponent(num), _exponent(den)
    ratio = (num * _power_of_two(-above, dtype)) / (den * _power_of_two(-below, dtype))
    exponent = above - below
    first = jnp.clip(exponent, -room, room)
    # What would be smaller than any normal result is zero.
    inside = exponent - first >= 2 - jnp.finfo(dtype).maxexp
    factor = jnp.where(inside, _power_of_two(first, dtype), 0)
    return Scale(ratio * factor, _power_of_two(exponent - first, dtype), relative)


def _exponent(x: jax.Array) -> jax.Array:
    """The exponent of x, kept where its power of two and the inverse are normal."""
    info = jnp.finfo(x.dtype)
    _, exponent = jnp.frexp(lax.stop_gradient(x))
    return jnp.clip(exponent - 1, 2 - info.maxexp, info.maxexp - 2).astype(jnp.int32)


def _power_of_two(exponent: jax.Array, dtype: Any) -> jax.Array:
    """2**exponent, exactly, for exponents of normal numbers."""
    info = jnp.finfo(dtype)
    word = jnp.int64 if jnp.dtype(dtype) == jnp.float64 else jnp.int32
    biased = jnp.maximum(exponent + (info.maxexp - 1), 0).astype(word)
    return lax.bitcast_convert_type(biased << info.nmant, dtype)


def split(rows: jax.Array, at: "list[int]", *, whole: bool) -> "dict[int, jax.Array]":
    """Columns of rows, by position; whole as in `local`."""

    def cut(rows: jax.Array) -> "list[jax.Array]":
        return [lax.index_in_dim(rows, i, 1, keepdims=False) for i in at]

    def cut_apart(rows: jax.Array) -> "list[jax.Array]":
        # A position fused into the loop over a leaf makes each leaf's code its own,
        # and compiling slow. What leaves a branch is not fused into anything.
        return lax.cond(
            jnp.any(rows != rows[:, :1]), cut, lambda x: [x[:, 0]] * len(at), rows
        )

    columns = (
        lax.platform_dependent(rows, cpu=cut_apart, default=cut)
        if whole and len(at) > 1
        else cut(rows)
    )
    return dict(zip(at, columns, strict=True))


@jax.jit
def scaled(
    leaf: jax.Array, scale: Scale, changes: jax.Array, drops: "jax.Array | None"
) -> jax.Array:
    """leaf * scale, rounded once to the leaf's dtype.

    Where `changes` is False the leaf keeps its bits: a multiplication by one
    would flush subnormal numbers, a select does not. Where `drops` is True the
    result is zero whatever the leaf holds.
    """
    dtype = accumulator([leaf.dtype])
    return _times(leaf, *(factor.astype(dtype) for factor in scale), changes, drops)


@jax.custom_jvp
def _times(
    leaf: jax.Array,
    first: jax.Array,
    second: jax.Array,
    relative: jax.Array,
    changes: jax.Array,
    drops: "jax.Array | None",
) -> jax.Array:
    """leaf * first * second * exp(relative), where it changes; relative is zero."""
    del relative
    if leaf.dtype != jnp.bfloat16:
        return _times_plain(leaf, first, second, changes, drops)
    # A NaN of unusual bits must not be carried into infinity by the rounding.
    first = jnp.where(jnp.isnan(first), jnp.nan, first)
    return lax.platform_dependent(
        leaf, first, second, changes, drops, cpu=_times_in_bits, default=_times_plain
    )


@_times.defjvp
def _times_jvp(primals: Any, tangents: Any) -> Any:
    leaf, first, second, relative, changes, drops = primals
    product = _times(*primals)
    every = jnp.ones_like(changes)
    weight = jnp.exp(relative)  # one, and its derivative is that of the divisor
    by_leaf = _times_plain(tangents[0], first * weight, second, changes, drops)
    by_first = _times_plain(leaf, tangents[1] * weight, second, every, drops)
    by_relative = _times_plain(product, tangents[3], jnp.ones_like(second), every, None)
    return product, by_leaf + jnp.where(changes, by_first + by_relative, 0)


def _times_plain(
    leaf: jax.Array,
    first: jax.Array,
    second: jax.Array,
    changes: jax.Array,
    drops: "jax.Array | None",
) -> jax.Array:
    # Multiplied, never divided: compilers fuse a multiplication into whatever
    # comes next, and keep the result of a division in memory.
    parts = [part * first * second for part in _parts(leaf, first.dtype)]
    product = parts[0] if len(parts) == 1 else lax.complex(parts[0], parts[1])
    chosen = jnp.where(changes, product.astype(leaf.dtype), leaf)
    return chosen if drops is None else jnp.where(drops, 0, chosen)


def _times_in_bits(
    leaf: jax.Array,
    first: jax.Array,
    second: jax.Array,
    changes: jax.Array,
    drops: "jax.Array | None",
) -> jax.Array:
    """_times_plain for bfloat16, reading, rounding and selecting in integers.

    On CPU a conversion from float32 is never fused into what comes next, and one
    to float32 is shared with the norm's and kept: a copy of all gradients. The
    same in integer operations leaves no copy.
    """
    half = jnp.uint32(0x7FFF)
    bits = lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    product = lax.bitcast_convert_type(bits, jnp.float32) * first * second
    word = lax.bitcast_convert_type(product, jnp.uint32)
    word = word + (half + ((word >> 16) & 1))  # to nearest, ties to even
    chosen = jnp.where(changes, word, bits) >> 16
    if drops is not None:
        chosen = jnp.where(drops, jnp.uint32(0), chosen)
    return lax.bitcast_convert_type(chosen.astype(jnp.uint16), jnp.bfloat16)


def clamped(leaf: jax.Array, high: Any, low: Any) -> jax.Array:
    """Elements beyond a bound become the bound, rounded to the leaf's dtype.

    The others keep their bits. Without `low` it is -high, and complex elements
    are bounded by magnitude.
    """
    dtype = accumulator([leaf.dtype])
    high = jnp.asarray(high).astype(dtype)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        size = _magnitude(leaf, dtype)
        binds = size > high
        scale = divide(jnp.where(binds, high, 1), jnp.where(binds, size, 1))
        return scaled(leaf, scale, binds, None)
    low = -high if low is None else jnp.asarray(low).astype(dtype)
    wide = leaf.astype(dtype)
    below = jnp.where(wide < low, low.astype(leaf.dtype), leaf)
    return jnp.where(wide > high, high.astype(leaf.dtype), below)
