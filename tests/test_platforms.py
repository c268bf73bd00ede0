"""The norm and the scaling as GPUs and TPUs are given them, computed by a CPU.

`scripts/test-all` runs the other tests so too.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import _helpers as h
import _platforms
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun
from optax_unitnorm import _fold

pytestmark = pytest.mark.slow  # it forgets what others have compiled

WHERE: dict[str, Any] = {}


@pytest.fixture(
    params=[("cuda", True), ("cuda", False), ("tpu", True)],
    ids=["cuda-whole", "cuda", "tpu"],
    autouse=True,
    scope="module",
)
def platform(request: pytest.FixtureRequest) -> Iterator[None]:
    """What to compute for, and whether leaves are known to lie on one device each."""
    name, WHERE["whole"] = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", _platforms.choose(name))
        compiled.cache_clear()
        jax.clear_caches()
        yield
    jax.clear_caches()


@functools.cache
def compiled(fn: Any) -> Any:
    if WHERE["whole"]:
        mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1])
        fn = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.jit(fn)


def norm(tree: Any) -> jax.Array:
    return compiled(_global_norm)(tree)


def _global_norm(tree: Any) -> jax.Array:
    return oun.global_norm(tree)


@hypothesis.given(tree=h.trees(("all",)))
def test_any_tree(tree: Any) -> None:
    h.assert_norm(norm(tree), h.tree_norm(tree))


# On both sides of where leaves are packed and where rows are summed first: alone,
# a few alike, more than are packed together, none of them a multiple of a row.
LAYOUTS: dict[str, list[tuple[int, ...]]] = {
    "one": [(1,)],
    "short": [(127,), (129,)],
    "alike": [(300,)] * 40 + [(7, 5)] * 3,
    "medium": [(128, 128)] * 17 + [(70_001,)] + [(3, 5, 997)] * 2,
    "large": [(1025, 1025), (1024, 1024), (300,)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes(layout: str, dtype: str) -> None:
    tree = [h.draw(i, shape, dtype) for i, shape in enumerate(LAYOUTS[layout])]
    h.assert_norm(norm(tree), h.tree_norm(tree))


@hypothesis.given(
    top=st.integers(-126, 100), gap=st.integers(0, 60), seed=st.integers(0, 99)
)
def test_large_beside_small(top: int, gap: int, seed: int) -> None:
    """In one leaf, in leaves packed together, and in leaves apart."""
    low = max(top - gap, -126)
    a, b = h.draw(seed, (300,), top=top), h.draw(seed + 1, (300,), top=low)
    for tree in ([jnp.concatenate([a, b])], [a, b], [a, b.reshape(3, 100)]):
        h.assert_norm(norm(tree), h.tree_norm(tree))


@pytest.mark.parametrize("power", range(-120, 121, 10))
def test_every_power_of_two(power: int) -> None:
    base = [h.draw(1, (5000,), spread=0), h.draw(2, (7,), spread=0)]
    got, want = norm([x * 2.0**power for x in base]), norm(base)
    assert float(got) == float(want) * 2.0**power


def test_non_finite() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        got = float(norm([jnp.full(5000, 1.0).at[77].set(bad), jnp.array([3.0])]))
        assert math.isnan(got) if math.isnan(bad) else got == math.inf
    assert math.isnan(norm([jnp.array([1.0, math.inf, math.nan]), jnp.array([3.0])]))
    assert float(norm([jnp.full(4, 3e38)])) == math.inf
    h.assert_same_bits(norm([jnp.zeros(5000), jnp.zeros(3)]), jnp.float32(0))


def test_float64() -> None:
    with jax.enable_x64(True):
        tree = [h.draw(1, (5000,), "float64"), h.draw(2, (1000,), "float32")]
        got = norm(tree)
        assert got.dtype == jnp.float64
        h.assert_norm(got, h.tree_norm(tree))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_split_leaves(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    specs = [P("a"), P(None, "b"), P("b", "a"), P()]
    shapes = [(64, 1024), (8, 16), (512, 512), (5, 7)]
    tree = [h.draw(i, shape) for i, shape in enumerate(shapes)]
    wanted = h.tree_norm(tree)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(tree, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        h.assert_norm(jax.jit(lambda t: oun.global_norm(t))(placed), wanted)


def _derivative(tree: Any) -> Any:
    return jax.grad(_global_norm)(tree)


def test_derivative() -> None:
    """That of the norm, leaf / norm, also for numbers whose squares leave float32."""
    for top in (-80, 0, 80):
        tree = [h.draw(i, shape, top=top) for i, shape in enumerate([(300,)] * 3)]
        tree.append(h.draw(9, (5000,), top=top))
        got = compiled(_derivative)(tree)
        wanted = h.tree_norm(tree)
        for a, b in zip(got, tree, strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float64),
                np.asarray(b, np.float64) / wanted,
                rtol=8 * float(jnp.finfo(jnp.float32).eps),
                atol=0,
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clip(dtype: str) -> None:
    """Where it binds the norm is the threshold, where not the bits stay."""
    tree = [h.draw(i, (n,), dtype) for i, n in enumerate((5000, 300, 300, 7))]
    whole = float(h.tree_norm(tree))
    for max_norm in (whole / 3, whole * 2):
        tx = oun.clip_by_global_norm(max_norm)
        got, state = compiled(tx.update)(tree, tx.init(tree))
        h.assert_norm(state.grad_norm, h.tree_norm(tree))
        if max_norm > whole:
            jax.tree.map(h.assert_same_bits, got, tree)
        else:
            eps = float(jnp.finfo(dtype).eps)
            assert float(h.tree_norm(got)) == pytest.approx(max_norm, rel=eps)


def test_branch_is_another() -> None:
    """Fails if the stand-in no longer reaches the package."""
    text = str(jax.make_jaxpr(lambda t: oun.global_norm(t))([jnp.ones(5000)]))
    assert "platform_index" not in text
    assert " cond[" not in text
    assert _fold.lax.platform_dependent is jax.lax.platform_dependent
