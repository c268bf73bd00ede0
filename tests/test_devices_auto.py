"""shard_map(check_vma=True): the types say how every leaf lies on the devices."""

import functools
import math
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

SCOPES = (
    "normalize_to_unit_global_norm",
    "clip_by_group_norm",
    "clip_by_leaf_rms",
    "clip_by_param_norm",
)

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "clip, adam": lambda **kw: optax.chain(
        oun.clip_by_global_norm(0.1, **kw), optax.adam(1e-2)
    ),
    "unit norm, sgd": lambda **kw: optax.chain(
        oun.normalize_to_unit_global_norm(**kw), optax.sgd(0.1)
    ),
    "unit leaves, momentum": lambda **kw: optax.chain(
        oun.normalize_to_unit_leaf_norm(**kw), optax.sgd(0.1, momentum=0.9)
    ),
    "units of parameters, sgd": lambda **kw: optax.chain(
        oun.clip_by_param_norm(0.05, **kw), optax.sgd(0.1)
    ),
}


def gradients(layout: d.Layout) -> Callable[[Any, Any], Any]:
    return lambda params, batch: jax.grad(d.loss_of)(params, batch, layout)


# ------------------------------------------------------------------- training
@functools.cache
def alone(name: str) -> tuple[Any, Any]:
    return d.train_single(OPTIMIZERS[name]())


CLIP, UNIT, _, BY_UNIT = OPTIMIZERS
DEFAULT = [
    ("fsdp", UNIT),
    ("mixed", CLIP),
]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind, name, marks=() if (kind, name) in DEFAULT else pytest.mark.slow
        )
        for kind in d.LAYOUTS
        for name in OPTIMIZERS
    ],
)
def test_training_equals_one_device(kind: str, name: str) -> None:
    layout = d.LAYOUTS[kind]
    said = {"sharded_over": dict(layout.specs)} if name == BY_UNIT else {}
    tx = OPTIMIZERS[name](**said)
    params = d.init_model()
    specs = (dict(layout.specs), d.state_specs(tx, params, layout.specs))
    step = d.smap(
        d.step_of(tx, gradients(layout)), layout.mesh(), (*specs, layout.batch), specs
    )
    got, state = d.train(step, params, tx.init(params))

    want, state_alone = alone(name)
    d.assert_near(got, want)
    d.assert_near(state, state_alone)
    assert isinstance(state[0], oun.NormState)
    assert state[0].grad_scale != 1
    d.assert_same_everywhere(state[0])


def test_training_moves_far_more_than_the_tolerance() -> None:
    start = d.init_model()
    end, _ = alone(CLIP)
    for k in start:
        assert np.max(np.abs(end[k] - start[k])) > 1e-3 > 100 * d.TRAIN_TOL


# ------------------------------------------------- every transform, every order
# One row runs with every order here, the others in the slow suite.
ROWS = [
    pytest.param(
        row,
        ord,
        marks=() if ord == 2 or row.name == SCOPES[0] else pytest.mark.slow,
    )
    for row in t.FOUND
    for ord in (d.ORDERS if row.takes("ord") else (2,))
]


@pytest.mark.parametrize(("row", "ord"), ROWS)
def test_every_transform_and_order(row: t.Row, ord: float) -> None:
    stated = d.SPECS if row.name == "clip_by_param_norm" else "auto"
    step = d.update_of(row, ord, stated)
    got = d.smap(step, d.mesh(), (d.SPECS, d.SPECS), (d.SPECS, P()))(d.GRADS, d.PARAMS)
    d.assert_as_worked_out(row, ord, *got)


@pytest.mark.parametrize("row", d.with_memory())
def test_history_is_the_same_as_on_one_device(row: t.Row) -> None:
    factors = jnp.array([1, 2, 1, 3, 2, 100, 1], jnp.float32)

    def run(grads: Any) -> Any:
        tx = row.make()

        def step(state: Any, factor: jax.Array) -> tuple[Any, Any]:
            scaled = jax.tree.map(lambda x: x * factor.astype(x.dtype), grads)
            updates, state = tx.update(scaled, state, grads)
            return state, updates

        return lax.scan(step, tx.init(grads), factors)

    stacked = {k: P(None, *spec) for k, spec in d.SPECS.items()}
    state, updates = d.smap(run, d.mesh(), (d.SPECS,), (P(), stacked))(d.GRADS)
    state_alone, updates_alone = jax.jit(run)(d.GRADS)
    d.assert_near(updates, updates_alone, d.BF16_TOL)
    d.assert_near(state, state_alone)
    d.assert_same_everywhere(state)


# ------------------------------------------------------ units and slices of leaves
UNIT_AXES = {
    "by rank": None,
    "first": 0,
    "last": -1,
    "each its own": {
        "both": 1,
        "cols": (0, 1),
        "flat": 0,
        "half": (),
        "rows": 0,
        "whole": 0,
    },
}


def units(axis: Any) -> Any:
    """Blocks of what is left of each leaf when `axis` is summed over."""

    def blocks(leaves: Any) -> Any:
        if axis is None:
            return h.param_units(leaves)
        found = []
        for i, (k, x) in enumerate(zip(d.GRADS, leaves, strict=True)):
            over = axis[k] if isinstance(axis, dict) else axis
            over = over if isinstance(over, tuple) else (over,)
            kept = [n for n in range(x.ndim) if n not in {a % x.ndim for a in over}]
            found += [[(i, at)] for at in h.slices(x, kept)]
        return found

    return blocks


@pytest.mark.parametrize(
    ("axis", "ord"),
    [
        pytest.param(axis, ord, id=f"{name}-{ord}")
        for name, axis in UNIT_AXES.items()
        for ord in (2, math.inf, 3)
        if ord == 2 or name == "each its own"
    ],
)
def test_units_along_split_axes(axis: Any, ord: float) -> None:
    row = next(row for row in t.FOUND if row.name == "clip_by_param_norm")
    step = d.update_of(row, ord, d.SPECS, axis=axis)
    updates, state = d.smap(step, d.mesh(), (d.SPECS, d.SPECS), (d.SPECS, P()))(
        d.GRADS, d.PARAMS
    )
    want, smallest = t.expected(
        row, d.GRADS, t.binding(row), d.PARAMS, ord=ord, blocks=units(axis)
    )
    h.assert_close(updates, want)
    h.assert_norm(state.grad_norm, h.tree_norm(d.GRADS, ord))
    d.assert_near(state.grad_scale, np.float64(smallest))
    d.assert_same_everywhere(state)


@pytest.mark.parametrize(
    ("axis", "ord"),
    [(0, 2), (-1, 3), ({"both": 1, "cols": 0, "half": None}, math.inf)],
    ids=["first", "last", "each its own"],
)
def test_slices_of_split_leaves(axis: Any, ord: float) -> None:
    keep = ("both", "cols", "half")
    grads, specs = ({k: tree[k] for k in keep} for tree in (d.GRADS, d.SPECS))

    def run(sharded_over: Any) -> Any:
        tx = oun.normalize_to_unit_leaf_norm(axis, ord=ord, sharded_over=sharded_over)
        return lambda g: tx.update(g, tx.init(g))

    updates, state = d.smap(run(specs), d.mesh(), (specs,), (specs, P()))(grads)
    leaves = [h.wide(grads[k]) for k in keep]
    axes = [axis[k] if isinstance(axis, dict) else axis for k in keep]
    for k, x, a in zip(keep, leaves, axes, strict=True):
        blocks = h.each([x]) if a is None else h.stacked(a)([x])
        want = np.zeros_like(x)
        for ((_, at),) in blocks:
            want[at] = x[at] / h.norm([x[at]], ord)
        h.assert_close(updates[k], want)
    h.assert_norm(state.grad_norm, h.norm(leaves, ord))
    d.assert_same_everywhere(state)


BY_PART = {
    "units": lambda: oun.clip_by_param_norm(0.1, axis=0),
    "slices": lambda: oun.clip_by_leaf_norm(1.0, stacked_axis=0),
}


@pytest.mark.parametrize("make", BY_PART.values(), ids=BY_PART)
def test_parts_of_split_leaves_need_the_spec(make: Any) -> None:
    tx = make()

    def step(g: Any) -> Any:
        return tx.update(g, tx.init(g), g)[0]

    spec = {"w": P("data")}
    with pytest.raises(ValueError, match=r"PartitionSpec.*'w'"):
        d.smap(step, d.mesh(), (spec,), spec)({"w": jnp.ones((4, 2))})


def test_units_that_are_whole_need_no_spec() -> None:
    tx = oun.clip_by_param_norm(0.1)
    spec = {"v": P("data"), "w": P()}
    grads = {"v": h.draw(1, (8,)), "w": h.draw(2, (4, 2))}

    def step(g: Any) -> Any:
        return tx.update(g, tx.init(g), g)[0]

    got = d.smap(step, d.mesh(), (spec,), spec)(grads)
    h.assert_close(got, jax.jit(step)(grads))


# ------------------------------------------------------------- what is refused
def local(params: Any, batch: Any) -> Any:
    """Gradients of a device's own part of the batch."""
    return jax.grad(alone_loss)(d.vary(params, "data"), batch)


def alone_loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


def gathered(params: Any, batch: Any) -> Any:
    """Averaged gradients, first scattered, then gathered again."""

    def there_and_back(x: jax.Array) -> jax.Array:
        mine = lax.psum_scatter(x, "data", tiled=True) / lax.axis_size("data")
        return lax.all_gather(mine, "data", tiled=True)

    return jax.tree.map(there_and_back, local(params, batch))


def per_example(params: Any, batch: Any) -> Any:
    """A gradient for each example of a device's own part of the batch."""
    params = d.vary(params, "data")

    def one(x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(alone_loss)(params, (x[None], y[None]))

    return jax.vmap(one)(*batch)


PARAMS = {"w": h.draw(1, (8, 3))}
BATCH = (h.draw(2, (16, 8)), h.draw(3, (16, 3)))
REPLICATED = {"w": P()}


def refused(make: Any, grads: Any, vmapped: bool, **said: Any) -> Any:
    """One step from gradients which vary where their parameters do not."""

    def step(params: Any, batch: Any) -> Any:
        tx = make()
        found = grads(params, batch)

        def update(g: Any) -> Any:
            return tx.update(g, tx.init(params), params, **said)

        updates, state = (jax.vmap(update) if vmapped else update)(found)
        return jax.tree.map(lambda x: x[None], updates), state

    return d.smap(
        step, d.mesh((8,), ("data",)), (REPLICATED, P("data")), (P("data"), P())
    )(PARAMS, BATCH)


KINDS = {
    "local": (local, False),
    "all-gathered": (gathered, False),
    "per example": (per_example, True),
}


@pytest.mark.parametrize(("grads", "vmapped"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("row", t.having(norm_based=True), ids=lambda row: row.name)
def test_gradients_that_vary_where_parameters_do_not(
    row: t.Row, grads: Any, vmapped: bool
) -> None:
    with pytest.raises(ValueError, match=r"average.*first.*sharded_over=None") as said:
        refused(lambda: row.make(*t.binding(row)), grads, vmapped)
    assert "'w'" in str(said.value)
    assert "'data'" in str(said.value)


@pytest.mark.parametrize(
    ("grads", "vmapped", "where"),
    [
        (*KINDS["local"], "built"),
        (*KINDS["local"], "called"),
        (*KINDS["all-gathered"], "called"),
        (*KINDS["per example"], "called"),
    ],
    ids=["local, built", *KINDS],
)
def test_none_means_a_norm_of_each_device(
    grads: Any, vmapped: bool, where: str
) -> None:
    said: dict[str, Any] = {"sharded_over": None}
    built, called = (said, {}) if where == "built" else ({}, said)
    updates, state = refused(
        lambda: oun.clip_by_global_norm(0.5, **built), grads, vmapped, **called
    )
    want, norms = [], []
    for device in range(8):
        batch = jax.tree.map(lambda x, at=2 * device: x[at : at + 2], BATCH)
        if grads is gathered:
            found = jax.grad(alone_loss)(PARAMS, BATCH)["w"][None]
        elif vmapped:
            each = [jax.tree.map(lambda x, i=i: x[i][None], batch) for i in range(2)]
            found = [jax.grad(alone_loss)(PARAMS, one)["w"] for one in each]
        else:
            found = jax.grad(alone_loss)(PARAMS, batch)["w"][None]
        norms.append([h.norm([x]) for x in found])
        want += [
            h.wide(x) * min(1, 0.5 / n) for x, n in zip(found, norms[-1], strict=True)
        ]
    got = h.wide(updates["w"]).reshape(np.shape(want))
    d.assert_near(got, np.array(want))
    largest = np.max(norms, axis=0)
    d.assert_near(state.grad_norm, largest if vmapped else largest[0])
    d.assert_near(state.grad_scale, 0.5 / (largest if vmapped else largest[0]))
    d.assert_same_everywhere(state)


def test_without_parameters_varying_means_split() -> None:
    """The documented limit: nothing tells a local gradient from a shard."""
    x = h.draw(1, (16,))
    tx = oun.record_norm()
    program = d.smap(
        lambda g: tx.update(g, tx.init(g))[1].grad_norm,
        d.mesh((8,), ("data",)),
        P("data"),
        P(),
    )
    h.assert_norm(program(x), h.norm([x]))


def test_axis_that_the_leaf_does_not_vary_over() -> None:
    tx = oun.clip_by_global_norm(1.0, sharded_over="data")

    def step(g: Any) -> Any:
        return tx.update(g, tx.init(g))[0]

    with pytest.raises(ValueError, match=r"(?s)'data'.*'w'|'w'.*'data'"):
        d.smap(step, d.mesh(), ({"w": P()},), {"w": P()})({"w": jnp.ones(4)})


# ------------------------------------------------------------------- functions
@pytest.mark.parametrize("ord", d.ORDERS)
def test_functions_on_trees(ord: float) -> None:
    def run(grads: Any) -> Any:
        return (
            oun.global_norm(grads, ord=ord),
            oun.leaf_norms(grads, ord=ord),
            oun.normalize_grad_norm(grads, ord=ord),
            oun.clip_grad_norm(grads, 0.5, ord=ord),
        )

    split = (d.SPECS, P())
    norm, each, unit, clipped = d.smap(
        run, d.mesh(), (d.SPECS,), (P(), P(), split, split)
    )(d.GRADS)
    want = h.tree_norm(d.GRADS, ord)
    for found in (norm, unit[1], clipped[1]):
        h.assert_norm(found, want)
    for k, x in d.GRADS.items():
        h.assert_norm(each[k], h.norm([x], ord))
    h.assert_close(unit[0], jax.tree.map(lambda x: h.wide(x) / want, d.GRADS))
    h.assert_close(clipped[0], jax.tree.map(lambda x: h.wide(x) * 0.5 / want, d.GRADS))
    d.assert_same_everywhere((norm, each, unit[1], clipped[1]))


def test_known_norm_needs_no_collective() -> None:
    def run(grads: Any) -> Any:
        return oun.clip_grad_norm(grads, 0.5, norm=jnp.float32(10.0))[0]

    fn = jax.shard_map(run, mesh=d.mesh(), in_specs=(d.SPECS,), out_specs=d.SPECS)
    assert not list(d.collectives(jax.make_jaxpr(fn)(d.GRADS).jaxpr))
    got = jax.jit(fn)(d.GRADS)
    h.assert_close(got, jax.tree.map(lambda x: h.wide(x) * 0.05, d.GRADS))


def test_mask_on_devices() -> None:
    mask = {k: k in ("both", "whole") for k in d.GRADS}
    tx = oun.normalize_to_unit_global_norm(mask=mask)
    program = d.smap(
        lambda g: tx.update(g, tx.init(g))[0], d.mesh(), (d.SPECS,), d.SPECS
    )
    got = program(d.GRADS)
    norm = h.norm([d.GRADS["both"], d.GRADS["whole"]])
    for k, x in d.GRADS.items():
        if mask[k]:
            h.assert_close(got[k], h.wide(x) / norm)
        else:
            h.assert_same_bits(got[k], x)


# ------------------------------------------------------------------ derivatives
@pytest.mark.parametrize("ord", [2, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_derivatives_on_devices(ord: float) -> None:
    keep = ("both", "flat", "whole")
    grads, specs = ({k: tree[k] for k in keep} for tree in (d.GRADS, d.SPECS))
    weights = {k: h.draw(40 + i, grads[k].shape) for i, k in enumerate(keep)}

    def loss(g: Any, w: Any, over: tuple[str, ...]) -> jax.Array:
        unit, _ = oun.normalize_grad_norm(g, ord=ord)
        parts = [jnp.sum(unit[k] * w[k]) for k in keep]
        for i, k in enumerate(keep):
            axes = tuple(a for a in over if a in d.NAMES[k])
            parts[i] = lax.psum(parts[i], axes) if axes else parts[i]
        return parts[0] + parts[1] + parts[2]

    def run(over: tuple[str, ...]) -> Any:
        return lambda g, w: jax.grad(loss)(g, w, over)

    got = d.smap(run(("data", "model")), d.mesh(), (specs, specs), specs)(
        grads, weights
    )
    want = jax.jit(run(()))(grads, weights)
    d.assert_near(got, want, h.DERIVATIVE_RTOL)


def test_sharded_inf_norm_has_no_derivative_and_says_so() -> None:
    def run(g: Any) -> Any:
        return jax.grad(lambda g: oun.global_norm(g, ord=math.inf))(g)

    with pytest.raises(NotImplementedError, match=r"`ord` must be finite"):
        d.smap(run, d.mesh(), (P("data"),), P("data"))(jnp.ones(4))
