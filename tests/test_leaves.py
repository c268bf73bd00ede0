"""Which leaves count, what is done with the others, and boxes that keep their type."""

from typing import Any

import _helpers as h
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_unitnorm as oun

FIVE = {"w": jnp.array([3.0, 4.0])}


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        optax.MaskedNode(),
        7,
        True,
        np.arange(4),
        jnp.arange(4, dtype=jnp.uint8),
        np.array([True]),
        jnp.array(False),
        np.zeros((2,), jax.dtypes.float0),
        jax.random.key(3),
        jnp.zeros((0,)),
        np.zeros((2, 0), np.float16),
    ],
    ids=str,
)
def test_not_counted(leaf: Any) -> None:
    tree = {**FIVE, "x": leaf}
    h.assert_norm(oun.global_norm(tree), 5.0)
    updates, norm = oun.normalize_grad_norm(tree)
    h.assert_norm(norm, 5.0)
    h.assert_close(updates["w"], np.array([0.6, 0.8]))
    for got, want in zip(
        jax.tree.leaves(updates["x"]), jax.tree.leaves(leaf), strict=True
    ):
        h.assert_same_bits(got, want)
        assert type(got) is type(want) or isinstance(got, jax.Array)


@pytest.mark.parametrize(
    "leaf",
    [
        12.0,
        np.float32(12),
        np.float64(12),
        np.array([12.0]),
        np.array([0, 12], np.float16),
        jnp.array([12], jnp.bfloat16),
        jnp.array([12], jnp.float8_e4m3fn),
        jnp.array([12j], jnp.complex64),
        12j,
    ],
    ids=repr,
)
def test_counted(leaf: Any) -> None:
    """Numbers of any float or complex type count, plain Python ones too."""
    tree = {**FIVE, "x": leaf}
    h.assert_norm(oun.global_norm(tree), 13.0)
    updates, _ = oun.normalize_grad_norm(tree)
    assert jnp.shape(updates["x"]) == np.shape(leaf)
    assert jnp.result_type(updates["x"]) == jnp.result_type(leaf)
    h.assert_close(jnp.asarray(updates["x"]), h.wide(leaf) / 13)


def test_integer_gradients_of_jax() -> None:
    """jax.grad(allow_int=True) gives float0 for an integer parameter."""

    def loss(p: Any) -> jax.Array:
        return p["w"] @ jnp.array([3.0, 4.0]) + 0.0 * p["step"]

    grads = jax.grad(loss, allow_int=True)({"w": jnp.ones(2), "step": 7})
    tx = oun.clip_by_global_norm(1.0)
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates["step"].dtype == jax.dtypes.float0
    h.assert_close(updates["w"], np.array([0.6, 0.8]))


class Linear(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    name: str = eqx.field(static=True)


def boxes() -> dict[str, Any]:
    return {
        "equinox": Linear(jnp.array([[3.0], [4.0]]), None, "first"),
        "linen": {"kernel": nn.Partitioned(jnp.array([[3.0, 4.0]]), (None, "model"))},
        "nnx": nnx.State({"kernel": nnx.Param(jnp.array([3.0, 4.0]))}),
        "tuple": (jnp.array(3.0), [jnp.array([4.0]), None]),
    }


@pytest.mark.parametrize("kind", boxes())
def test_boxes_keep_their_type(kind: str) -> None:
    tree = boxes()[kind]
    h.assert_norm(oun.global_norm(tree), 5.0)
    for tx in (
        oun.normalize_to_unit_global_norm(),
        oun.clip_by_leaf_norm(1.0),
        oun.clip_by_param_norm(0.1),
        oun.clip_by_value(1.0),
    ):
        updates, _ = jax.jit(tx.update)(tree, tx.init(tree), tree)
        h.assert_same_types(updates, tree)
        assert type(updates) is type(tree)
    updates, _ = oun.normalize_grad_norm(tree)
    want = jax.tree.map(lambda x: h.wide(x) / 5, tree)
    h.assert_close(updates, want)


def test_frozen_half_of_an_equinox_model() -> None:
    """eqx.partition leaves None in the place of what is not trained."""
    model = Linear(jnp.array([[3.0], [4.0]]), jnp.array([100.0]), "first")
    trained, _ = eqx.partition(
        model, Linear(True, False, "first"), is_leaf=lambda x: x is None
    )
    updates, norm = oun.clip_grad_norm(trained, 1.0)
    h.assert_norm(norm, 5.0)
    assert updates.bias is None
    h.assert_close(updates.weight, np.array([[0.6], [0.8]]))
