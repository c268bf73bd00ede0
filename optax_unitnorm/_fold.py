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


# Leaves below this many elements are packed before they are summed: the cost of
# a small leaf is its reduction's call and compilation, not its bytes.
PACKED_SIZE = 16384


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


def _packed(
    leaves: "list[jax.Array]", entries: "list[Entry]", pack: bool
) -> "tuple[list[jax.Array], list[Entry]]":
    """The leaves in use, small ones that share an entry joined into one."""
    used: list[jax.Array] = []
    renumbered: list[Entry] = []
    for entry in entries:
        small: dict[Any, list[jax.Array]] = {}
        whole: list[jax.Array] = []
        for leaf in (leaves[i] for i in entry.leaves):
            packable = pack and not entry.kept and leaf.size <= PACKED_SIZE
            (small.setdefault(leaf.dtype, []) if packable else whole).append(leaf)
        for group in small.values():
            joined = [jnp.concatenate([leaf.ravel() for leaf in group])]
            whole += joined if len(group) > 1 else group
        first = len(used)
        used += whole
        renumbered.append(Entry(tuple(range(first, len(used))), entry.kept))
    return used, renumbered


def local(
    leaves: "list[jax.Array]",
    entries: "list[Entry]",
    order: float,
    dtype: Any,
    *,
    pack: bool,
    peaks: "jax.Array | None" = None,
) -> "list[jax.Array]":
    """The partial sums of each entry, shape (slots, *kept shape or ()).

    Orders other than 1, 2 and inf take `peaks`, the largest magnitude of each
    block as `local(..., order=inf)` found it, one array an entry.
    """
    leaves, entries = _packed(leaves, entries, pack)
    if order == 2:
        return _squares(leaves, entries, dtype)
    if order == math.inf:
        return [
            jnp.stack([_fold_max(leaves, e, dtype), _fold_nan(leaves, e, dtype)])
            for e in entries
        ]
    if order == 1:
        return [
            _sum(leaves, e, lambda x: _magnitude(x, dtype))[None] for e in entries
        ]
    assert peaks is not None
    return [
        _sum(leaves, e, lambda x, p=p: (_magnitude(x, dtype) / p) ** order)[None]
        for e, p in zip(entries, map(_nonzero, peaks), strict=True)
    ]


def _nonzero(peak: jax.Array) -> jax.Array:
    peak = lax.stop_gradient(peak)
    return jnp.where((peak > 0) & jnp.isfinite(peak), peak, 1)


def _sum(leaves: Any, entry: Entry, fn: Any) -> jax.Array:
    if entry.kept:
        (i,) = entry.leaves
        term = fn(leaves[i])
        return jnp.sum(term, axis=_axes(term, entry.kept), keepdims=True)
    sums = [jnp.sum(fn(leaves[i])) for i in entry.leaves]
    # Stacked, not chained: a chain of a thousand additions loses 5 bits.
    return sums[0] if len(sums) == 1 else jnp.sum(jnp.stack(sums))


def _fold_max(leaves: Any, entry: Entry, dtype: Any) -> jax.Array:
    if entry.kept:
        (i,) = entry.leaves
        size = _magnitude(leaves[i], dtype)
        return jnp.max(size, axis=_axes(size, entry.kept), keepdims=True)
    tops = [jnp.max(_magnitude(leaves[i], dtype)) for i in entry.leaves]
    return tops[0] if len(tops) == 1 else jnp.max(jnp.stack(tops))


def _fold_nan(leaves: Any, entry: Entry, dtype: Any) -> jax.Array:
    # A maximum over devices drops NaN on some platforms: it needs a flag beside.
    return jnp.minimum(_sum(leaves, entry, lambda x: jnp.isnan(x).astype(dtype)), 1)


def _squares(
    leaves: "list[jax.Array]", entries: "list[Entry]", dtype: Any
) -> "list[jax.Array]":
    if not _needs_range(leaves):
        return [_ordinary(s) for s in _plain_squares(leaves, entries, dtype, None)]
    # On a CPU a branch costs nothing and masks cost much; on a GPU or TPU both
    # sides of a branch would be executed, while masked sums fuse into one read.
    return lax.platform_dependent(
        leaves,
        cpu=functools.partial(_branched_squares, entries=entries, dtype=dtype),
        default=functools.partial(_masked_squares, entries=entries, dtype=dtype),
    )


def _ordinary(total: jax.Array) -> jax.Array:
    zero = jnp.zeros_like(total)
    return jnp.stack([zero, total, zero])


def _plain_squares(
    leaves: Any, entries: Any, dtype: Any, factors: Any
) -> "list[jax.Array]":
    def squares(leaf: jax.Array, factor: Any) -> jax.Array:
        parts = _parts(leaf, dtype)
        if factor is not None:
            parts = [part * factor for part in parts]
        return functools.reduce(jnp.add, [part * part for part in parts])

    factors = [None] * len(entries) if factors is None else factors
    return [
        _sum(leaves, e, functools.partial(squares, factor=f))
        for e, f in zip(entries, factors, strict=True)
    ]


def _branched_squares(
    leaves: "list[jax.Array]", *, entries: "list[Entry]", dtype: Any
) -> "list[jax.Array]":
    low, high, factor = _range(dtype)
    sums = _plain_squares(leaves, entries, dtype, None)
    inside = [jnp.all((s >= low) & (s <= high)) for s in sums]

    def rescaled(leaves: "list[jax.Array]") -> "list[jax.Array]":
        # A second pass, only in the rare case, with one factor for each block.
        factors = [
            jnp.where(s > high, 1 / factor, jnp.where(s < low, factor, 1)).astype(dtype)
            for s in map(lax.stop_gradient, sums)
        ]
        again = _plain_squares(leaves, entries, dtype, factors)
        return [
            jnp.stack([jnp.where(f == slot, s, 0) for slot in (1 / factor, 1, factor)])
            for s, f in zip(again, factors, strict=True)
        ]

    # No collective in either branch, so devices may disagree.
    return lax.cond(
        functools.reduce(jnp.logical_and, inside),
        lambda _: [_ordinary(s) for s in sums],
        rescaled,
        leaves,
    )


def _masked_squares(
    leaves: "list[jax.Array]", *, entries: "list[Entry]", dtype: Any
) -> "list[jax.Array]":
    low, high, factor = _range(dtype)
    large, small = math.sqrt(high), math.sqrt(low) * 2.0**-20

    def slot(leaf: jax.Array, which: int) -> jax.Array:
        total = jnp.zeros((), dtype)
        for part in _parts(leaf, dtype):
            size = jnp.abs(part)
            kind = jnp.where(size >= large, 0, jnp.where(size < small, 2, 1))
            # One select, then one square: nothing for a compiler to fold back.
            ranged = jnp.where(
                kind == 0, part * (1 / factor), jnp.where(kind == 2, part * factor, part)
            )
            total = total + jnp.where(kind == which, ranged * ranged, 0)
        return total

    return [
        jnp.stack([_sum(leaves, e, functools.partial(slot, which=w)) for w in range(3)])
        for e in entries
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
    return jnp.sum(parts, axis=1)


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
    second is a power of two, and 1 unless the scale is out of range.
    """

    first: jax.Array
    second: jax.Array

    def value(self) -> jax.Array:
        return self.first * self.second


def divide(num: jax.Array, den: jax.Array) -> Scale:
    """num / den as a Scale; den > 0."""
    ratio = lax.stop_gradient(jnp.abs(num / den))
    raised = lax.stop_gradient(jnp.abs((num * 2.0**32) / (den * 2.0**-32)))
    tiny, small, large = raised < 2.0**-120, ratio < 2.0**-120, ratio > 2.0**120

    def pick(at_tiny: float, at_small: float, at_large: float) -> jax.Array:
        factor = jnp.where(tiny, at_tiny, jnp.where(small, at_small, 1.0))
        return jnp.where(large, at_large, factor).astype(num.dtype)

    first = (num * pick(2.0**63, 2.0**32, 2.0**-32)) / (
        den * pick(2.0**-63, 2.0**-32, 2.0**32)
    )
    return Scale(first, pick(2.0**-126, 2.0**-64, 2.0**64))


def scaled(
    leaf: jax.Array, scale: Scale, changes: jax.Array, drops: "jax.Array | None"
) -> jax.Array:
    """leaf * scale, rounded once to the leaf's dtype.

    Where `changes` is False the leaf keeps its bits: a multiplication by one
    would flush subnormal numbers, a select does not. Where `drops` is True the
    result is zero whatever the leaf holds.
    """
    dtype = accumulator([leaf.dtype])
    first, second = (factor.astype(dtype) for factor in scale)
    times = _times_bfloat16 if leaf.dtype == jnp.bfloat16 else _times
    product = times(leaf, first, second, changes)
    return product if drops is None else jnp.where(drops, 0, product)


def _times(
    leaf: jax.Array, first: jax.Array, second: jax.Array, changes: jax.Array
) -> jax.Array:
    # Multiplied, never divided: compilers fuse a multiplication into whatever
    # comes next, and keep the result of a division in memory.
    parts = [part * first * second for part in _parts(leaf, first.dtype)]
    product = parts[0] if len(parts) == 1 else lax.complex(parts[0], parts[1])
    return jnp.where(changes, product.astype(leaf.dtype), leaf)


@jax.custom_jvp
def _times_bfloat16(
    leaf: jax.Array, first: jax.Array, second: jax.Array, changes: jax.Array
) -> jax.Array:
    # A NaN of unusual bits must not be carried into infinity by the rounding.
    first = jnp.where(jnp.isnan(first), jnp.nan, first)
    return lax.platform_dependent(
        leaf, first, second, changes, cpu=_times_in_bits, default=_times
    )


@_times_bfloat16.defjvp
def _times_bfloat16_jvp(primals: Any, tangents: Any) -> Any:
    return _times_bfloat16(*primals), jax.jvp(_times, primals, tangents)[1]


def _times_in_bits(
    leaf: jax.Array, first: jax.Array, second: jax.Array, changes: jax.Array
) -> jax.Array:
    """_times for bfloat16, reading, rounding and selecting in integers.

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
