"""What users reported of clipping elsewhere, each as a case with its right value.

The names say the symptom. Beside each case stand its relatives: what is held is the
kind of fault, not the instance.
"""

import math
import re
from typing import Any

import _helpers as h
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

CLIPS = [oun.clip_by_global_norm, oun.clip_by_leaf_norm, oun.soft_clip_by_global_norm]
UNITS = [oun.normalize_to_unit_global_norm, oun.normalize_to_unit_leaf_norm]
BOTH = [oun.clip_by_global_norm(1.0), oun.normalize_to_unit_global_norm()]


def update(tx: optax.GradientTransformation, grads: Any, params: Any = None) -> Any:
    params = grads if params is None else params
    return tx.update(grads, tx.init(params), params)[0]


def total(tree: Any) -> float:
    return h.tree_norm(tree)


# ------------------------------------------------------------------ zero and eps


@pytest.mark.parametrize("make", CLIPS)
@pytest.mark.parametrize("max_norm", [0.0, 1e-30, 1.0, math.inf])
def test_zero_gradient_through_any_threshold(make: Any, max_norm: float) -> None:
    """0 / 0 must not happen, in no dtype."""
    grads = {
        "w": jnp.zeros(3),
        "b": jnp.zeros((2, 2), jnp.bfloat16),
        "s": jnp.zeros(()),
    }
    h.assert_same_bits(update(make(max_norm), grads), grads)


@pytest.mark.parametrize("make", CLIPS)
def test_clip_to_nothing(make: Any) -> None:
    grads = {"w": jnp.array([1.0, -2.0]), "h": jnp.ones(2, jnp.float16)}
    want = jax.tree.map(lambda x: np.zeros(x.shape), grads)
    h.assert_close(update(make(0.0), grads), want, rtol=0, atol=0)


@pytest.mark.parametrize("make", UNITS)
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-12, 1e-30])
def test_small_gradients_still_become_units(make: Any, size: float) -> None:
    """An eps beside the norm shows when training is nearly done."""
    grads = {"a": jnp.array([0.6, 0.0]) * size, "b": jnp.array([[0.8]]) * size}
    whole = total(update(make(), grads))
    want = 1.0 if make is oun.normalize_to_unit_global_norm else math.sqrt(2)
    assert whole == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("make", UNITS)
@pytest.mark.parametrize("power", [15, -15, 24])
def test_loss_scale_left_in_the_gradients(make: Any, power: int) -> None:
    grads = {"w": h.draw(5, (7, 3), top=-8), "b": h.draw(6, (5,), top=-8)}
    scaled = jax.tree.map(lambda x: x * 2.0**power, grads)
    h.assert_same_bits(update(make(), scaled), update(make(), grads))


# ------------------------------------------------------------------ range


@pytest.mark.parametrize("size", [1e25, 1e-25, 8e37, 2e-38])
@pytest.mark.parametrize("tx", BOTH)
def test_squares_that_leave_float32(size: float, tx: Any) -> None:
    """The elements are fine, their squares are not."""
    grads = {"a": jnp.full(3, size), "b": jnp.full(1, -size)}
    h.assert_norm(oun.global_norm(grads), total(grads))
    if tx is BOTH[0] and size < 1:
        h.assert_same_bits(update(tx, grads), grads)
        return
    h.assert_close(update(tx, grads), {"a": np.full(3, 0.5), "b": np.full(1, -0.5)})


def test_float16_squares_overflow() -> None:
    """300 squared is beyond float16; so is the norm of many 100s."""
    tx = oun.clip_by_global_norm(1.0)
    for values, want in (
        ([300.0], [1.0]),
        ([3e4, 4e4], [0.6, 0.8]),
        ([6e4, 0.0], [1.0, 0.0]),
        ([100.0] * 10_000, [1e-2] * 10_000),
    ):
        got = update(tx, jnp.array(values, jnp.float16))
        assert got.dtype == jnp.float16
        h.assert_close(got, np.array(want), rtol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_running_sum_in_half_precision(dtype: str) -> None:
    """300 leaves of norm 1: a running sum of squares in bfloat16 sticks at 256."""
    grads = [jnp.ones(1, dtype) for _ in range(300)]
    step = jax.jit(oun.normalize_grad_norm)
    updates, norm = step(grads)
    h.assert_norm(norm, math.sqrt(300))
    assert total(updates) == pytest.approx(1.0, rel=5e-3)


def test_squares_that_vanish_in_float16() -> None:
    grads = jnp.full(2**20, 1e-3, jnp.float16)
    h.assert_norm(oun.global_norm(grads), total(grads))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_gradients(dtype: str) -> None:
    """64 elements of 32 have norm 256; clipped to 8 each is 1."""
    grads = {"x": jnp.full(64, 32, dtype), "y": jnp.zeros(2, dtype)}
    h.assert_norm(oun.global_norm(grads), 256.0)
    got = update(oun.clip_by_global_norm(8.0), grads)
    assert got["x"].dtype == dtype
    h.assert_close(got, {"x": np.ones(64), "y": np.zeros(2)}, rtol=0, atol=0)


# ------------------------------------------------------------------ dtypes


def test_leaves_of_different_dtypes() -> None:
    """No leaf takes the dtype of another."""
    grads = {
        "a": jnp.ones(2, jnp.bfloat16),
        "b": jnp.ones(2),
        "c": jnp.ones(2, jnp.float16),
    }
    for tx in (*BOTH, oun.clip_by_leaf_norm(0.1), oun.clip_by_param_norm(0.1)):
        h.assert_same_types(update(tx, grads), grads)
    want = jax.tree.map(lambda x: h.wide(x) / math.sqrt(6), grads)
    h.assert_close(update(BOTH[1], grads), want)


def test_scheduled_threshold_on_a_mixed_tree() -> None:
    grads = {"a": jnp.full(8, 1.0, jnp.bfloat16), "b": jnp.full(8, 1.0)}

    def schedule(count: jax.Array) -> jax.Array:
        return 2.0 - count

    for tx in (
        optax.inject_hyperparams(oun.clip_by_global_norm)(max_norm=schedule),
        oun.clip_by_global_norm(schedule),
    ):
        state = tx.init(grads)
        for want in (2.0, 1.0):
            updates, state = jax.jit(tx.update)(grads, state, grads)
            h.assert_same_types(updates, grads)
            assert total(updates) == pytest.approx(want, rel=4e-3)


def test_complex_and_real_leaves() -> None:
    """|3 + 4j| is 5; real stays real, complex stays complex."""
    grads = {"c": jnp.array([3 + 4j, 0j], jnp.complex64), "r": jnp.array([12.0])}
    norm = oun.global_norm(grads)
    assert norm.dtype == jnp.float32
    h.assert_norm(norm, 13.0)
    for tx in BOTH:
        got = update(tx, grads)
        h.assert_same_types(got, grads)
        h.assert_close(got, jax.tree.map(lambda x: h.wide(x) / 13, grads))


def test_gradients_of_integers() -> None:
    """Step counters among the parameters carry no gradient."""

    def loss(p: Any) -> jax.Array:
        return (p["w"] @ jnp.array([3.0, 4.0])) + 0.0 * p["step"]

    grads = jax.grad(loss, allow_int=True)({"w": jnp.ones(2), "step": 7})
    assert grads["step"].dtype == jax.dtypes.float0
    for tx in BOTH:
        got = update(tx, grads)
        h.assert_close(got["w"], np.array([0.6, 0.8]))
        assert got["step"].dtype == jax.dtypes.float0
        for leaf in (jnp.int32(7), jnp.uint8(200), jnp.array([True]), 7, np.int64(7)):
            got = update(tx, {"w": jnp.array([3.0, 4.0]), "n": leaf})
            h.assert_close(got["w"], np.array([0.6, 0.8]))
            h.assert_same_bits(got["n"], leaf)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        (),
        [],
        {"a": None},
        {"a": jnp.zeros((0, 3))},
        {"m": optax.MaskedNode()},
        {"a": {"b": [None, ()]}},
    ],
    ids=str,
)
def test_trees_without_a_gradient(tree: Any) -> None:
    norm = oun.global_norm(tree)
    assert norm.shape == () and norm.dtype == jnp.float32 and norm == 0
    for tx in (*BOTH, oun.clip_by_leaf_norm(1.0), oun.normalize_to_unit_leaf_rms()):
        got = jax.jit(lambda t, tx=tx: update(tx, t))(tree)
        assert jax.tree.structure(got) == jax.tree.structure(tree)


def test_empty_leaf_beside_a_full_one() -> None:
    """Nor does it spoil a root mean square."""
    grads = {"e": jnp.zeros((0, 3)), "w": jnp.array([3.0, 4.0])}
    h.assert_close(update(BOTH[1], grads)["w"], np.array([0.6, 0.8]))
    got = update(oun.normalize_to_unit_global_rms(), grads)["w"]
    h.assert_close(got, np.array([3, 4]) / math.sqrt(12.5))


# ------------------------------------------------------------------ trees


def test_what_counts_under_optax_masked() -> None:
    grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([100.0])}
    mask = {"w": True, "b": False}
    for tx in BOTH:
        for given in (mask, lambda tree: mask):
            got = update(optax.masked(tx, given), grads)
            h.assert_close(got["w"], np.array([0.6, 0.8]))
            h.assert_same_bits(got["b"], grads["b"])


def test_frozen_parameters_do_not_inflate_the_norm() -> None:
    grads = {"train": jnp.array([0.3, 0.4]), "frozen": jnp.full(4, 1e3)}
    mask = {"train": True, "frozen": False}
    got = update(oun.clip_by_global_norm(1.0, mask=mask), grads)
    h.assert_same_bits(got, grads)
    got = update(oun.normalize_to_unit_global_norm(mask=mask), grads)
    h.assert_close(got["train"], np.array([0.6, 0.8]))
    h.assert_same_bits(got["frozen"], grads["frozen"])
    grads["frozen"] = jnp.full(4, jnp.nan)
    got = update(oun.clip_by_global_norm(0.1, mask=mask), grads)
    h.assert_close(got["train"], np.array([0.06, 0.08]))


def test_one_wild_tensor_does_not_starve_the_rest() -> None:
    grads = {"wild": jnp.full(4, 5e7), "rest": jnp.array([0.3, 0.4])}
    got = update(oun.clip_by_group_norm(1.0, {"wild": "w", "rest": "r"}), grads)
    h.assert_same_bits(got["rest"], grads["rest"])
    assert total(got["wild"]) == pytest.approx(1.0, rel=1e-6)


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("make", [*CLIPS, oun.clip_by_value, oun.clip_by_param_norm])
@pytest.mark.parametrize("bad", [-1.0, np.float32(-0.5), -math.inf, -1])
def test_negative_threshold_is_refused(make: Any, bad: float) -> None:
    """It would flip the sign of every update."""
    with pytest.raises(ValueError, match=rf"must be >= 0; got {float(bad):g}"):
        make(bad)


@pytest.mark.parametrize("make", CLIPS)
@pytest.mark.parametrize("never", [math.inf, np.float32(np.inf), jnp.float32(jnp.inf)])
def test_infinite_threshold_never_clips(make: Any, never: Any) -> None:
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.zeros(2), "c": jnp.full(2, 1e30)}
    h.assert_same_bits(update(make(never), grads), grads)
    d = jax.grad(lambda x: update(make(never), x).sum())(jnp.array([3.0, 4.0]))
    h.assert_same_bits(d, jnp.ones(2))


@pytest.mark.parametrize("seed", range(30))
def test_norm_exactly_at_the_threshold(seed: int) -> None:
    """Not above it, so not a bit changes."""
    grads = {"a": h.draw(seed, (7,)), "b": h.draw(seed + 100, (3, 2))}
    tx = oun.clip_by_global_norm(float(oun.global_norm(grads)))
    h.assert_same_bits(update(tx, grads), grads)


# ------------------------------------------------------------------ not finite


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_one_bad_element_is_never_a_mixture(bad: float, nonfinite: str) -> None:
    """All NaN or all zero: good leaves are not zeroed beside a NaN."""
    grads = {"a": jnp.array([bad, 1.0]), "b": jnp.ones(2), "c": jnp.zeros(1)}
    fill = math.nan if nonfinite == "propagate" else 0.0
    want = jax.tree.map(lambda x: np.full(x.shape, fill), grads)
    for tx in (
        oun.clip_by_global_norm(1.0, nonfinite=nonfinite),
        oun.clip_by_global_norm(math.inf, nonfinite=nonfinite),
        oun.clip_by_global_norm(1.0, ord=math.inf, nonfinite=nonfinite),
        oun.normalize_to_unit_global_norm(nonfinite=nonfinite),
        oun.soft_clip_by_global_norm(1.0, nonfinite=nonfinite),
        oun.scale_from_norm(lambda n: 0.0, nonfinite=nonfinite),
    ):
        h.assert_close(update(tx, grads), want, rtol=0, atol=0)


# ------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("make", CLIPS[:2])
def test_derivative_of_a_clip_at_zero(make: Any) -> None:
    """Below the threshold it is the identity."""
    d = jax.grad(lambda x: update(make(1.0), x).sum())(jnp.zeros(3))
    h.assert_same_bits(d, jnp.ones(3))
    _, d = jax.jvp(lambda x: update(make(1.0), x), (jnp.zeros(3),), (jnp.ones(3),))
    h.assert_same_bits(d, jnp.ones(3))


@pytest.mark.parametrize("size", [1.0, 1e20, 1e-20])
def test_derivative_of_an_active_clip(size: float) -> None:
    """C / n (I - u u^T), in both modes and at any magnitude."""
    grads, along = jnp.array([3.0, 4.0]) * size, jnp.array([1.0, -2.0])
    u = np.array([0.6, 0.8])
    want = (2.0 / 5) * (h.wide(along) - u * (u @ h.wide(along)))
    for tx, expect in (
        (oun.clip_by_global_norm(2.0 * size), want),
        (oun.normalize_to_unit_global_norm(), want / 2 / size),
    ):
        _, forward = jax.jvp(lambda x, tx=tx: update(tx, x), (grads,), (along,))
        (backward,) = jax.vjp(lambda x, tx=tx: update(tx, x), grads)[1](along)
        h.assert_close(forward, expect, rtol=1e-5)
        h.assert_close(backward, expect, rtol=1e-5)


# ------------------------------------------------------------------ transformations


def test_types_stay_in_a_scan() -> None:
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(4), "c": jnp.float16(2)}
    for tx in (*BOTH, oun.clip_by_param_norm(0.5), oun.clip_by_value(0.5)):

        def body(carry: Any, _: None, tx: Any = tx) -> Any:
            p, s = carry
            updates, s = tx.update(p, s, p)
            return (optax.apply_updates(p, updates), s), None

        (p, _), _ = jax.lax.scan(body, (params, tx.init(params)), None, length=3)
        h.assert_same_types(p, params)
        shapes = jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p)[0], params)
        chex.assert_trees_all_equal_dtypes(shapes, params)


@pytest.mark.parametrize("make", CLIPS[:2])
def test_threshold_that_changes_does_not_recompile(make: Any) -> None:
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(max_norm: jax.Array, grads: jax.Array) -> jax.Array:
        return update(make(max_norm), grads)

    for max_norm in (1.0, 2.0, 4.0, 0.0):
        got = step(jnp.float32(max_norm), jnp.array([30.0, 40.0]))
        h.assert_close(got, np.array([0.6, 0.8]) * max_norm)


# ------------------------------------------------------------------ reporting


def test_norm_before_clipping_can_be_logged() -> None:
    tx = optax.chain(oun.clip_by_global_norm(1.0), optax.adam(1e-3))
    grads = {"w": jnp.array([3.0, 4.0], jnp.bfloat16)}
    _, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    norm = oun.metrics(state)["grad_norm"]
    assert norm.dtype == jnp.float32
    h.assert_norm(norm, 5.0)


def test_norm_that_is_known_is_not_measured_again() -> None:
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    clipped, _ = oun.clip_grad_norm(grads, 1.0, norm=jnp.float32(10.0))
    h.assert_close(clipped, {"a": np.array([0.3]), "b": np.array([0.4])})
    norm = oun.global_norm(grads)
    part, _ = oun.clip_grad_norm({"a": grads["a"]}, 1.0, norm=norm)
    h.assert_close(part, {"a": np.array([0.6])})


# ------------------------------------------------------------------ per leaf


def test_global_and_per_leaf_are_two_names() -> None:
    """One keeps the direction, the other bounds each tensor."""
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.1])}
    got = update(oun.clip_by_global_norm(1.0), grads)
    v, w = (
        np.concatenate([h.wide(x) for x in jax.tree.leaves(t)]) for t in (grads, got)
    )
    cosine = v @ w / (np.linalg.norm(v) * np.linalg.norm(w))
    assert cosine == pytest.approx(1.0, rel=1e-6)
    got = update(oun.clip_by_leaf_norm(1.0), grads)
    h.assert_close(got["a"], np.array([0.6, 0.8]))
    h.assert_same_bits(got["b"], grads["b"])


def test_scanned_layers_are_clipped_one_by_one() -> None:
    grads = {"layers": jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])}
    got = update(oun.clip_by_leaf_norm(1.0, stacked_axis=0), grads)
    h.assert_close(got["layers"], np.array([[0.6, 0.8], [0.3, 0.4], [0, 0]]))
    got = update(oun.normalize_to_unit_leaf_norm(stacked_axis=0), grads)
    h.assert_close(got["layers"], np.array([[0.6, 0.8], [0.6, 0.8], [0, 0]]))
    turned = {"layers": grads["layers"].T}
    got = update(oun.clip_by_leaf_norm(1.0, stacked_axis=1), turned)
    h.assert_close(got["layers"], np.array([[0.6, 0.8], [0.3, 0.4], [0, 0]]).T)


# ------------------------------------------------------------------ devices


def operations(text: str, name: str) -> int:
    """How often a compiled program has an operation."""
    return len(re.findall(rf"^\s*(?:ROOT )?%\S+ = .*? {name}(?:-start)?\(", text, re.M))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("tx", BOTH, ids=["clip", "unit"])
def test_jit_gathers_nothing(kind: AxisType, tx: Any) -> None:
    """Two dozen leaves in two shardings: kept, and at most two reductions."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        grads = {
            f"l{i}": jax.device_put(
                jnp.full((16, 4), i + 1.0),
                NamedSharding(mesh, P("d") if i % 3 else P()),
            )
            for i in range(24)
        }
        compiled = jax.jit(lambda g: update(tx, g)).lower(grads).compile()
        got = compiled(grads)
        size = total(grads)
        h.assert_close(got, jax.tree.map(lambda x: h.wide(x) / size, grads))
        for k, x in grads.items():
            assert got[k].sharding.is_equivalent_to(x.sharding, 2), got[k].sharding
        text = compiled.as_text()
        for name in ("all-gather", "all-to-all", "collective-permute"):
            assert operations(text, name) == 0, name
        assert 1 <= operations(text, "all-reduce") <= 2
