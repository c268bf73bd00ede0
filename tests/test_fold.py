"""The norm itself: any number of elements, cut anyhow, of any order and magnitude."""

import functools
import math
from typing import Any

import _helpers as h
import _platforms
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_unitnorm as oun
from optax_unitnorm import _fold

MILLIONS = 10_000_000
ORDERS = (1, 1.5, 2, 2.5, 3, 10, 50, math.inf)


@pytest.fixture(scope="module")
def bfloat16s() -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(MILLIONS, dtype=np.float32)
    return values.astype(jnp.bfloat16)


@pytest.mark.parametrize("leaves", [1, 1000])
def test_ten_million_bfloat16(bfloat16s: np.ndarray, leaves: int) -> None:
    """Within 1e-6 of float64 however the elements are cut into leaves."""
    tree = [jnp.asarray(part) for part in np.split(bfloat16s, leaves)]
    got = jax.jit(oun.global_norm)(tree)
    assert float(got) == pytest.approx(h.norm([bfloat16s]), rel=1e-6)


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("leaves", [1, 100])
def test_cuts(ord: float, leaves: int) -> None:
    """Two million float32 elements of one sign: rounding has no chance to cancel."""
    values = np.random.default_rng(1).uniform(0.5, 1.5, 2_000_000).astype(np.float32)
    tree = [jnp.asarray(part) for part in np.split(values, leaves)]
    got = jax.jit(lambda t: oun.global_norm(t, ord=ord))(tree)
    h.assert_norm(got, h.norm([values], ord))


def test_many_equal_leaves() -> None:
    """A running sum in bfloat16 would stick at 256."""
    dtypes = ("bfloat16", "float16", "float8_e4m3fn", "float32")
    tree = [jnp.ones(2, dtype) for dtype in dtypes for _ in range(80)]
    h.assert_norm(jax.jit(oun.global_norm)(tree), math.sqrt(640))
    h.assert_norm(jax.jit(oun.global_norm)(tree[:80] * 4), math.sqrt(640))


def test_small_squares_of_float16() -> None:
    """1e-3 squared is nearly nothing in float16; a million of them are not."""
    tree = jnp.full(2**20, 1e-3, jnp.float16)
    h.assert_norm(jax.jit(oun.global_norm)(tree), h.norm([tree]))


@pytest.mark.parametrize("ord", ORDERS)
@hypothesis.given(tree=h.trees(("all",)))
def test_orders_and_magnitudes(ord: float, tree: Any) -> None:
    got = measured(ord)(tree)
    h.assert_norm(got, h.tree_norm(tree, ord))


@pytest.mark.parametrize("ord", ORDERS)
@hypothesis.given(
    top=st.integers(-126, 100), gap=st.integers(0, 60), seed=st.integers(0, 99)
)
def test_large_beside_small(ord: float, top: int, gap: int, seed: int) -> None:
    """Blocks that lie on both sides of any place where a range could be cut."""
    low = max(top - gap, -126)
    tree = [h.draw(seed, (300,), top=top), h.draw(seed + 1, (300,), top=low)]
    h.assert_norm(measured(ord)(tree), h.tree_norm(tree, ord))


def test_many_blocks_of_any_magnitude() -> None:
    """Each in the unit that its own numbers ask for, not in its neighbour's."""
    tops = (-120, 0, 100, -60, 70)
    tree = [h.draw(i, (5 + i % 3,), top=tops[i % 5]) for i in range(150)]
    got = jax.jit(lambda t: oun.leaf_norms(t))(tree)
    for i, leaf in enumerate(tree):
        h.assert_norm(got[str(i)], h.norm([leaf]))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_masked_sums(
    platform: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What accelerators compute; `test_platforms.py` has it at length."""
    choose = _platforms.choose(platform)
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)

    def norm(leaves: list[jax.Array]) -> jax.Array:
        entries = [_fold.Entry(tuple(range(len(leaves))))]
        sums = _fold.local(leaves, entries, 2.0, jnp.float32, whole=whole)
        return _fold.finish(sums[:, 0], None, 2.0, jnp.float32)

    shapes = [(300,)] * 20 + [(70, 71), (3, 5, 997)]
    for tops in ((0, 0), (90, -90), (-100, -110), (100, 20)):
        tree = [h.draw(i, s, top=tops[i % 2]) for i, s in enumerate(shapes)]
        h.assert_norm(jax.jit(norm)(tree), h.tree_norm(tree))


_COMPILED: dict[float, Any] = {}


def measured(ord: float) -> Any:
    if ord not in _COMPILED:
        _COMPILED[ord] = jax.jit(lambda tree: oun.global_norm(tree, ord=ord))
    return _COMPILED[ord]


@pytest.mark.parametrize("power", range(-126, 125, 10))
def test_every_power_of_two(power: int) -> None:
    """A power of two moves the norm by itself, and not by a bit more."""
    base = [h.draw(1, (50,), spread=0), h.draw(2, (7,), spread=0)]
    scaled = [x * 2.0**power for x in base]
    got, want = measured(2)(scaled), measured(2)(base)
    assert float(got) == float(want) * 2.0**power


@pytest.mark.parametrize("ord", ORDERS)
def test_non_finite(ord: float) -> None:
    """NaN beats inf, and neither is lost in a maximum."""
    for bad in (math.nan, math.inf, -math.inf):
        tree = [jnp.array([1.0, bad, 2.0]), jnp.array([3.0])]
        got = float(measured(ord)(tree))
        assert math.isnan(got) if math.isnan(bad) else got == math.inf
    both = [jnp.array([1.0, math.inf, math.nan]), jnp.array([3.0])]
    assert math.isnan(measured(ord)(both))


def test_beyond_float32() -> None:
    assert float(measured(2)([jnp.full(4, 3e38)])) == math.inf
    assert float(measured(1)([jnp.full(2, 3e38)])) == math.inf
    h.assert_norm(measured(math.inf)([jnp.full(4, 3e38)]), np.float32(3e38))


def test_zero() -> None:
    for ord in ORDERS:
        for dtype in ("float32", "bfloat16", "complex64", "float8_e5m2"):
            h.assert_same_bits(measured(ord)([jnp.zeros(3, dtype)]), jnp.float32(0))


def test_complex_is_by_magnitude() -> None:
    tree = {"c": jnp.array([3 + 4j, 0j], jnp.complex64), "r": jnp.array([12.0])}
    for ord, want in ((1, 17.0), (2, 13.0), (math.inf, 12.0)):
        got = measured(ord)(tree)
        assert got.dtype == jnp.float32
        h.assert_norm(got, want)
    large = jnp.array([3e37 + 4e37j, 0], jnp.complex64)
    h.assert_norm(measured(2)([large]), h.norm([large]))


def test_float64() -> None:
    """Under x64 a float64 leaf is summed in float64, beside any other."""
    with jax.enable_x64(True):
        tree = [h.draw(1, (1000,), "float64"), h.draw(2, (1000,), "float32")]
        for ord in (1, 2, 3, math.inf):
            got = jax.jit(lambda t, p=ord: oun.global_norm(t, ord=p))(tree)
            assert got.dtype == jnp.float64
            h.assert_norm(got, h.tree_norm(tree, ord))
        small = [x.astype(jnp.float32) for x in tree]
        assert jax.jit(oun.global_norm)(small).dtype == jnp.float32


def test_eager_as_compiled() -> None:
    tree = [h.draw(1, (30,), top=90), h.draw(2, (30,), "bfloat16")]
    h.assert_norm(oun.global_norm(tree), h.tree_norm(tree))


SMALL_SHAPES = [(64, 33), (4095,), (16, 16, 3, 3), (2,) * 11, (1, 2047, 2)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_sums_of_equal_numbers(shape: tuple[int, ...], whole: bool) -> None:
    """Their roundings all go one way, which a long chain of additions shows."""
    total = jax.jit(
        functools.partial(
            _fold.local,
            entries=[_fold.Entry((0,))],
            order=2.0,
            dtype=jnp.float32,
            whole=whole,
        )
    )
    for value in (1.1, 1.3, 1.9):
        for dtype in (jnp.float32, jnp.bfloat16):
            x = jnp.full(shape, value, dtype)
            wanted = float(x.reshape(-1)[0]) ** 2 * x.size
            assert float(total([x])[1, 0]) == pytest.approx(wanted, rel=8 * h.EPS32)
