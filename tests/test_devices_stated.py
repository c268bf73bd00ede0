"""pmap and shard_map(check_vma=False): no type says how leaves lie, the user does."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import _helpers as h
import _layouts as d
import _transforms as t
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

SCOPES = ("normalize_to_unit_global_norm", "clip_by_leaf_norm", "clip_by_param_norm")
ROWS = [
    pytest.param(
        row,
        ord,
        marks=()
        if row.name == SCOPES[0] or (row.name in SCOPES and ord == 2)
        else pytest.mark.slow,
    )
    for row in t.having(norm_based=True)
    for ord in (d.ORDERS if row.takes("ord") else (2,))
]


def untracked(fn: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Any = None):
    return d.smap(fn, mesh or d.mesh(), in_specs, out_specs, check_vma=False)


# -------------------------------------------------------------- what can be said
@pytest.mark.parametrize(("row", "ord"), ROWS)
def test_specs_of_each_leaf(row: t.Row, ord: float) -> None:
    step = d.update_of(row, ord, d.SPECS)
    got = untracked(step, (d.SPECS, d.SPECS), (d.SPECS, P()))(d.GRADS, d.PARAMS)
    d.assert_as_worked_out(row, ord, *got)


SPLIT = {"a": {"u": h.draw(1, (16,)), "v": h.draw(2, (8, 3))}, "b": h.draw(3, (8, 2))}


@pytest.mark.parametrize(
    ("said", "split"),
    [
        ("data", P("data")),
        (("data", "model"), P(("data", "model"))),
        (P("data"), P("data")),
        (P(("data", "model")), P(("data", "model"))),
        ({"a": P("model"), "b": P("model")}, P("model")),
        ({"a": {"u": P("data"), "v": P("data")}, "b": P("data")}, P("data")),
    ],
    ids=str,
)
def test_forms_of_the_statement(said: Any, split: P) -> None:
    built = oun.normalize_to_unit_global_norm(sharded_over=said)
    called = oun.normalize_to_unit_global_norm()

    def run(grads: Any) -> Any:
        return (
            built.update(grads, built.init(grads)),
            called.update(grads, called.init(grads), sharded_over=said),
            oun.normalize_grad_norm(grads, sharded_over=said),
        )

    out = (split, P())
    one, two, (got, norm) = untracked(run, (split,), (out,) * 3)(SPLIT)
    want = h.tree_norm(SPLIT)
    h.assert_norm(norm, want)
    h.assert_close(got, jax.tree.map(lambda x: h.wide(x) / want, SPLIT))
    for updates, state in (one, two):
        h.assert_same_bits((updates, state.grad_norm), (got, norm))
    d.assert_same_everywhere((norm, one[1], two[1]))


def test_prefix_with_whole_leaves() -> None:
    specs = {"a": P("data"), "b": P()}
    got = untracked(lambda g: oun.global_norm(g, sharded_over=specs), (specs,), P())(
        SPLIT
    )
    h.assert_norm(got, h.tree_norm(SPLIT))
    d.assert_same_everywhere(got)


def test_none_leaves_in_the_statement_are_whole() -> None:
    grads = {"w": h.draw(1, (8,)), "x": None, "n": jnp.int32(3)}
    said = {"w": P("data"), "x": None, "n": P()}

    def step(w: jax.Array) -> jax.Array:
        return oun.global_norm(grads | {"w": w}, sharded_over=said)

    h.assert_norm(untracked(step, (P("data"),), P())(grads["w"]), h.norm([grads["w"]]))


@pytest.mark.parametrize("row", t.having(norm_based=True), ids=lambda row: row.name)
def test_names_are_ignored_outside_mapped_regions(row: t.Row) -> None:
    """One optimizer works in both: its program is the one without names."""
    step, plain = (d.update_of(row, 2, said) for said in (("data", "moon"), None))
    programs = [jax.make_jaxpr(fn)(d.GRADS, d.PARAMS) for fn in (step, plain)]
    assert str(programs[0]) == str(programs[1])


# ------------------------------------------------------------ what is asked, refused
def in_pmap(fn: Callable[[Any], Any], name: str | None) -> None:
    named = {} if name is None else {"axis_name": name}
    jax.pmap(fn, **named)(jnp.ones((8, 2)))


def in_shard_map(fn: Callable[[Any], Any], name: str | None) -> None:
    mesh = d.mesh((8,), (name or "d",))
    untracked(fn, P(name or "d"), P(name or "d"), mesh)(jnp.ones((8, 2)))


@pytest.mark.parametrize("row", t.having(norm_based=True), ids=lambda row: row.name)
@pytest.mark.parametrize("run", [in_pmap, in_shard_map])
def test_auto_asks_the_question(run: Callable[..., None], row: t.Row) -> None:
    tx = row.make(*t.binding(row))

    def step(g: Any) -> Any:
        return tx.update(g, tx.init(jnp.ones(2)), g)[0]

    with pytest.raises(ValueError, match="whole on every device") as said:
        run(step, "spokes")
    for part in ("'spokes'", "sharded_over=None", "sharded_over='spokes'", "average"):
        assert part in str(said.value)


@pytest.mark.parametrize(
    "fn", [oun.global_norm, oun.leaf_norms, oun.normalize_grad_norm]
)
def test_functions_ask_it_too(fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"piece of a larger array.*'i'"):
        in_pmap(fn, "i")


def test_partly_untracked_axes_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"'i'"):
        in_pmap(lambda g: oun.clip_grad_norm(g, 1.0)[0], "i")


@pytest.mark.parametrize("said", ["rows", ("d", "rows"), P("rows"), {"w": P("rows")}])
def test_axis_that_the_mesh_does_not_have(said: Any) -> None:
    tx = oun.clip_by_global_norm(1.0, sharded_over=said)

    def step(g: Any) -> Any:
        return tx.update({"w": g}, tx.init({"w": g}))[0]["w"]

    for run in (in_pmap, in_shard_map):
        with pytest.raises(ValueError, match=r"'rows'.*'d'"):
            run(step, "d")


@pytest.mark.parametrize("said", [3, {"w": 3}, {"w": "d"}, [P("d"), 4]], ids=str)
def test_statement_of_another_kind(said: Any) -> None:
    with pytest.raises(TypeError, match="`sharded_over` must be"):
        oun.clip_by_global_norm(1.0, sharded_over=said)
    tx = oun.clip_by_global_norm(1.0)
    grads = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="`sharded_over` must be"):
        tx.update(grads, tx.init(grads), sharded_over=said)


def test_names_say_nothing_of_dimensions() -> None:
    tx = oun.clip_by_leaf_norm(1.0, stacked_axis=0, sharded_over="d")
    with pytest.raises(ValueError, match="PartitionSpec"):
        in_shard_map(lambda g: tx.update(g, tx.init(g))[0], "d")


# ---------------------------------------------------- said from the training step
def wrapped(tx: optax.GradientTransformationExtraArgs) -> dict[str, Any]:
    """The wrappers that pass extra arguments on, each around the transform."""
    return {
        "chain": optax.chain(tx, optax.sgd(1.0)),
        "masked": optax.masked(tx, {"w": True}),
        "partition": optax.partition({"all": tx}, {"w": "all"}),
        "MultiSteps": optax.MultiSteps(tx, 1).gradient_transformation(),
        "MultiSteps around chain": optax.MultiSteps(
            optax.chain(tx, optax.identity()), 1
        ).gradient_transformation(),
        "inject_hyperparams": optax.inject_hyperparams(
            lambda scale: optax.chain(tx, optax.scale(scale))
        )(scale=1.0),
    }


WRAPPERS = list(wrapped(oun.record_norm()))


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_training_step_says_it(name: str) -> None:
    tx = wrapped(oun.normalize_to_unit_global_norm())[name]
    x = h.draw(1, (8, 2))

    def step(g: jax.Array, said: Any) -> jax.Array:
        updates, state = tx.update(
            {"w": g}, tx.init({"w": g}), {"w": g}, sharded_over=said
        )
        return jnp.abs(updates["w"]), d.records(state)[0].grad_norm

    pieces, norm = jax.pmap(lambda g: step(g, "i"), axis_name="i")(x)
    h.assert_close(pieces, np.abs(h.wide(x)) / h.norm([x]))
    h.assert_norm(norm[0], h.norm([x]))
    own, norms = jax.pmap(lambda g: step(g, None), axis_name="i")(x)
    for i in range(8):
        h.assert_close(own[i], np.abs(h.wide(x[i])) / h.norm([x[i]]))
        h.assert_norm(norms[i], h.norm([x[i]]))


@pytest.mark.parametrize("built", ["i", P("i"), None])
def test_the_training_step_replaces_auto_only(built: Any) -> None:
    tx = oun.normalize_to_unit_global_norm(sharded_over=built)
    other = "i" if built is None else None
    x = h.draw(1, (8, 2))

    def step(g: jax.Array) -> jax.Array:
        return tx.update(g, tx.init(g), sharded_over=other)[1].grad_norm

    norms = jax.pmap(step, axis_name="i")(x)
    for i in range(8):
        h.assert_norm(norms[i], h.norm([x if built is not None else x[i]]))


# ----------------------------------------------------------------- pmap training
def copies(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (8, *x.shape)), tree)


def parts(batch: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)


OPTIMIZER = {
    "clip, adam": lambda **kw: optax.chain(
        oun.clip_by_global_norm(0.1, **kw), optax.adam(1e-2)
    ),
    "unit leaves, sgd": lambda **kw: optax.chain(
        oun.normalize_to_unit_leaf_norm(**kw), optax.sgd(0.1)
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param("clip, adam", marks=pytest.mark.slow), "unit leaves, sgd"]
)
def test_pmap_training_with_averaged_gradients(name: str) -> None:
    tx = OPTIMIZER[name](sharded_over=None)

    def grads(params: Any, batch: Any) -> Any:
        return lax.pmean(jax.grad(d.loss_of)(params, batch), "i")

    step = jax.pmap(d.step_of(tx, grads), axis_name="i")
    params = d.init_model()
    got, state = copies(params), copies(tx.init(params))
    for batch in d.batches():
        got, state = step(got, state, parts(batch))
    want, alone = d.train_single(OPTIMIZER[name]())
    for i in range(8):
        device = jax.tree.map(lambda x, i=i: x[i], (got, state))
        d.assert_near(device, (want, alone))
        h.assert_same_bits(device, jax.tree.map(lambda x: x[0], (got, state)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = oun.metrics(state)
    d.assert_near(found["grad_norm"], alone[0].grad_norm)
    assert jnp.shape(found["grad_norm"]) == ()


@pytest.mark.parametrize(
    "name", [pytest.param("clip, adam", marks=pytest.mark.slow), "unit leaves, sgd"]
)
def test_pmap_training_with_state_split_over_devices(name: str) -> None:
    """Parameters and optimizer state are pieces, as ZeRO keeps them."""
    tx = OPTIMIZER[name](sharded_over="i")
    params = {k: v for k, v in d.init_model().items() if v.shape[0] % 8 == 0}
    axes = dict.fromkeys(params, 0)

    def grads(pieces: Any, batch: Any) -> Any:
        whole = jax.tree.map(lambda x: lax.all_gather(x, "i", tiled=True), pieces)
        found = jax.grad(d.loss_of)(whole, batch)
        return jax.tree.map(lambda x: lax.psum_scatter(x, "i", tiled=True) / 8, found)

    assert axes.keys() == d.WIDTHS.keys()
    step = jax.pmap(d.step_of(tx, grads), axis_name="i")
    got = parts(params)
    state = jax.pmap(tx.init, axis_name="i")(got)
    for batch in d.batches():
        got, state = step(got, state, parts(batch))
    want, alone = d.train_single(OPTIMIZER[name]())
    joined = {k: v.reshape(want[k].shape) for k, v in got.items()}
    d.assert_near(joined, want)
    d.assert_near(state[0].grad_norm, np.full(8, alone[0].grad_norm))
    assert set(np.asarray(state[0].repeated)) == {0}
    assert len({x.tobytes() for x in d.on_devices(state[0].grad_norm)}) == 1


def test_pmap_without_an_axis_name() -> None:
    tx = oun.normalize_to_unit_global_norm(sharded_over=None)
    x = h.draw(1, (8, 4))
    got = jax.pmap(lambda g: tx.update(g, tx.init(g))[0])(x)
    for i in range(8):
        h.assert_close(got[i], h.wide(x[i]) / h.norm([x[i]]))
    auto = oun.normalize_to_unit_global_norm()
    with pytest.raises(ValueError, match="sharded_over=None"):
        in_pmap(lambda g: auto.update(g, auto.init(g))[0], None)


@pytest.mark.slow
def test_shard_map_training_with_averaged_gradients() -> None:
    tx = OPTIMIZER["clip, adam"]()

    def grads(params: Any, batch: Any) -> Any:
        return lax.pmean(jax.grad(d.loss_of)(params, batch), "data")

    step = untracked(
        d.step_of(tx, grads, sharded_over=None),
        (P(), P(), P("data")),
        P(),
        d.mesh((8,), ("data",)),
    )
    params = d.init_model()
    got, state = d.train(step, params, tx.init(params))
    want, alone = d.train_single(tx)
    d.assert_near((got, state), (want, alone))
    d.assert_same_everywhere(state)


# ------------------------------------------------------------------- two mistakes
ORDS = pytest.mark.parametrize("ord", d.ORDERS)


def steps(tx: Any, average: bool, count: int, x: jax.Array) -> Any:
    """The state after some steps under pmap, with or without averaging."""

    def run(g: jax.Array) -> Any:
        state = tx.init(g)
        for i in range(count):
            mine = g * (i + 1)
            mine = lax.pmean(mine, "i") if average else mine
            _, state = tx.update(mine, state, g)
        return state

    return jax.pmap(run, axis_name="i")(x)


def no_warning(state: Any) -> dict[str, jax.Array]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return oun.metrics(state)


X = h.draw(7, (8, 5))


@ORDS
def test_averaged_gradients_said_to_be_split(ord: float) -> None:
    tx = oun.clip_by_global_norm(1.0, ord=ord, sharded_over="i")
    state = steps(tx, True, 3, X)
    assert np.array_equal(state.repeated, np.full(8, 3))
    with pytest.warns(UserWarning, match="sharded_over=None"):
        oun.metrics(state)


@ORDS
def test_split_gradients_do_not_repeat(ord: float) -> None:
    tx = oun.clip_by_global_norm(1.0, ord=ord, sharded_over="i")
    state = steps(tx, False, 3, X)
    assert np.array_equal(state.repeated, np.zeros(8))
    no_warning(state)


def test_forgotten_averaging() -> None:
    tx = oun.clip_by_global_norm(1.0, sharded_over=None)
    with pytest.warns(UserWarning, match="averaged"):
        oun.metrics(steps(tx, False, 3, X))
    no_warning(steps(tx, True, 3, X))


def test_forgotten_averaging_between_the_shards_of_one_array() -> None:
    tx = optax.chain(oun.clip_by_global_norm(1.0), optax.sgd(0.1))

    def run(g: jax.Array, average: bool) -> Any:
        g = lax.pmean(g, "d") if average else g
        return tx.update(g, tx.init(g), sharded_over=None)[1]

    for average in (True, False):
        state = untracked(
            lambda g, a=average: run(g, a), P("d"), P(), d.mesh((8,), ("d",))
        )(X)
        if average:
            no_warning(state)
        else:
            with pytest.warns(UserWarning, match="averaged"):
                oun.metrics(state)


def test_one_repeated_step_is_counted_and_no_mistake() -> None:
    tx = oun.record_norm(sharded_over="i")

    def run(g: jax.Array) -> Any:
        state = tx.update(lax.pmean(g, "i"), tx.init(g))[1]
        return tx.update(g, state)[1]

    state = jax.pmap(run, axis_name="i")(X)
    assert np.array_equal(state.repeated, np.ones(8))
    assert np.array_equal(state.steps, np.full(8, 2))
    no_warning(state)


def test_zero_sums_do_not_count_as_repeated() -> None:
    tx = oun.record_norm(sharded_over="i")
    state = steps(tx, False, 2, jnp.zeros((8, 3)))
    assert np.array_equal(state.repeated, np.zeros(8))


def test_axes_of_size_one_do_not_count_as_repeated() -> None:
    tx = oun.record_norm(sharded_over=("i", "j"))
    mesh = d.mesh((1, 8), ("i", "j"))

    def run(said: Any) -> Any:
        return lambda g: oun.record_norm(sharded_over=said).update(g, tx.init(g))[1]

    state = untracked(run("i"), P("i"), P(), mesh)(X)
    assert np.array_equal(state.repeated, 0)
    state = untracked(run(("i", "j")), P("j"), P(), mesh)(X)
    assert np.array_equal(state.repeated, 0)
    h.assert_norm(state.grad_norm, h.norm([X]))


def test_signs_look_like_repeated_sums_as_documented() -> None:
    tx = oun.record_norm(sharded_over="i")
    state = steps(tx, False, 2, jnp.sign(X))
    assert np.array_equal(state.repeated, np.full(8, 2))


def test_types_leave_nothing_to_count() -> None:
    """Where types are tracked equal shards are no mistake."""
    tx = oun.record_norm()
    mesh = d.mesh((8,), ("d",))
    run = d.smap(lambda g: tx.update(g, tx.init(g))[1], mesh, P("d"), P())
    assert run(jnp.ones(8)).repeated == 0


def test_non_finite_sums_do_not_count_as_repeated() -> None:
    tx = oun.record_norm(sharded_over="i")
    state = steps(tx, False, 2, jnp.full((8, 3), jnp.inf))
    assert np.array_equal(state.repeated, np.zeros(8))
    assert np.array_equal(state.nonfinite, np.full(8, 2))


def test_mixed_leaves_of_which_some_repeat() -> None:
    """Averaged and split leaves together: what repeats is said once."""
    tx = oun.record_norm(sharded_over={"a": P("i"), "b": P()})

    def run(g: jax.Array) -> Any:
        grads = {"a": lax.pmean(g, "i"), "b": jnp.ones(3)}
        return tx.update(grads, tx.init(grads))[1]

    state = jax.pmap(run, axis_name="i")(X)
    assert np.array_equal(state.repeated, np.ones(8))


def test_the_question_names_every_mapped_axis() -> None:
    tx = oun.record_norm()
    with pytest.raises(ValueError) as said:
        untracked(lambda g: tx.update(g, tx.init(g))[0], P("data"), P("data"))(
            jnp.ones(4)
        )
    assert re.search(r"'data', 'model'", str(said.value))


def test_statements_under_vmap_inside_pmap() -> None:
    """Each member has its own norm, over devices."""
    x = h.draw(1, (8, 3, 2))

    def member(g: jax.Array) -> jax.Array:
        return oun.global_norm(g, sharded_over="i")

    norms = jax.pmap(jax.vmap(member), axis_name="i")(x)
    for m in range(3):
        h.assert_norm(norms[0, m], h.norm([x[:, m]]))
    assert math.isfinite(norms[0, 0])
