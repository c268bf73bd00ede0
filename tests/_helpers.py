"""What the tests hold the library against: float64 numpy, written without it."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

EPS32 = float(np.finfo(np.float32).eps)
EPS64 = float(np.finfo(np.float64).eps)
TINY32 = float(np.finfo(np.float32).tiny)
MAX32 = float(np.finfo(np.float32).max)

# The one table of tolerances.
#
# A norm is right to 4 eps of the type it is accumulated in.
NORM_RTOL = {"float32": 4 * EPS32, "float64": 4 * EPS64}
# A scaled element is the exact product rounded once to its own dtype (half an ulp),
# where the scale carries the norm's error and two roundings of its own.
ELEMENT_RTOL = {
    "float8_e4m3fn": 2.0**-4 + 6 * EPS32,
    "float8_e5m2": 2.0**-3 + 6 * EPS32,
    "float16": 2.0**-11 + 6 * EPS32,
    "bfloat16": 2.0**-8 + 6 * EPS32,
    "float32": 6.5 * EPS32,
    "float64": 6.5 * EPS64,
    "complex64": 6.5 * EPS32,
    "complex128": 6.5 * EPS64,
}
# Half the spacing below the smallest normal number; results that are subnormal in
# float32 may be zero, which bfloat16 and complex64 inherit.
ELEMENT_ATOL = {
    "float8_e4m3fn": 2.0**-10 * (1 + 6 * EPS32),
    "float8_e5m2": 2.0**-17 * (1 + 6 * EPS32),
    "float16": 2.0**-25 * (1 + 6 * EPS32),
    "bfloat16": TINY32,
    "float32": TINY32,
    "float64": TINY32 * EPS64,
    "complex64": TINY32 * 2**0.5,  # in both parts
    "complex128": TINY32 * EPS64,
}
# Derivatives subtract numbers of equal size: errors are measured against the largest
# entry of the result, with room for a few products more than the value takes.
DERIVATIVE_RTOL = 32 * EPS32

Block = list[tuple[int, Any]]  # (number of the leaf, index into it)


def counts(leaf: Any) -> bool:
    """Whether a leaf is a gradient: a float or complex number, and not empty."""
    if isinstance(leaf, (bool, int, np.bool_)):
        return False
    if isinstance(leaf, (float, complex)):
        return True
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    return leaf.size > 0


def wide(leaf: Any) -> np.ndarray:
    """The leaf in float64 or complex128, exactly."""
    a = np.asarray(leaf)
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def norm(arrays: Sequence[Any], ord: float = 2) -> float:
    """The norm of all elements together, scaled so that no power leaves float64."""
    parts = [np.abs(wide(a)).ravel() for a in arrays]
    values = np.concatenate(parts) if parts else np.zeros(0)
    top = float(values.max()) if values.size else 0.0
    if top == 0.0 or not math.isfinite(top) or math.isinf(ord):
        return top
    return top * float(np.sum((values / top) ** ord)) ** (1 / ord)


def tree_norm(tree: Any, ord: float = 2) -> float:
    """The norm of every leaf of a tree that counts."""
    return norm([x for x in jax.tree.leaves(tree) if counts(x)], ord)


def whole(leaves: Sequence[np.ndarray | None]) -> list[Block]:
    """One block of everything."""
    return [[(i, ...) for i, x in enumerate(leaves) if x is not None]]


def each(leaves: Sequence[np.ndarray | None]) -> list[Block]:
    """A block a leaf."""
    return [[(i, ...)] for i, x in enumerate(leaves) if x is not None]


def alternate(leaves: Sequence[np.ndarray | None]) -> list[Block]:
    """Two groups, leaf by leaf in turn; `alternate_labels` says the same in labels."""
    numbers = [i for i, x in enumerate(leaves) if x is not None]
    return [[(i, ...) for i in numbers if i % 2 == odd] for odd in (0, 1)]


def alternate_labels(tree: Any) -> Any:
    """The labels of `alternate`, of two types to show that any hashable will do."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([("even", "odd")[i % 2] for i in range(len(leaves))])


def slices(x: np.ndarray, keep: Sequence[int]) -> Iterator[Any]:
    """Indices of the parts of `x` that share their position along `keep`."""
    for at in np.ndindex(*[x.shape[a] for a in keep]):
        index: list[Any] = [slice(None)] * x.ndim
        for axis, i in zip(keep, at, strict=True):
            index[axis] = i
        yield (..., *index)


def param_units(leaves: Sequence[np.ndarray | None]) -> list[Block]:
    """Output units by rank: vectors whole, matrices by column, kernels by channel."""
    blocks: list[Block] = []
    for i, x in enumerate(leaves):
        if x is None:
            continue
        if np.squeeze(x).ndim <= 1:
            keep: Sequence[int] = ()
        elif x.ndim in (2, 3):
            keep = range(1, x.ndim)
        else:
            keep = (x.ndim - 1,)
        blocks += [[(i, index)] for index in slices(x, keep)]
    return blocks


def stacked(axis: int) -> Callable[[Sequence[np.ndarray | None]], list[Block]]:
    """A block a slice along `axis` of each leaf."""

    def blocks(leaves: Sequence[np.ndarray | None]) -> list[Block]:
        return [
            [(i, index)]
            for i, x in enumerate(leaves)
            if x is not None
            for index in slices(x, (axis % x.ndim,))
        ]

    return blocks


def assert_close(
    got: Any, want: Any, rtol: float | None = None, atol: float | None = None
) -> None:
    """Leaf by leaf, at the tolerance of the dtype that came back."""
    got_leaves, got_def = jax.tree.flatten(got)
    want_leaves, want_def = jax.tree.flatten(want)
    assert got_def == want_def, f"{got_def} is not {want_def}"
    for i, (g, w) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        if not counts(w):
            continue
        name = np.asarray(g).dtype.name
        r = ELEMENT_RTOL[name] if rtol is None else rtol
        a = ELEMENT_ATOL[name] if atol is None else atol
        g, w = wide(g), wide(w)
        assert g.shape == w.shape, f"leaf {i}: shape {g.shape}, not {w.shape}"
        assert np.array_equal(np.isnan(g), np.isnan(w)), f"leaf {i}: {g} for {w}"
        with np.errstate(invalid="ignore"):
            off = np.where(g == w, 0.0, np.abs(g - w)) - (a + r * np.abs(w))
        bad = ~np.isnan(w) & ~(off <= 0)
        assert not bad.any(), f"leaf {i} ({name}): {g[bad][:4]} for {w[bad][:4]}"


def assert_norm(got: Any, want: float) -> None:
    """A norm to 4 eps of its type."""
    name = np.asarray(got).dtype.name
    assert_close(got, np.float64(want), rtol=NORM_RTOL[name], atol=TINY32)


def assert_same_bits(got: Any, want: Any) -> None:
    """The same structure, dtypes and bits, the sign of zero included."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(getattr(w, "dtype", np.int32), jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        g, w = np.asarray(g), np.asarray(w)
        assert g.dtype == w.dtype, f"{g.dtype} is not {w.dtype}"
        assert g.shape == w.shape, f"{g.shape} is not {w.shape}"
        assert g.tobytes() == w.tobytes(), f"{g} is not {w}, bit for bit"


def assert_same_types(got: Any, want: Any) -> None:
    """The same structure, shapes and dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.shape(g) == jnp.shape(w), f"{jnp.shape(g)} is not {jnp.shape(w)}"
        assert jnp.result_type(g) == jnp.result_type(w), (g, w)


_EXPONENTS = {  # of the smallest and largest power of two a test draws
    "float8_e4m3fn": (-9, 8),
    "float8_e5m2": (-16, 15),
    "float16": (-24, 15),
    "bfloat16": (-126, 120),
    "float32": (-126, 120),
    "complex64": (-126, 119),
    "float64": (-126, 120),
    "complex128": (-126, 119),
}


def draw(
    seed: int,
    shape: tuple[int, ...],
    dtype: str = "float32",
    top: int = 0,
    spread: int = 3,
    zeros: float = 0.0,
) -> jax.Array:
    """Numbers of either sign below 2**(top + 1), over `spread` powers of two."""
    rng = np.random.default_rng(seed)
    low, high = _EXPONENTS[dtype]

    def real() -> np.ndarray:
        power = top - rng.integers(0, spread + 1, shape)
        x = rng.uniform(1, 2, shape) * 2.0 ** np.clip(power, low, high)
        x = x * rng.choice([-1.0, 1.0], shape)
        return x * (rng.uniform(0, 1, shape) >= zeros)

    x = real() + 1j * real() if dtype.startswith("complex") else real()
    largest = float(jnp.finfo(dtype).max)
    if not dtype.startswith("complex"):
        x = np.clip(x, -largest, largest)
    return jnp.asarray(np.asarray(x, dtype=jnp.dtype(dtype)))


# Few shapes, so that what is compiled once serves many examples; with few examples
# only the first is used.
TREES: dict[str, Any] = {
    "all": {
        "a": ("float32", (2, 1, 3, 2)),
        "b": (("bfloat16", (3, 2)), None, ("float16", (3,))),
        "c": ("complex64", (2,)),
        "d": ("float32", (0, 2)),
        "e": [("float8_e4m3fn", (2, 3)), ("float8_e5m2", (2,))],
    },
    "ranks": [("float32", (2, 3, 2)), ("float32", (2, 1, 3, 2)), ("bfloat16", (9,))],
    "float32": {"w": ("float32", (4, 3)), "b": [("float32", (3,))]},
    "one number": ("float32", ()),
    "bfloat16": [("bfloat16", (5, 2)), ("bfloat16", (1,))],
    "float16": {"x": ("float16", (7,)), "y": {"z": ("float16", (2, 2))}},
    "float8": {"a": ("float8_e4m3fn", (6,)), "b": ("float8_e5m2", (6,))},
    "complex64": {"c": ("complex64", (3,)), "r": ("float32", (2,))},
    "long": {"w": ("float32", (1000,)), "v": ("bfloat16", (257,))},
}


MANY = hypothesis.settings.default.max_examples > 10
KINDS = tuple(TREES) if MANY else tuple(TREES)[:1]


def is_spec(x: Any) -> bool:
    """Whether `x` is a leaf of `TREES`."""
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str)


@st.composite
def trees(draw_from: st.DrawFn, kinds: Sequence[str] = KINDS) -> Any:
    """A tree of any magnitudes: every leaf has its own power of two and spread."""
    kind = draw_from(st.sampled_from(kinds))
    seed = draw_from(st.integers(0, 2**16))
    specs, treedef = jax.tree.flatten(TREES[kind], is_leaf=is_spec)
    leaves = []
    for i, (dtype, shape) in enumerate(specs):
        low, high = _EXPONENTS[dtype]
        top = draw_from(st.integers(low, high))
        spread = draw_from(st.sampled_from([0, 3, 20, 200]))
        zeros = draw_from(st.sampled_from([0.0, 0.3, 1.0]))
        leaves.append(draw(seed + i, shape, dtype, top, spread, zeros))
    return treedef.unflatten(leaves)


def refused(build: Callable[[], Any], name: str) -> None:
    """A ValueError or TypeError of the one sentence shape, when it is built."""
    shape = rf"^`{name}` must .+; got .+\.$"
    with untyped(), pytest.raises((ValueError, TypeError), match=shape):
        build()


@contextlib.contextmanager
def untyped() -> Iterator[None]:
    """Without the type checks that only tests have: what a user's mistake meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


COLLECTIVES = (
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "ppermute",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "reduce_scatter",
)


def primitives(jaxpr: Any) -> Iterator[str]:
    """Names of all primitives, also of those inside others."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)
