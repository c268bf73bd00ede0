"""What a training loop can read: metrics of any optimizer state, and a table."""

import math
import warnings
from typing import Any

import _helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_unitnorm as oun

GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
KEYS = {"grad_norm", "grad_scale", "clipped_fraction", "nonfinite_steps"}


def after(tx: optax.GradientTransformation, *trees: Any) -> Any:
    """The state after updates with these gradients."""
    params = jax.tree.map(jnp.ones_like, trees[0])
    state = tx.init(params)
    for grads in trees:
        _, state = jax.jit(tx.update)(grads, state, params)
    return state


def scaled(by: float) -> Any:
    return jax.tree.map(lambda x: x * by, GRADS)


def test_keys_and_values() -> None:
    state = after(oun.clip_by_global_norm(6.5), GRADS, scaled(0.1), scaled(math.nan))
    found = oun.metrics(state)
    assert set(found) == KEYS
    assert all(x.shape == () for x in found.values())
    assert math.isnan(found["grad_norm"])
    assert float(found["clipped_fraction"]) == pytest.approx(1 / 3)
    assert int(found["nonfinite_steps"]) == 1
    found = oun.metrics(after(oun.clip_by_global_norm(6.5), GRADS))
    h.assert_norm(found["grad_norm"], 13.0)
    h.assert_close(found["grad_scale"], np.float64(0.5))


def test_before_the_first_step() -> None:
    """A fraction of no steps is 0."""
    found = oun.metrics(oun.clip_by_global_norm(1.0).init(GRADS))
    assert float(found["clipped_fraction"]) == 0.0
    assert all(bool(jnp.isfinite(x)) for x in found.values())


WRAPPED = {
    "alone": oun.clip_by_global_norm(1.0),
    "chain": optax.chain(
        optax.identity(), oun.clip_by_global_norm(1.0), optax.adam(1.0)
    ),
    "nested": optax.chain(optax.chain(oun.clip_by_global_norm(1.0)), optax.sgd(1.0)),
    "masked": optax.masked(oun.clip_by_global_norm(1.0), {"w": True, "b": True}),
    "partition": optax.partition(
        {"a": oun.clip_by_global_norm(1.0), "z": optax.set_to_zero()},
        {"w": "a", "b": "a"},
    ),
    "multisteps": optax.MultiSteps(
        optax.chain(oun.clip_by_global_norm(1.0), optax.sgd(1.0)), 1
    ).gradient_transformation(),
    "inject": optax.inject_hyperparams(oun.clip_by_global_norm)(max_norm=1.0),
    "finite": optax.apply_if_finite(oun.clip_by_global_norm(1.0), 3),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_found_wherever_it_is(kind: str) -> None:
    """A single state gives bare keys, however deep."""
    found = oun.metrics(after(WRAPPED[kind], GRADS))
    assert set(found) == KEYS
    h.assert_norm(found["grad_norm"], 13.0)
    assert float(found["clipped_fraction"]) == 1.0


def test_adam_has_none() -> None:
    assert oun.metrics(optax.adam(1.0).init(GRADS)) == {}
    assert oun.metrics(None) == {}


def test_several_states_have_paths() -> None:
    """Two of them: each under its path in the state."""
    tx = optax.chain(oun.clip_by_global_norm(1.0), oun.normalize_to_unit_leaf_norm())
    found = oun.metrics(after(tx, GRADS))
    assert set(found) == {f"{i}/{key}" for i in (0, 1) for key in KEYS}
    h.assert_norm(found["0/grad_norm"], 13.0)
    h.assert_norm(found["1/grad_norm"], 1.0)
    nested = optax.chain(
        optax.partition(
            {"a": oun.record_norm(), "z": oun.clip_by_global_norm(1.0)},
            {"w": "a", "b": "z"},
        ),
        optax.sgd(1.0),
    )
    state = after(nested, GRADS)
    found = oun.metrics(state, prefix="train/")
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            state, is_leaf=lambda x: isinstance(x, oun.NormState)
        )
        if isinstance(leaf, oun.NormState)
    ]
    assert len(paths) == 2
    assert set(found) == {f"train/{path}/{key}" for path in paths for key in KEYS}


def test_prefix_of_a_single_state() -> None:
    found = oun.metrics(after(oun.record_norm(), GRADS), prefix="train/")
    assert set(found) == {f"train/{key}" for key in KEYS}


def test_in_flax_nnx() -> None:
    """An nnx.Optimizer keeps its state in variables of its own."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = optax.chain(oun.clip_by_global_norm(1.0), optax.adam(1e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.full((1, 2), 30.0)) ** 2))(model)
    want = h.tree_norm(nnx.state(grads) if not isinstance(grads, nnx.State) else grads)
    optimizer.update(model, grads)
    found = oun.metrics(optimizer.opt_state)
    assert set(found) == KEYS
    h.assert_norm(found["grad_norm"], want)
    assert all(isinstance(x, jax.Array) and x.shape == () for x in found.values())


def test_inside_traced_code() -> None:
    """Usable under jit and scan, without a warning and without a value."""
    tx = oun.clip_by_global_norm(1.0)

    @jax.jit
    def step(grads: Any, state: Any) -> Any:
        _, state = tx.update(grads, state)
        return state, oun.metrics(state)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = step(GRADS, tx.init(GRADS))
        _, logs = jax.lax.scan(
            lambda s, _: step(GRADS, s), tx.init(GRADS), None, length=3
        )
    h.assert_norm(found["grad_norm"], 13.0)
    assert logs["grad_norm"].shape == (3,)


def test_vmapped_state_keeps_its_shape() -> None:
    """Members of an ensemble differ, and that is no mistake to warn of."""
    tx = oun.clip_by_global_norm(1.0)
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), GRADS)
    states = jax.vmap(tx.init)(stack)
    _, states = jax.vmap(tx.update)(stack, states)
    found = oun.metrics(states)
    assert found["grad_norm"].shape == (3,)
    h.assert_close(found["grad_norm"], np.array([13.0, 26.0, 39.0]), rtol=4 * h.EPS32)
    assert found["clipped_fraction"].shape == (3,)


def test_repeated_sums_are_reported() -> None:
    """Sums that repeat on every step: averaged gradients were said to be split."""
    state = after(oun.clip_by_global_norm(1.0), GRADS)
    every = state._replace(steps=jnp.int32(9), repeated=jnp.int32(9))
    with pytest.warns(UserWarning, match=r"sharded_over"):
        oun.metrics(every)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oun.metrics(state._replace(steps=jnp.int32(9), repeated=jnp.int32(4)))


# ------------------------------------------------------------------ describe

TABLE = {
    "small": jnp.array([0.3, 0.4]),
    "large": {"kernel": jnp.full((2, 2), 6.0, jnp.bfloat16)},
    "step": 3,
    "frozen": None,
    "empty": jnp.zeros((0, 2)),
    "zero": jnp.zeros(3, jnp.float16),
}


def test_describe_rows() -> None:
    """One row a leaf that counts, the largest share first."""
    table = oun.describe(TABLE)
    rows = list(table)
    assert [row.path for row in rows][:2] == ["large/kernel", "small"]
    first, second = rows[:2]
    assert (tuple(first.shape), str(first.dtype)) == ((2, 2), "bfloat16")
    h.assert_norm(jnp.float32(first.norm), 12.0)
    h.assert_norm(jnp.float32(second.norm), 0.5)
    assert float(first.share) == pytest.approx(144 / 144.25)
    assert float(second.share) == pytest.approx(0.25 / 144.25)
    assert float(first.largest) == 6.0
    assert (first.nan, first.inf) == (0, 0)
    assert sum(float(row.share) for row in rows) == pytest.approx(1.0)


def test_describe_prints_a_table() -> None:
    """Readable as text and in a notebook."""
    table = oun.describe(TABLE)
    text = str(table)
    lines = text.splitlines()
    assert any("large/kernel" in line and "bfloat16" in line for line in lines)
    assert repr(table) == text
    assert max(map(len, lines)) <= 120
    html = table._repr_html_()
    assert "<table" in html and "large/kernel" in html


def test_describe_escapes_paths() -> None:
    html = oun.describe({"<b>": jnp.ones(2)})._repr_html_()
    assert "<b>" not in html.replace("<b></b>", "")
    assert "&lt;b&gt;" in html


def test_describe_nonfinite() -> None:
    """The bad leaves, with what they hold."""
    tree = {
        "good": jnp.ones(2),
        "nan": jnp.array([math.nan, math.nan, 1.0]),
        "inf": jnp.array([math.inf, -math.inf, math.inf, math.nan]),
    }
    table = oun.describe(tree)
    assert sorted(table.nonfinite) == ["inf", "nan"]
    bad = {row.path: (row.nan, row.inf) for row in table}
    assert bad == {"nan": (2, 0), "inf": (1, 3), "good": (0, 0)}
    assert "nan" in str(table)
    assert not list(oun.describe({"good": jnp.ones(2)}).nonfinite)


def test_describe_anything() -> None:
    for tree in ({}, None, {"n": 3}, jnp.ones(2), 2.5, [np.ones(2, np.float16)]):
        assert isinstance(str(oun.describe(tree)), str)
    huge = oun.describe({"a": jnp.full(2, 1e30), "b": jnp.full(2, 1e-30)})
    first = next(iter(huge))
    h.assert_norm(jnp.float32(first.norm), math.sqrt(2) * 1e30)
    assert float(first.share) == 1.0
