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
# Leaves of one shape are added elementwise, so many at a time, and summed once.
CHUNK = 64


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
    """An entry's leaves in chunks; the leaves of a chunk have one shape."""

    chunks: "list[list[jax.Array]]"
    kept: tuple[int, ...]


def _cell(leaves: "list[jax.Array]", entry: Entry, pack: bool) -> _Cell:
    alike: dict[Any, list[jax.Array]] = {}
    for i in entry.leaves:
        leaf = leaves[i]
        packable = pack and leaf.size < SMALL
        key = (leaf.shape, leaf.dtype) if packable else i
        alike.setdefault(key, []).append(leaf)
    chunks = [
        group[start : start + CHUNK]
        for group in alike.values()
        for start in range(0, len(group), CHUNK)
    ]
    return _Cell(chunks, entry.kept)


def local(
    leaves: "list[jax.Array]",
    entries: "list[Entry]",
    order: float,
    dtype: Any,
    *,
    pack: bool,
    peaks: "list[jax.Array] | None" = None,
) -> "list[jax.Array]":
    """The partial sums of each entry, shape (slots, *kept shape or ()).

    pack: whether small leaves of one shape may be added elementwise first.
    peaks: for orders other than 1, 2 and inf, the largest magnitude of each
      entry's block, as `order=inf` found it.
    """
    cells = [_cell(leaves, entry, pack) for entry in entries]
    magnitude = functools.partial(_magnitude, dtype=dtype)
    if order == 2:
        return _squares(cells, dtype)
    if order == math.inf:
        return [_largest(cell, magnitude, dtype) for cell in cells]
    if order == 1:
        return [_sum(cell, magnitude)[None] for cell in cells]
    assert peaks is not None

    def power(leaf: jax.Array, peak: jax.Array) -> jax.Array:
        return (magnitude(leaf) / peak) ** order

    return [
        _sum(cell, functools.partial(power, peak=_nonzero(peak)))[None]
        for cell, peak in zip(cells, peaks, strict=True)
    ]


def _nonzero(peak: jax.Array) -> jax.Array:
    peak = lax.stop_gradient(peak)
    return jnp.where((peak > 0) & jnp.isfinite(peak), peak, 1)


def _sums(cell: _Cell, fn: Any) -> "list[jax.Array]":
    """The sum of fn over each chunk."""
    totals: list[jax.Array] = []
    for chunk in cell.chunks:
        term = _pairwise(jnp.add, [fn(leaf) for leaf in chunk])
        keep = bool(cell.kept)
        totals.append(jnp.sum(term, axis=_axes(term, cell.kept), keepdims=keep))
    return totals


def _sum(cell: _Cell, fn: Any) -> jax.Array:
    return _together(_sums(cell, fn))


def _together(totals: "list[jax.Array]") -> jax.Array:
    return totals[0] if len(totals) == 1 else _total(jnp.stack(totals))


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


def _largest(cell: _Cell, magnitude: Any, dtype: Any) -> jax.Array:
    tops: list[jax.Array] = []
    for chunk in cell.chunks:
        top = _pairwise(jnp.maximum, [magnitude(leaf) for leaf in chunk])
        keep = bool(cell.kept)
        tops.append(jnp.max(top, axis=_axes(top, cell.kept), keepdims=keep))
    top = tops[0] if len(tops) == 1 else jnp.max(jnp.stack(tops), axis=0)
    # A maximum over devices drops NaN on some platforms: it needs a flag beside.
    nan = _sum(cell, lambda leaf: jnp.isnan(leaf).astype(dtype))
    return jnp.stack([top, jnp.minimum(nan, 1)])


def _squares(cells: "list[_Cell]", dtype: Any) -> "list[jax.Array]":
    leaves = [leaf for cell in cells for chunk in cell.chunks for leaf in chunk]
    if not _needs_range(leaves):
        return [_ordinary(_sum(cell, _square(dtype))) for cell in cells]
    chunks = [cell.chunks for cell in cells]
    kept = [cell.kept for cell in cells]
    # On a CPU a branch costs nothing and masks cost much; on a GPU or TPU both
    # sides of a branch would be executed, while masked sums fuse into one read.
    return lax.platform_dependent(
        chunks,
        cpu=functools.partial(_branched_squares, kept=kept, dtype=dtype),
        default=functools.partial(_masked_squares, kept=kept, dtype=dtype),
    )


def _square(dtype: Any, factor: "jax.Array | None" = None) -> Any:
    def square(leaf: jax.Array) -> jax.Array:
        parts = _parts(leaf, dtype)
        if factor is not None:
            parts = [part * factor for part in parts]
        return functools.reduce(jnp.add, [part * part for part in parts])

    return square


def _ordinary(total: jax.Array) -> jax.Array:
    zero = jnp.zeros_like(total)
    return jnp.stack([zero, total, zero])


def _branched_squares(chunks: Any, *, kept: Any, dtype: Any) -> "list[jax.Array]":
    low, high, _ = _range(dtype)
    sums = [
        [_chunk_squares(chunk, None, kept=axes, dtype=dtype) for chunk in cell]
        for cell, axes in zip(chunks, kept, strict=True)
    ]
    totals = [_together(s) for s in sums]
    inside = [jnp.all((t >= low) & (t <= high)) for t in totals]

    def rescaled(chunks: Any) -> "list[jax.Array]":
        # A second pass, only in the rare case, with a factor for each chunk (one
        # shared by all would be broadcast to the size of a leaf, in memory).
        parts: list[jax.Array] = []
        for cell_sums, cell, axes in zip(sums, chunks, kept, strict=True):
            slots = [
                _rescaled_squares(chunk, s, kept=axes, dtype=dtype)
                for chunk, s in zip(cell, cell_sums, strict=True)
            ]
            parts.append(_together(slots))
        return parts

    # No collective in either branch, so devices may disagree.
    return lax.cond(
        functools.reduce(jnp.logical_and, inside),
        lambda _: [_ordinary(total) for total in totals],
        rescaled,
        chunks,
    )


# jit, so that leaves alike are traced once however many there are.
@functools.partial(jax.jit, static_argnames=("kept", "dtype"))
def _chunk_squares(
    chunk: "list[jax.Array]", factor: "jax.Array | None", *, kept: Any, dtype: Any
) -> jax.Array:
    (total,) = _sums(_Cell([chunk], kept), _square(dtype, factor))
    return total


@functools.partial(jax.jit, static_argnames=("kept", "dtype"))
def _rescaled_squares(
    chunk: "list[jax.Array]", plain: jax.Array, *, kept: Any, dtype: Any
) -> jax.Array:
    """The three slots of a chunk, from a factor that its plain sum tells."""
    low, high, factor = _range(dtype)
    plain = lax.stop_gradient(plain)
    f = jnp.where(plain > high, 1 / factor, jnp.where(plain < low, factor, 1))
    f = f.astype(dtype)
    again = _chunk_squares(chunk, f, kept=kept, dtype=dtype)
    return jnp.stack([jnp.where(f == x, again, 0) for x in (1 / factor, 1, factor)])


@functools.partial(jax.jit, static_argnames=("kept", "dtype"))
def _chunk_slots(chunk: "list[jax.Array]", *, kept: Any, dtype: Any) -> jax.Array:
    low, high, factor = _range(dtype)
    large, small = math.sqrt(high), math.sqrt(low) * 2.0**-20

    def slot(leaf: jax.Array, which: int) -> jax.Array:
        total = jnp.zeros((), dtype)
        for part in _parts(leaf, dtype):
            size = jnp.abs(part)
            kind = jnp.where(size >= large, 0, jnp.where(size < small, 2, 1))
            # One select, then one square: nothing for a compiler to fold back.
            raised = jnp.where(kind == 2, part * factor, part)
            ranged = jnp.where(kind == 0, part * (1 / factor), raised)
            total = total + jnp.where(kind == which, ranged * ranged, 0)
        return total

    cell = _Cell([chunk], kept)
    slots = [_sums(cell, functools.partial(slot, which=w))[0] for w in range(3)]
    return jnp.stack(slots)


def _masked_squares(chunks: Any, *, kept: Any, dtype: Any) -> "list[jax.Array]":
    return [
        _together([_chunk_slots(chunk, kept=axes, dtype=dtype) for chunk in cell])
        for cell, axes in zip(chunks, kept, strict=True)
    ]


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
    product = _times(leaf, *(factor.astype(dtype) for factor in scale), changes)
    return product if drops is None else jnp.where(drops, 0, product)


@jax.custom_jvp
def _times(
    leaf: jax.Array,
    first: jax.Array,
    second: jax.Array,
    relative: jax.Array,
    changes: jax.Array,
) -> jax.Array:
    """leaf * first * second * exp(relative), where it changes; relative is zero."""
    del relative
    if leaf.dtype != jnp.bfloat16:
        return _times_plain(leaf, first, second, changes)
    # A NaN of unusual bits must not be carried into infinity by the rounding.
    first = jnp.where(jnp.isnan(first), jnp.nan, first)
    return lax.platform_dependent(
        leaf, first, second, changes, cpu=_times_in_bits, default=_times_plain
    )


@_times.defjvp
def _times_jvp(primals: Any, tangents: Any) -> Any:
    leaf, first, second, relative, changes = primals
    product = _times(*primals)
    every = jnp.ones_like(changes)
    weight = jnp.exp(relative)  # one, and its derivative is that of the divisor
    by_leaf = _times_plain(tangents[0], first * weight, second, changes)
    by_first = _times_plain(leaf, tangents[1] * weight, second, every)
    by_relative = _times_plain(product, tangents[3], jnp.ones_like(second), every)
    return product, by_leaf + jnp.where(changes, by_first + by_relative, 0)


def _times_plain(
    leaf: jax.Array, first: jax.Array, second: jax.Array, changes: jax.Array
) -> jax.Array:
    # Multiplied, never divided: compilers fuse a multiplication into whatever
    # comes next, and keep the result of a division in memory.
    parts = [part * first * second for part in _parts(leaf, first.dtype)]
    product = parts[0] if len(parts) == 1 else lax.complex(parts[0], parts[1])
    return jnp.where(changes, product.astype(leaf.dtype), leaf)


def _times_in_bits(
    leaf: jax.Array, first: jax.Array, second: jax.Array, changes: jax.Array
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
