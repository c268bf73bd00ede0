"""Inside the programs people write: optax's wrappers, flax, equinox, meshes."""

import math
from typing import Any

import _helpers as h
import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _transforms import (
    FOUND,
    GRADS,
    PARAMS,
    Row,
    binding,
    expected,
    one_of_a_kind,
    some_slow,
)
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

# One transform of each kind, since composition is no matter of the formula.
KINDS = one_of_a_kind(FOUND)
PLAIN = [row for row in KINDS if not row.memory]
each_kind = some_slow(KINDS)
each_rule = some_slow(PLAIN)

REAL = {"a": GRADS["w"], "b": {"c": GRADS["b"], "d": GRADS["s"]}}
HELD = {"a": PARAMS["w"], "b": {"c": PARAMS["b"], "d": PARAMS["s"]}}


# ------------------------------------------------------------------ optax


@each_kind
def test_chain(row: Row) -> None:
    """Before and after others, in one jitted step that keeps every type."""
    thresholds = binding(row)
    tx = optax.chain(row.make(*thresholds), optax.scale(-0.5))
    state = tx.init(HELD)
    updates, after = jax.jit(tx.update)(REAL, state, HELD)
    h.assert_same_types(after, state)
    want, _ = expected(row, REAL, thresholds, HELD)
    h.assert_close(updates, jax.tree.map(lambda x: -0.5 * x, want))
    chex.assert_trees_all_equal_dtypes(optax.apply_updates(HELD, updates), HELD)


@each_kind
def test_masked_twice(row: Row) -> None:
    """Only what both masks choose counts; the rest is optax.MaskedNode inside."""
    thresholds = binding(row)
    mask = {"a": True, "b": {"c": True, "d": False}}
    inner = optax.masked(row.make(*thresholds), mask)
    tx = optax.masked(inner, {"a": True, "b": True})
    updates, _ = jax.jit(tx.update)(REAL, tx.init(HELD), HELD)
    if "groups" in row.args:  # labels alternate over what is left
        want, _ = expected(row, *_without_d(REAL, thresholds, HELD))
    else:
        want, _ = expected(row, REAL, thresholds, HELD, mask=mask)
    h.assert_close(updates["a"], want["a"])
    h.assert_close(updates["b"]["c"], want["b"]["c"])
    h.assert_same_bits(updates["b"]["d"], REAL["b"]["d"])


def _without_d(grads: Any, thresholds: Any, params: Any) -> tuple[Any, Any, Any]:
    left = [{"a": t["a"], "b": {"c": t["b"]["c"]}} for t in (grads, params)]
    return left[0], thresholds, left[1]


@each_kind
def test_partition(row: Row) -> None:
    """One transform a label, each with the leaves of its own."""
    thresholds = binding(row)
    tx = optax.partition(
        {"x": row.make(*thresholds), "y": optax.set_to_zero()},
        {"a": "x", "b": {"c": "y", "d": "y"}},
    )
    updates, _ = jax.jit(tx.update)(REAL, tx.init(HELD), HELD)
    want, _ = expected(row, {"a": REAL["a"]}, thresholds, {"a": HELD["a"]})
    h.assert_close(updates["a"], want["a"])
    h.assert_same_bits(updates["b"], jax.tree.map(jnp.zeros_like, REAL["b"]))


@each_kind
def test_multisteps(row: Row) -> None:
    """Accumulated over two steps, then scaled once, with bfloat16 leaves."""
    tx = optax.MultiSteps(row.make(*binding(row)), 2)
    state = tx.init(HELD)
    update = jax.jit(tx.update)
    double = jax.tree.map(lambda x: 3 * x, REAL)
    first, state = update(REAL, state, HELD)
    h.assert_close(first, jax.tree.map(jnp.zeros_like, REAL), rtol=0, atol=0)
    second, state = update(double, state, HELD)
    mean = jax.tree.map(lambda x: 2 * h.wide(x), REAL)
    want, _ = expected(row, mean, binding(row), HELD)
    # The mean itself is rounded to the accumulator's bfloat16.
    h.assert_close(second["a"], want["a"], rtol=1e-2)
    assert not tx.has_updated(state) or int(state.gradient_step) == 1


@each_rule
def test_apply_if_finite(row: Row) -> None:
    """A NaN step is dropped as a whole, and the next one is as ever."""
    tx = optax.apply_if_finite(row.make(*binding(row)), max_consecutive_errors=5)
    update = jax.jit(tx.update)
    bad = {**REAL, "a": REAL["a"].at[0, 0].set(math.nan)}
    updates, state = update(bad, tx.init(HELD), HELD)
    h.assert_close(updates, jax.tree.map(jnp.zeros_like, REAL), rtol=0, atol=0)
    updates, state = update(REAL, state, HELD)
    h.assert_close(updates, expected(row, REAL, binding(row), HELD)[0])
    assert int(state.total_notfinite) == 1


def test_optimizers_train_with_it() -> None:
    """A quadratic is solved through adam, sgd and lion in scan."""
    for opt in (optax.adam(0.1), optax.sgd(0.1, momentum=0.9), optax.lion(0.01)):
        tx = optax.chain(oun.clip_by_global_norm(1.0), opt)
        target = jnp.array([1.0, -2.0])

        def loss(p: jax.Array, target: jax.Array = target) -> jax.Array:
            return jnp.sum((p - target) ** 2)

        def step(carry: Any, _: None, tx: Any = tx, loss: Any = loss) -> Any:
            p, s = carry
            updates, s = tx.update(jax.grad(loss)(p), s, p)
            return (optax.apply_updates(p, updates), s), None

        start = jnp.array([5.0, 5.0])
        run = jax.jit(lambda c, step=step: jax.lax.scan(step, c, None, length=900)[0])
        p, _ = run((start, tx.init(start)))
        assert float(loss(p)) < 1e-2


def test_normalise_before_and_after_momentum() -> None:
    """Two orders in a chain, two computations: only the second ends in a unit."""
    first = optax.chain(oun.normalize_to_unit_global_norm(), optax.trace(0.9))
    second = optax.chain(optax.trace(0.9), oun.normalize_to_unit_global_norm())
    grads = [jnp.array([3.0, 4.0]), jnp.array([40.0, -30.0])]
    out = {}
    for name, tx in (("first", first), ("second", second)):
        state = tx.init(grads[0])
        for g in grads:
            updates, state = tx.update(g, state)
        out[name] = updates
    h.assert_close(out["first"], np.array([0.8 + 0.54, -0.6 + 0.72]))
    trace = np.array([40 + 2.7, -30 + 3.6])
    h.assert_close(out["second"], trace / np.linalg.norm(trace))


def test_per_example_clipping() -> None:
    """Vmap of the update: each example by its own norm, and how many were clipped."""
    tx = oun.clip_by_global_norm(1.0)
    examples = {"w": h.draw(1, (6, 3, 2), spread=6), "b": h.draw(2, (6, 3), spread=6)}
    updates, state = jax.vmap(lambda g: tx.update(g, tx.init(g)))(examples)
    sizes = [h.tree_norm(jax.tree.map(lambda x, i=i: x[i], examples)) for i in range(6)]
    for i, size in enumerate(sizes):
        scale = min(1, 1 / size)
        one = jax.tree.map(lambda x, i=i, s=scale: h.wide(x[i]) * s, examples)
        h.assert_close(jax.tree.map(lambda x, i=i: x[i], updates), one)
    assert int(jnp.sum(state.clipped)) == sum(size > 1 for size in sizes)
    theirs, clipped = optax.per_example_global_norm_clip(jax.tree.leaves(examples), 1.0)
    ours = [x.sum(0) for x in jax.tree.leaves(updates)]
    h.assert_close(ours, [h.wide(x) for x in theirs], rtol=1e-5, atol=1e-6)
    assert int(clipped) == int(jnp.sum(state.clipped))


# ------------------------------------------------------------------ flax


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 1, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.relu(self.first(x))))


@pytest.mark.parametrize(
    "tx",
    [
        oun.normalize_to_unit_global_norm(),
        oun.clip_by_leaf_norm(1.0),
        oun.clip_by_param_norm(0.5),
        oun.clip_by_group_norm(1.0, lambda g: "all"),
    ],
    ids=["unit", "leaf", "param", "group"],
)
def test_flax_nnx(tx: optax.GradientTransformation) -> None:
    """A training step of nnx, jitted, with dropout: the loss goes down."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(tx, optax.sgd(0.05)), wrt=nnx.Param)
    x = h.draw(1, (16, 4))
    y = jnp.sum(x, axis=1, keepdims=True)

    @nnx.jit
    def step(model: Net, optimizer: nnx.Optimizer) -> jax.Array:
        def loss(m: Net) -> jax.Array:
            return jnp.mean((m(x) - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert float(oun.metrics(optimizer.opt_state)["grad_norm"]) > 0


def test_flax_linen_partitioned() -> None:
    """Boxed parameters of linen keep their boxes through a whole step."""

    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "m"))
            return nn.Dense(3, kernel_init=init)(x)

    model, x = Dense(), h.draw(1, (5, 4))
    params = model.init(jax.random.key(0), x)
    grads = jax.grad(lambda p: jnp.sum(model.apply(p, x) ** 2))(params)
    for tx in (oun.clip_by_global_norm(0.1), oun.clip_by_param_norm(0.01)):
        chained = optax.chain(tx, optax.adam(1e-2))
        state = chained.init(params)
        updates, state = jax.jit(chained.update)(grads, state, params)
        h.assert_same_types(updates, grads)
        kernel = optax.apply_updates(params, updates)["params"]["Dense_0"]["kernel"]
        assert isinstance(kernel, nn.Partitioned)
        h.assert_norm(oun.metrics(state)["grad_norm"], h.tree_norm(grads))


# ------------------------------------------------------------------ equinox


def test_equinox() -> None:
    """Modules with None and functions among their leaves, the usual filtered step."""
    model = eqx.nn.MLP(3, 1, 8, 2, use_final_bias=False, key=jax.random.key(0))
    tx = optax.chain(oun.normalize_to_unit_leaf_norm(), optax.sgd(0.02))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    x = h.draw(1, (20, 3))
    y = jnp.sum(x, axis=1, keepdims=True)

    @eqx.filter_jit
    def step(model: eqx.Module, state: Any) -> Any:
        def loss(m: Any) -> jax.Array:
            return jnp.mean((jax.vmap(m)(x) - y) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, value, updates

    losses = []
    for _ in range(60):
        model, state, value, updates = step(model, state)
        losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    assert isinstance(updates, eqx.nn.MLP) and updates.layers[-1].bias is None
    for leaf in jax.tree.leaves(updates):
        assert h.norm([leaf]) == pytest.approx(0.02, rel=1e-5)


# ------------------------------------------------------------------ meshes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_param_norm_on_a_mesh(kind: AxisType) -> None:
    """Units of every rank on sharded arrays, in the mode jax.make_mesh gives."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    shapes = {"v": (16,), "m": (16, 3), "q": (3, 16, 2), "k": (2, 2, 3, 8), "s": ()}
    specs = {"v": P("d"), "m": P("d"), "q": P(None, "d"), "k": P(None, None, None, "d")}
    grads = {k: h.draw(i, s) for i, (k, s) in enumerate(shapes.items())}
    params = {k: h.draw(i + 9, s, top=-2) for i, (k, s) in enumerate(shapes.items())}
    grads["m"] = grads["m"].astype(jnp.bfloat16)
    row = next(r for r in FOUND if r.name == "clip_by_param_norm")
    want, _ = expected(row, grads, (0.1,), params)
    with jax.set_mesh(mesh):
        split = [
            {
                k: jax.device_put(x, NamedSharding(mesh, specs.get(k, P())))
                for k, x in tree.items()
            }
            for tree in (grads, params)
        ]
        tx = oun.clip_by_param_norm(0.1)
        updates, state = jax.jit(tx.update)(split[0], tx.init(split[1]), split[1])
        h.assert_close(updates, want)
        h.assert_same_types(updates, grads)
        h.assert_norm(state.grad_norm, h.tree_norm(grads))
        for k in grads:
            same = updates[k].sharding.is_equivalent_to(
                split[0][k].sharding, grads[k].ndim
            )
            assert same, updates[k].sharding


@each_rule
def test_explicit_mesh(row: Row) -> None:
    """Every transform on the explicit-axis mesh that jax.make_mesh makes."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    grads = {
        "w": h.draw(1, (16, 4)),
        "b": h.draw(2, (8,), "bfloat16"),
        "s": h.draw(3, ()),
    }
    want, _ = expected(row, grads, binding(row), grads)
    with jax.set_mesh(mesh):
        specs = {"w": P("d"), "b": P("d"), "s": P()}
        split = {
            k: jax.device_put(x, NamedSharding(mesh, specs[k]))
            for k, x in grads.items()
        }
        tx = row.make(*binding(row))
        updates, _ = jax.jit(tx.update)(split, tx.init(split), split)
        h.assert_close(updates, want)
