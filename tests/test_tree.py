"""Functions on trees: what users of torch and TensorFlow expect."""

import math
from typing import Any

import _helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_unitnorm as oun

GRADS = {"a": jnp.array([3.0, 4.0]), "b": [jnp.array([12.0], jnp.bfloat16), None]}


def test_global_norm() -> None:
    for ord, want in (
        (None, 13.0),
        (1, 19.0),
        (math.inf, 12.0),
        (3, 1819 ** (1 / 3)),
        (2, 13),
    ):
        got = oun.global_norm(GRADS, ord=ord)
        assert got.shape == () and got.dtype == jnp.float32
        assert float(got) == pytest.approx(
            h.tree_norm(GRADS, ord or 2), rel=h.EPS32 * 4
        )
        assert float(got) == pytest.approx(want, rel=1e-4)


def test_global_norm_of_nothing() -> None:
    for tree in ({}, (), None, {"a": None}, {"a": jnp.zeros((0, 3))}, {"n": 3}):
        h.assert_same_bits(oun.global_norm(tree), jnp.float32(0))


@pytest.mark.parametrize(
    "mask", [{"a": True, "b": False}, lambda t: {"a": 1 > 0, "b": False}]
)
def test_global_norm_of_a_part(mask: Any) -> None:
    h.assert_norm(oun.global_norm(GRADS, mask=mask), 5.0)


def test_leaf_norms() -> None:
    """A flat dict from path to norm, of what counts."""
    tree = {**GRADS, "step": 3, "key": jax.random.key(0), "z": {"y": jnp.zeros(2)}}
    norms = oun.leaf_norms(tree)
    assert list(norms) == ["a", "b/0", "z/y"]
    for name, want in (("a", 5.0), ("b/0", 12.0), ("z/y", 0.0)):
        h.assert_norm(norms[name], want)
    h.assert_norm(oun.leaf_norms(tree, ord=1)["a"], 7.0)
    assert list(
        oun.leaf_norms(
            tree,
            mask={**tree, "a": False, "b": True, "step": True, "key": True, "z": False},
        )
    ) == ["b/0"]
    jitted = jax.jit(oun.leaf_norms)(GRADS)
    h.assert_norm(jitted["b/0"], 12.0)
    assert oun.leaf_norms({}) == {}


def test_normalize_grad_norm() -> None:
    for f in (oun.normalize_grad_norm, jax.jit(oun.normalize_grad_norm)):
        updates, norm = f(GRADS)
        h.assert_norm(norm, 13.0)
        h.assert_same_types(updates, GRADS)
        h.assert_close(updates, jax.tree.map(lambda x: h.wide(x) / 13, GRADS))
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    updates, norm = oun.normalize_grad_norm(zeros)
    h.assert_same_bits(updates, zeros)
    updates, _ = oun.normalize_grad_norm(GRADS, ord=1)
    h.assert_close(updates["a"], np.array([3, 4]) / 19)


def test_clip_grad_norm() -> None:
    """The clipped gradients, and the norm they had before."""
    for f in (oun.clip_grad_norm, jax.jit(oun.clip_grad_norm)):
        updates, norm = f(GRADS, 6.5)
        h.assert_norm(norm, 13.0)
        h.assert_close(updates, jax.tree.map(lambda x: h.wide(x) / 2, GRADS))
        updates, norm = f(GRADS, 20.0)
        h.assert_same_bits(updates, GRADS)
    updates, norm = oun.clip_grad_norm(GRADS, 6.0, ord=math.inf)
    h.assert_norm(norm, 12.0)
    h.assert_close(updates["a"], np.array([1.5, 2.0]))
    updates, norm = oun.clip_grad_norm(
        GRADS, 1.0, mask={"a": True, "b": False}, nonfinite="zero"
    )
    h.assert_norm(norm, 5.0)
    h.assert_same_bits(updates["b"], GRADS["b"])


def test_norm_that_is_known() -> None:
    """A norm handed in is used as it is, also for a part of the tree."""
    part = {"a": GRADS["a"]}
    for norm in (10.0, jnp.float32(10), np.float64(10), jnp.bfloat16(10)):
        updates, back = oun.clip_grad_norm(part, 1.0, norm=norm)
        h.assert_close(updates["a"], np.array([0.3, 0.4]))
        h.assert_norm(jnp.float32(back), 10.0)
        h.assert_same_types(updates, part)
    bad = {"a": jnp.array([3.0, math.nan])}
    updates, _ = oun.clip_grad_norm(bad, 1.0, norm=10.0)
    h.assert_close(updates["a"], np.array([0.3, math.nan]))
    jaxpr = jax.make_jaxpr(lambda g, n: oun.clip_grad_norm(g, 1.0, norm=n))
    used = set(h.primitives(jaxpr(part, jnp.float32(1)).jaxpr))
    assert not used & {"reduce_sum", "dot_general", "reduce_max"}, "measured again"


def test_known_norm_at_any_magnitude() -> None:
    grads = {"a": jnp.array([3e30, 4e30])}
    updates, norm = oun.clip_grad_norm(grads, 1e-20)
    again, _ = oun.clip_grad_norm(grads, 1e-20, norm=norm)
    h.assert_close(updates["a"], np.array([6e-21, 8e-21]))
    h.assert_close(again["a"], np.array([6e-21, 8e-21]))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_known_norm_that_is_not_finite(norm: float, nonfinite: str) -> None:
    updates, _ = oun.clip_grad_norm(
        GRADS, 1.0, norm=jnp.float32(norm), nonfinite=nonfinite
    )
    fill = math.nan if nonfinite == "propagate" else 0.0
    h.assert_close(updates, jax.tree.map(lambda x: np.full(x.shape, fill), GRADS))


def test_error_names_the_leaves() -> None:
    """Every bad leaf is named, no good one, and finite gradients pass."""
    grads = {
        "encoder": {"kernel": jnp.array([1.0, math.nan]), "bias": jnp.ones(2)},
        "head": jnp.array([math.inf]),
    }
    with pytest.raises(FloatingPointError) as error:
        oun.clip_grad_norm(grads, 1.0, error_if_nonfinite=True)
    text = str(error.value)
    assert "encoder/kernel" in text and "head" in text and "bias" not in text
    _, norm = oun.clip_grad_norm(GRADS, 1.0, error_if_nonfinite=True)
    h.assert_norm(norm, 13.0)
    huge = {"x": jnp.full(4, 3e38)}
    with pytest.raises(FloatingPointError):
        oun.clip_grad_norm(huge, 1.0, error_if_nonfinite=True)


def test_error_under_jit() -> None:
    """No value to look at: a sentence that says what to do instead."""
    step = jax.jit(lambda g: oun.clip_grad_norm(g, 1.0, error_if_nonfinite=True))
    with pytest.raises(Exception, match=r"error_if_nonfinite(.|\n)*(jit|traced)") as e:
        step(GRADS)
    assert "nonfinite" in str(e.value) and str(e.value).strip().endswith(".")


@pytest.mark.parametrize("bad", [-1.0, math.nan, True, "1", None])
def test_bad_arguments(bad: Any) -> None:
    h.refused(lambda: oun.clip_grad_norm(GRADS, bad), "max_norm")
    if bad is not None:
        h.refused(lambda: oun.global_norm(GRADS, ord=bad), "ord")


def test_gradients_flow_through() -> None:
    """Inside a loss: a norm penalty has a derivative, also at zero."""
    g = jax.grad(lambda w: oun.global_norm({"w": w}))(jnp.array([3.0, 4.0]))
    h.assert_close(g, np.array([0.6, 0.8]))
    g = jax.grad(lambda w: oun.global_norm({"w": w}))(jnp.zeros(2))
    assert bool(jnp.all(jnp.isfinite(g)))
    g = jax.grad(lambda w: oun.clip_grad_norm({"w": w}, 1.0)[0]["w"][0])(
        jnp.array([3.0, 4.0])
    )
    h.assert_close(g, np.array([1 - 0.36, -0.48]) / 5, rtol=1e-5)
