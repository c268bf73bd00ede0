"""From norm to scale: published formulas worked out elsewhere, and the edges."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import _helpers as h
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_unitnorm as oun

DATA = json.loads((pathlib.Path(__file__).parent / "data/methods.json").read_text())
# Golden results carry 2e-6 of room in float32 and 1e-12 in float64.
GOLDEN_RTOL = {"float32": 2e-6, "float64": 1e-12}

Make = Callable[..., optax.GradientTransformation]


def whole_leaves(tree: Any) -> Any:
    return jax.tree.map(lambda x: tuple(range(jnp.ndim(x))), tree)


# From the name of a case (before the slash) to the transform, given its arguments.
CALLS: dict[str, Make] = {
    "unit_global": lambda: oun.normalize_to_unit_global_norm(),
    "unit_global_c0.1": lambda c: optax.chain(
        oun.normalize_to_unit_global_norm(), optax.scale(c)
    ),
    "unit_global_additive_eps": lambda: oun.scale_from_norm(lambda n: 1 / (n + 1e-6)),
    "unit_global_floor": lambda: oun.normalize_to_unit_global_norm(min_norm=1e-3),
    "unit_leaf": lambda: oun.normalize_to_unit_leaf_norm(),
    "unit_leaf_rms": lambda: oun.normalize_to_unit_leaf_rms(),
    "clip_global_c1.0": lambda c: oun.clip_by_global_norm(c),
    "clip_global_c5.0": lambda c: oun.clip_by_global_norm(c),
    "clip_global_c100.0": lambda c: oun.clip_by_global_norm(c),
    "clip_global_huge": lambda c: oun.clip_by_global_norm(c),
    "clip_leaf": lambda c: oun.clip_by_leaf_norm(c),
    "clip_value": lambda c: oun.clip_by_value(c),
    "block_rms": lambda c: oun.clip_by_leaf_rms(c),
    "smooth_global": lambda c: oun.soft_clip_by_global_norm(c),
    "smooth_leaf": lambda c: oun.scale_from_norm(lambda n: c / (c + n), per="leaf"),
    "auto_s": lambda c, gamma: oun.scale_from_norm(lambda n: c / (n + gamma)),
    "agc_0.01": lambda clipping, eps: oun.clip_by_param_norm(clipping, eps),
    "agc_0.1": lambda clipping, eps: oun.clip_by_param_norm(clipping, eps),
    "agc_0.16": lambda clipping, eps: oun.clip_by_param_norm(clipping, eps),
    "agc_leaf_0.01": lambda clipping, eps: oun.clip_by_param_norm(
        clipping, eps, axis={"w": (0, 1), "b": 0}
    ),
    "nonfinite_zero": lambda: oun.clip_by_global_norm(1.0, nonfinite="zero"),
    "nonfinite_propagate": lambda: oun.clip_by_global_norm(1.0),
}
CASES = [name for name in DATA["cases"] if name.split("/")[0] in CALLS]


def read(tree: Any, dtype: str) -> Any:
    """A tree of the data, whose non-finite numbers are words."""
    return {k: jnp.asarray(np.array(v, dtype=dtype)) for k, v in tree.items()}


def test_golden_cases_are_there() -> None:
    """Each call has its cases, and only what has memory or no counterpart is left."""
    left = {name.split("/")[0] for name in DATA["cases"]} - set(CALLS)
    memory = {name for name in left if "spikes" in str(DATA["cases"].get(f"{name}/x"))}
    assert not memory
    assert {name.split("_")[0] for name in left} == {
        "autoclip",
        "zclip",
        "adagc",
        "skip",
        "clip",  # clip_global_torch, which test_migrate holds
        "unit",  # unit_axis, below, and unit_leaf_share, which has no counterpart
    }
    assert len(CASES) > 55


@pytest.mark.parametrize("dtype", GOLDEN_RTOL)
@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, dtype: str) -> None:
    case = DATA["cases"][name]
    with jax.enable_x64(dtype == "float64"):
        grads = read(DATA["trees"][case["input"]], dtype)
        params = read(DATA["trees"][case.get("params", case["input"])], dtype)
        tx = CALLS[name.split("/")[0]](**case.get("kwargs", {}))
        updates, _ = tx.update(grads, tx.init(params), params)
        want = read(case["expected"], "float64")
        h.assert_same_types(updates, grads)
        h.assert_close(updates, want, rtol=GOLDEN_RTOL[dtype], atol=h.TINY32)


@pytest.mark.parametrize("axis", [0, 1])
def test_golden_columns_and_rows(axis: int) -> None:
    """A unit column is a slice along the other axis that counts as a leaf."""
    case = DATA["cases"][f"unit_axis/base_w_axis{axis}"]
    grads = {"w": read(DATA["trees"]["base"], "float32")["w"]}
    updates, _ = oun.normalize_to_unit_leaf_norm(1 - axis).update(grads, None)
    h.assert_close(updates, read(case["expected"], "float64"), rtol=2e-6)


NUMBERS = st.floats(h.TINY32, float(np.float32(3e38)), width=32)


def check_one_number(norm: float, limit: float) -> None:
    """With a single element each formula can be read off."""
    soft = float(np.float64(norm) * limit / (np.float64(norm) + limit))
    for update, want in (
        (_clip, min(norm, limit)),
        (_soft, soft),
        (_rms, min(norm, limit)),
        (_unit, 1.0),
        (_floor, norm / max(norm, limit)),
    ):
        got = update(jnp.float32(limit), jnp.array([norm], jnp.float32))
        h.assert_close(got, np.array([want]))


@hypothesis.given(norm=NUMBERS, limit=NUMBERS)
def test_one_number(norm: float, limit: float) -> None:
    check_one_number(norm, limit)


EDGES = (h.TINY32, 3e-37, 1e-30, 1.0, 1e30, 1e38, 3e38)


@pytest.mark.parametrize("norm", EDGES)
@pytest.mark.parametrize("limit", EDGES)
def test_the_ends_of_float32(norm: float, limit: float) -> None:
    """A scale may be far beyond float32 while what it makes is not."""
    check_one_number(float(np.float32(norm)), float(limit))


def _jitted(make: Make) -> Callable[..., Any]:
    return jax.jit(lambda limit, g: make(limit).update(g, None)[0])


_clip = _jitted(lambda c: oun.clip_by_global_norm(c))
_soft = _jitted(lambda c: oun.soft_clip_by_global_norm(c))
_rms = _jitted(lambda c: oun.clip_by_leaf_rms(c))
_unit = _jitted(lambda c: oun.normalize_to_unit_leaf_norm())
_floor = _jitted(lambda c: oun.normalize_to_unit_global_norm(min_norm=c))


def test_soft_clip_at_the_top_of_float32() -> None:
    """The sum of norm and threshold may leave float32; the result does not."""
    grads = jnp.array([3e38], jnp.float32)
    h.assert_close(_soft(jnp.float32(3e38), grads), np.array([1.5e38]))


def test_rms_of_the_smallest_numbers() -> None:
    """A thousand of the smallest normal numbers: 1 / rms is beyond float32's 1 / x."""
    grads = jnp.full(1000, h.TINY32)
    for tx in (oun.normalize_to_unit_leaf_rms(), oun.normalize_to_unit_global_rms()):
        h.assert_close(tx.update(grads, None)[0], np.ones(1000))


def test_tiny_threshold_on_a_huge_norm() -> None:
    """The scale alone is below float32; the products are not."""
    grads = jnp.full(4, 1e30)
    updates, _ = oun.clip_by_global_norm(2e-30).update(grads, None)
    h.assert_close(updates, np.full(4, 1e-30))


def test_param_norm_of_nothing() -> None:
    """A zero parameter is held at eps; a zero gradient stays zero."""
    tx = oun.clip_by_param_norm(0.1, eps=1e-2)
    grads, zeros = jnp.array([3.0, 4.0]), jnp.zeros(2)
    h.assert_close(tx.update(grads, None, zeros)[0], np.array([0.6e-3, 0.8e-3]))
    h.assert_same_bits(tx.update(zeros, None, grads)[0], zeros)
    h.assert_same_bits(tx.update(zeros, None, zeros)[0], zeros)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_param_norm_like_optax(dtype: str) -> None:
    """Units by rank are those of optax, from scalars to rank 5."""
    shapes = [
        (),
        (4,),
        (4, 3),
        (2, 3, 4),
        (2, 2, 3, 4),
        (1, 5),
        (3, 1),
    ]
    if optax.__version__ > "0.2.6":  # where rank 5 came
        shapes.append((2, 1, 2, 3, 4))
    grads = [h.draw(i, s, dtype) for i, s in enumerate(shapes)]
    params = [h.draw(i + 50, s, dtype, top=-2) for i, s in enumerate(shapes)]
    ours, _ = jax.jit(oun.clip_by_param_norm(0.1).update)(grads, None, params)
    up = [jax.tree.map(lambda x: x.astype("float32"), t) for t in (grads, params)]
    theirs = optax.adaptive_grad_clip(0.1)
    want, _ = jax.jit(theirs.update)(up[0], theirs.init(up[1]), up[1])
    h.assert_same_types(ours, grads)
    h.assert_close(ours, want, rtol=h.ELEMENT_RTOL[dtype] + 6 * h.EPS32)


def test_param_norm_needs_parameters() -> None:
    tx = oun.clip_by_param_norm(0.1)
    with pytest.raises(ValueError, match="param"):
        tx.update(jnp.ones(2), None)


def test_scale_from_norm_of_any_value() -> None:
    """A callable may return anything: 0, more than 1, a negative number, an int."""
    grads = {"a": jnp.array([3.0, 4.0], jnp.bfloat16), "b": jnp.array([12.0])}
    for value in (0.0, 2.5, -1.0, 3, jnp.bfloat16(0.5), np.float32(0.5)):
        tx = oun.scale_from_norm(lambda n, v=value: v)
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
        h.assert_same_types(updates, grads)
        want = jax.tree.map(lambda x, v=value: h.wide(x) * float(v), grads)
        h.assert_close(updates, want)
    per_leaf = oun.scale_from_norm(lambda n: n, per="leaf")
    updates, _ = per_leaf.update(grads, None)
    h.assert_close(updates, {"a": np.array([15.0, 20.0]), "b": np.array([144.0])})


def test_value_bounds() -> None:
    """Each element into its bounds; complex elements by magnitude."""
    grads = jnp.array([-3.0, -0.0, 0.5, 3.0])
    tx = oun.clip_by_value(2.0, min_value=-1.0)
    h.assert_same_bits(tx.update(grads, None)[0], jnp.array([-1.0, -0.0, 0.5, 2.0]))
    h.assert_same_bits(
        oun.clip_by_value(2.0, 1.0).update(grads, None)[0],
        jnp.array([1.0, 1.0, 1.0, 2.0]),
    )
    c = jnp.array([3 + 4j, 0.3 + 0.4j, 0j, 3e30 + 4e30j], jnp.complex64)
    updates, _ = oun.clip_by_value(1.0).update(c, None)
    h.assert_close(updates, np.array([0.6 + 0.8j, 0.3 + 0.4j, 0, 0.6 + 0.8j]))
    with pytest.raises((TypeError, ValueError), match="min_value"):
        tx.update({"c": c}, None)


def test_value_of_inf_and_nan() -> None:
    """Nothing is measured: inf meets its bound, NaN stays where it is."""
    grads = jnp.array([math.inf, -math.inf, math.nan, 0.5])
    updates, _ = oun.clip_by_value(1.0).update(grads, None)
    h.assert_close(updates, np.array([1.0, -1.0, math.nan, 0.5]))


def test_value_bounds_in_order() -> None:
    with pytest.raises(ValueError, match=r"`m.._value` must .*; got"):
        oun.clip_by_value(1.0, min_value=2.0)


def test_value_state() -> None:
    """No state without a schedule; a step counter with one."""
    assert oun.clip_by_value(1.0).init(jnp.ones(2)) == optax.EmptyState()
    scheduled = oun.clip_by_value(lambda count: 1.0 / (count + 1))
    state = scheduled.init(jnp.ones(2))
    for step in range(3):
        updates, state = scheduled.update(jnp.full(2, 5.0), state)
        h.assert_close(updates, np.full(2, 1 / (step + 1)))


def test_floor_of_a_large_leaf() -> None:
    """floor * sqrt(size) may be beyond float32 where the scale is not."""
    grads = jnp.full(12, 3e4)
    tx = oun.normalize_to_unit_leaf_rms(min_norm=2e38)
    h.assert_close(tx.update(grads, None)[0], np.full(12, 3e4 / 2e38))
