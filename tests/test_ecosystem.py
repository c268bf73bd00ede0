"""Inside the libraries people train with, as those libraries are installed here.

The breaks this notices: a state that another library cannot store, split or carry; a
restored run that goes on otherwise than one that never stopped; a wrapper that hands
the transforms something they do not take.
"""

import functools
import pathlib
from typing import Any, NamedTuple

import _helpers as h
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from tensorboardX import SummaryWriter
from test_examples import scalars

import optax_unitnorm as oun

X = h.draw(1, (32, 6))
Y = jnp.tanh(jnp.sum(X, axis=1, keepdims=True))
PARAMS = {
    "in": h.draw(2, (6, 16), top=-2),
    "bias": jnp.zeros((1, 16)),
    "out": h.draw(3, (16, 1), top=-2),
}


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


class Run(NamedTuple):
    params: Any
    state: Any
    losses: list[float]


@functools.partial(jax.jit, static_argnames="tx")
def step(tx: Any, params: Any, state: Any, factor: Any) -> Any:
    """One step on data whose gradients are as if multiplied by `factor`."""
    loss, grads = jax.value_and_grad(loss_fn)(params, X, Y)
    grads = jax.tree.map(lambda g: g * factor, grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(tx: Any, steps: int = 20, start: Any = None) -> Run:
    params, state = start or (PARAMS, tx.init(PARAMS))
    losses = []
    for _ in range(steps):
        params, state, loss = step(tx, params, state, 1.0)
        losses.append(float(loss))
    return Run(params, state, losses)


def assert_same_run(got: Any, want: Any) -> None:
    """Two float32 programs for the same formula, some steps apart."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ flax, equinox


class Net(nnx.Module):
    def __init__(self) -> None:
        self.first = nnx.Param(PARAMS["in"])
        self.bias = nnx.Param(PARAMS["bias"])
        self.last = nnx.Param(PARAMS["out"])

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.first[...] + self.bias[...]) @ self.last[...]


def test_nnx_optimizer_trains_as_plain_optax_does() -> None:
    """The boxes of nnx change no number, and `metrics` sees through them."""
    tx = optax.chain(oun.clip_by_global_norm(0.05), optax.adam(1e-2))
    model = Net()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model: Net, optimizer: nnx.Optimizer) -> None:
        grads = nnx.grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(20):
        nnx_step(model, optimizer)
    want = train(tx)
    boxed = {"in": model.first[...], "bias": model.bias[...], "out": model.last[...]}
    assert_same_run(boxed, want.params)
    got, plain = oun.metrics(optimizer.opt_state), oun.metrics(want.state)
    assert got.keys() == plain.keys()
    assert_same_run(got, plain)


def test_nnx_state_can_be_split_and_merged() -> None:
    """nnx.split and nnx.merge, as its own checkpoints do, keep the record."""
    model = Net()
    tx = oun.clip_by_global_norm_percentile(50, window=8)
    optimizer = nnx.Optimizer(model, optax.chain(tx, optax.sgd(0.1)), wrt=nnx.Param)
    grads = nnx.grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
    optimizer.update(model, grads)
    graph, state = nnx.split(optimizer)
    merged = nnx.merge(graph, state)
    before, after = (oun.metrics(o.opt_state) for o in (optimizer, merged))
    assert "grad_threshold" in after
    h.assert_same_bits(after, before)


def test_equinox_serialises_the_state(tmp_path: pathlib.Path) -> None:
    """A module and its optimizer state to a file and back, and on, bit for bit."""
    tx = optax.chain(oun.clip_by_leaf_norm_ema(warmup=2), optax.adam(1e-2))
    model = eqx.nn.MLP(6, 1, 8, 1, use_final_bias=False, key=jax.random.key(0))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def eqx_step(model: Any, state: Any) -> Any:
        def loss(m: Any) -> jax.Array:
            return jnp.mean((jax.vmap(m)(X) - Y) ** 2)

        grads = eqx.filter_grad(loss)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    for _ in range(4):
        model, state = eqx_step(model, state)
    file = tmp_path / "run.eqx"
    eqx.tree_serialise_leaves(file, (model, state))
    empty = jax.tree.map(
        lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, (model, state)
    )
    restored = eqx.tree_deserialise_leaves(file, empty)
    on, again = eqx_step(model, state), eqx_step(*restored)
    arrays = [eqx.filter(tree, eqx.is_array) for tree in (again, on)]
    h.assert_same_bits(*arrays)


# ------------------------------------------------------------------ optax


def test_multi_steps_leaves_out_a_bad_micro_batch() -> None:
    """What MultiSteps refuses never reaches the clip, and is not in its record."""
    tx = optax.MultiSteps(
        optax.chain(oun.clip_by_global_norm(0.05), optax.sgd(0.1)),
        every_k_schedule=2,
        should_skip_update_fn=optax.skip_not_finite,
    )
    params, state = PARAMS, tx.init(PARAMS)
    for factor in (1.0, jnp.nan, 1.0, 1.0, 1.0):
        params, state, _ = step(tx, params, state, jnp.float32(factor))
    record = oun.metrics(state)
    assert int(record["nonfinite_steps"]) == 0
    want = train(optax.chain(oun.clip_by_global_norm(0.05), optax.sgd(0.1)), 2)
    assert int(state.inner_opt_state[0].steps) == 2
    assert_same_run(params, want.params)


def test_schedule_free() -> None:
    """Around and before it: the averaged parameters are those of optax's clip."""
    runs = {}
    for name, clip in (("ours", oun.clip_by_global_norm), ("optax", None)):
        clip = clip or optax.clip_by_global_norm
        inside = optax.contrib.schedule_free(
            optax.chain(clip(0.05), optax.sgd(0.3)), learning_rate=0.3, b1=0.9
        )
        run = train(inside, 40)
        averaged = optax.contrib.schedule_free_eval_params(run.state, run.params)
        runs[name] = averaged
        assert run.losses[-1] < run.losses[0]
        if name == "ours":
            assert 0 < float(oun.metrics(run.state)["clipped_fraction"]) <= 1
    assert_same_run(runs["ours"], runs["optax"])

    before = optax.chain(
        oun.normalize_to_unit_global_norm(),
        optax.contrib.schedule_free_sgd(learning_rate=0.05),
    )
    run = train(before, 40)
    assert run.losses[-1] < 0.8 * run.losses[0]


def test_muon_with_ours_for_the_other_leaves() -> None:
    """Matrices by muon; the norm of the rest is of the rest alone."""
    tx = optax.partition(
        {
            "muon": optax.contrib.muon(0.02),
            "rest": optax.chain(oun.clip_by_global_norm(0.01), optax.adam(1e-2)),
        },
        {"in": "muon", "bias": "rest", "out": "rest"},
    )
    run = train(tx, 30)
    assert run.losses[-1] < 0.5 * run.losses[0]
    fresh = tx.init(run.params)
    _, state, _ = step(tx, run.params, fresh, 1.0)
    grads = jax.grad(loss_fn)(run.params, X, Y)
    rest = {"bias": grads["bias"], "out": grads["out"]}
    # Two compilations of one gradient, so not to the last bit.
    got = float(oun.metrics(state)["grad_norm"])
    assert got == pytest.approx(h.tree_norm(rest), rel=1e-4)


def test_unit_norm_before_muon() -> None:
    """Muon's own scale of its first step does not depend on that of the gradient."""
    tx = optax.chain(oun.normalize_to_unit_leaf_norm(), optax.contrib.muon(0.02))
    state = tx.init(PARAMS)
    small, _, _ = step(tx, PARAMS, state, jnp.float32(2.0**-20))
    large, _, _ = step(tx, PARAMS, state, jnp.float32(2.0**20))
    assert_same_run(small, large)


# ------------------------------------------------------------------ orbax

CHAINS: dict[str, Any] = {
    "schedule": lambda: optax.chain(
        oun.clip_by_global_norm(optax.linear_schedule(0.5, 0.01, 8)), optax.adam(1e-2)
    ),
    "normalize": lambda: optax.chain(
        oun.normalize_to_unit_leaf_norm(), optax.sgd(0.1, momentum=0.9)
    ),
    "percentile": lambda: optax.chain(
        oun.clip_by_global_norm_percentile(50, window=4), optax.adam(1e-2)
    ),
    "zscore": lambda: optax.chain(
        oun.clip_by_global_norm_zscore(0.5, warmup=2), optax.adam(1e-2)
    ),
    "ema": lambda: optax.chain(oun.clip_by_leaf_norm_ema(warmup=2), optax.adam(1e-2)),
    "skip": lambda: oun.skip_spikes(optax.adam(1e-2), sigmas=3.0, window=4),
    "multisteps": lambda: optax.MultiSteps(
        optax.chain(oun.clip_by_global_norm(0.05), optax.adam(1e-2)), 3
    ),
}
# Spikes and a NaN on both sides of the checkpoint.
FACTORS = 1.0, 2.0, 40.0, 1.0, np.nan, 1.0, 0.5, 60.0, 1.0, np.nan, 2.0, 1.0
SAVE_AT = 5


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("ema", "skip") else pytest.mark.slow)
        for n in CHAINS
    ],
)
def test_orbax_continues_bit_for_bit(name: str, tmp_path: pathlib.Path) -> None:
    """Saved in the loop, restored into a new optimizer, it never knew of the stop."""
    tx = CHAINS[name]()
    params, state = PARAMS, tx.init(PARAMS)
    with ocp.CheckpointManager(tmp_path) as manager:
        for i, factor in enumerate(FACTORS):
            params, state, _ = step(tx, params, state, jnp.float32(_kept(name, factor)))
            if i == SAVE_AT:
                saved = {"params": params, "state": state}
                manager.save(i, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()

        tx = CHAINS[name]()  # as in a new process, where it is compiled anew
        like = {"params": PARAMS, "state": jax.eval_shape(tx.init, PARAMS)}
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        last = manager.latest_step()
        assert last == SAVE_AT
        back = manager.restore(last, args=ocp.args.StandardRestore(like))
    assert jax.tree.structure(back["state"]) == jax.tree.structure(state)
    again, state_again = back["params"], back["state"]
    for factor in FACTORS[SAVE_AT + 1 :]:
        factor = jnp.float32(_kept(name, factor))
        again, state_again, _ = step(tx, again, state_again, factor)
    h.assert_same_bits((again, state_again), (params, state))


def _kept(name: str, factor: float) -> float:
    """Only a wrapper that leaves steps out survives a NaN with its parameters."""
    return 1.0 if name != "skip" and np.isnan(factor) else factor


# ------------------------------------------------------------------ logging


def test_tensorboard_of_several_records(tmp_path: pathlib.Path) -> None:
    """Two records in one chain are two groups of curves, step by step."""
    tx = optax.chain(
        oun.clip_by_global_norm_percentile(50, window=4),
        optax.adam(1e-2),
        oun.clip_by_leaf_norm(1e-3),
    )
    params, state = PARAMS, tx.init(PARAMS)
    logged = []
    with SummaryWriter(str(tmp_path)) as writer:
        for i in range(5):
            params, state, _ = step(tx, params, state, 1.0)
            logged.append(oun.metrics(state, prefix="train/"))
            for key, value in logged[-1].items():
                writer.add_scalar(key, np.asarray(value), i)
    (file,) = tmp_path.iterdir()
    written = scalars(file)
    assert {"train/2/grad_norm", "train/2/clipped_fraction"} <= set(written)
    assert sum(key.endswith("/grad_threshold") for key in written) == 1
    assert set(written) == set(logged[0])
    for key, pairs in written.items():
        assert [np.float32(v) for _, v in pairs] == [np.float32(x[key]) for x in logged]
