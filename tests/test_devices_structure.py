"""Programs inside programs: nested and partly manual regions, vmap, loops, meshes."""

import math
from collections.abc import Callable
from typing import Any

import _helpers as h
import _layouts as d
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

X = {"both": h.draw(1, (8, 8)), "rows": h.draw(2, (8, 3)), "whole": h.draw(3, (5,))}
SPECS = {"both": P("data", "model"), "rows": P("data"), "whole": P()}
NORM = h.tree_norm(X)
UNIT = jax.tree.map(lambda x: h.wide(x) / NORM, X)


def unit(grads: Any, **said: Any) -> tuple[Any, jax.Array]:
    tx = oun.normalize_to_unit_global_norm(**said)
    updates, state = tx.update(grads, tx.init(grads))
    return updates, state.grad_norm


def assert_unit(got: tuple[Any, jax.Array]) -> None:
    h.assert_close(got[0], UNIT)
    h.assert_norm(got[1], NORM)


# ------------------------------------------------------- nested and partly manual
def outer_specs(axis: str) -> dict[str, P]:
    """The part of `SPECS` that a region with one manual axis sees."""
    return {k: P(*[a if a == axis else None for a in s]) for k, s in SPECS.items()}


@pytest.mark.parametrize("outer", ["data", "model"])
def test_nested_shard_map(outer: str) -> None:
    inner = "model" if outer == "data" else "data"

    def run(grads: Any) -> Any:
        split = outer_specs(inner)
        region = jax.shard_map(
            unit, in_specs=(split,), out_specs=(split, P()), axis_names={inner}
        )
        return region(grads)

    split = outer_specs(outer)
    mesh = d.mesh()
    got = d.smap(run, mesh, (split,), (split, P()), axis_names={outer})(
        d.put(X, mesh, SPECS)
    )
    assert_unit(got)
    d.assert_same_everywhere(got[1])


@pytest.mark.parametrize("manual", ["data", "model"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_partly_manual(manual: str, kind: AxisType) -> None:
    """One axis is mapped, XLA (or the types) see to the other."""
    mesh = d.mesh(kind=kind)
    split = outer_specs(manual)
    with jax.set_mesh(mesh):
        program = d.smap(unit, mesh, (split,), (split, P()), axis_names={manual})
        got = program(d.put(X, mesh, SPECS))
    assert_unit(got)
    d.assert_same_everywhere(got[1])


@pytest.mark.parametrize("manual", ["data", "model"])
def test_partly_manual_with_specs(manual: str) -> None:
    """Specs name all axes, those that are mapped and those that XLA sees to."""
    mesh = d.mesh()
    split = outer_specs(manual)
    with jax.set_mesh(mesh):
        program = d.smap(
            lambda g: unit(g, sharded_over=SPECS),
            mesh,
            (split,),
            (split, P()),
            axis_names={manual},
        )
        got = program(d.put(X, mesh, SPECS))
    assert_unit(got)


def test_shard_map_inside_jit_with_more_around_it() -> None:
    mesh = d.mesh()
    region = jax.shard_map(unit, mesh=mesh, in_specs=(SPECS,), out_specs=(SPECS, P()))

    def run(grads: Any) -> Any:
        doubled = jax.tree.map(lambda x: 2 * x, grads)
        updates, norm = region(doubled)
        return updates, norm / 2

    assert_unit(jax.jit(run)(X))


# ---------------------------------------------------------------------- vmap
MEMBERS = {k: jnp.stack([x, 2 * x, x + 1]) for k, x in X.items()}


def assert_members(got: tuple[Any, jax.Array]) -> None:
    for m in range(3):
        tree = {k: x[m] for k, x in MEMBERS.items()}
        norm = h.tree_norm(tree)
        h.assert_norm(got[1][m], norm)
        for k, x in tree.items():
            h.assert_close(got[0][k][m], h.wide(x) / norm)


@pytest.mark.parametrize("name", [None, "member"])
def test_vmap_inside_shard_map(name: str | None) -> None:
    specs = {k: P(None, *s) for k, s in SPECS.items()}
    run = jax.vmap(unit, axis_name=name) if name else jax.vmap(unit)
    assert_members(d.smap(run, d.mesh(), (specs,), (specs, P()))(MEMBERS))


@pytest.mark.parametrize("name", [None, "member"])
def test_vmap_over_shard_map(name: str | None) -> None:
    region = jax.shard_map(
        unit, mesh=d.mesh(), in_specs=(SPECS,), out_specs=(SPECS, P())
    )
    run = jax.vmap(region, axis_name=name) if name else jax.vmap(region)
    assert_members(jax.jit(run)(MEMBERS))


def test_vmap_over_specs_under_an_automatic_mesh() -> None:
    with jax.set_mesh(d.mesh()):
        got = jax.jit(jax.vmap(lambda g: unit(g, sharded_over=SPECS)))(MEMBERS)
    assert_members(got)


def test_named_vmap_alone_maps_no_devices() -> None:
    """Each member has its own norm; a vmapped axis is not asked about."""
    assert_members(jax.jit(jax.vmap(unit, axis_name="member"))(MEMBERS))


def test_named_vmap_axis_can_be_summed_over() -> None:
    """Members that are pieces of one array, as in a test of a program for pmap."""
    x = h.draw(1, (8, 3))
    norms = jax.jit(
        jax.vmap(lambda g: oun.global_norm(g, sharded_over="i"), axis_name="i")
    )(x)
    for norm in norms:
        h.assert_norm(norm, h.norm([x]))


def test_vmap_of_units_inside_shard_map() -> None:
    x, p = h.draw(1, (3, 8, 4)), h.draw(2, (3, 8, 4))
    spec = P(None, "data", "model")

    def run(said: Any) -> Callable[..., Any]:
        tx = oun.clip_by_param_norm(0.2, sharded_over=said)
        return jax.vmap(lambda g, p: tx.update(g, tx.init(p), p)[0])

    got = d.smap(run(P("data", "model")), d.mesh(), (spec, spec), spec)(x, p)
    h.assert_close(got, jax.jit(run("auto"))(x, p))


# ---------------------------------------------------------------------- loops
def test_scan_and_while_around_the_update() -> None:
    tx = oun.clip_by_global_norm(0.5)

    def step(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state)
        return updates, state

    def scanned(grads: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            return step(carry[1], carry[0]), None

        return lax.scan(body, (grads, tx.init(grads)), None, length=3)[0]

    def looped(grads: Any) -> Any:
        def body(carry: Any) -> Any:
            i, g, s = carry
            return i + 1, *step(s, g)

        return lax.while_loop(lambda c: c[0] < 3, body, (0, grads, tx.init(grads)))[1:]

    for run in (scanned, looped):
        updates, state = d.smap(run, d.mesh(), (SPECS,), (SPECS, P()))(X)
        d.assert_near(updates, jax.tree.map(lambda x: 0.5 * x, UNIT))
        assert state.steps == 3
        assert 1 <= state.clipped <= 3
        d.assert_same_everywhere(state)


def test_recomputed_and_differentiated() -> None:
    def loss(grads: Any) -> jax.Array:
        return jax.checkpoint(oun.global_norm)(grads)

    got = d.smap(jax.grad(loss), d.mesh(), (SPECS,), SPECS)(X)
    d.assert_near(got, UNIT, h.DERIVATIVE_RTOL)


# ---------------------------------------------------------------------- meshes
MESHES = [
    ((8, 1), ("data", "model")),
    ((1, 8), ("data", "model")),
    ((1, 1), ("data", "model")),
    ((3, 2), ("data", "model")),
    ((2, 3), ("data", "model")),
]


@pytest.mark.parametrize(
    ("shape", "names", "ord"),
    [(*mesh, 2) for mesh in MESHES] + [(*MESHES[3], math.inf)],
    ids=str,
)
def test_meshes(shape: tuple[int, ...], names: tuple[str, ...], ord: float) -> None:
    grads = {"both": h.draw(1, (24, 24)), "rows": h.draw(2, (24,)), "whole": X["whole"]}
    norm = h.tree_norm(grads, ord)
    got = d.smap(
        lambda g: unit(g, ord=ord), d.mesh(shape, names), (SPECS,), (SPECS, P())
    )(grads)
    h.assert_norm(got[1], norm)
    h.assert_close(got[0], jax.tree.map(lambda x: h.wide(x) / norm, grads))
    d.assert_same_everywhere(got[1], math.prod(shape))


@pytest.mark.parametrize("tracked", [True, False])
def test_hosts_and_devices(tracked: bool) -> None:
    """Two axes in one entry of a spec, three in the mesh, in either order."""
    mesh = d.mesh((2, 2, 2), ("hosts", "devices", "model"))
    grads = {
        "a": h.draw(1, (8, 2)),
        "b": h.draw(2, (8,)),
        "c": h.draw(3, (4, 8)),
        "d": h.draw(4, (3,)),
    }
    specs = {
        "a": P(("hosts", "devices"), "model"),
        "b": P(("devices", "hosts")),
        "c": P("model", ("hosts", "devices")),
        "d": P(),
    }
    said = "auto" if tracked else specs
    norm = h.tree_norm(grads)
    got = d.smap(
        lambda g: unit(g, sharded_over=said),
        mesh,
        (specs,),
        (specs, P()),
        check_vma=tracked,
    )(grads)
    h.assert_norm(got[1], norm)
    h.assert_close(got[0], jax.tree.map(lambda x: h.wide(x) / norm, grads))
    d.assert_same_everywhere(got[1])


def test_units_over_hosts_and_devices() -> None:
    """The order of the axes within an entry decides where each unit lies."""
    mesh = d.mesh((2, 4), ("hosts", "devices"))
    for spec in (P(None, ("hosts", "devices")), P(None, ("devices", "hosts"))):
        x, p = h.draw(1, (3, 8)), h.draw(2, (3, 8))
        tx = oun.clip_by_param_norm(0.3, sharded_over=spec)
        alone = oun.clip_by_param_norm(0.3)
        got = d.smap(
            lambda g, p, tx=tx: tx.update(g, tx.init(p), p)[0], mesh, (spec, spec), spec
        )(x, p)
        h.assert_close(got, jax.jit(alone.update)(x, alone.init(p), p)[0])


# --------------------------------------------------------- one optimizer for all
def test_one_optimizer_under_jit_shard_map_and_pmap() -> None:
    tx = optax.chain(oun.normalize_to_unit_global_norm(), optax.scale(-1.0))
    x = h.draw(1, (8, 4))
    want = -h.wide(x) / h.norm([x])

    def step(g: jax.Array, **said: Any) -> jax.Array:
        return tx.update(g, tx.init(g), **said)[0]

    mesh = d.mesh((8,), ("i",))
    h.assert_close(jax.jit(step)(x), want)
    h.assert_close(jax.jit(step)(jax.device_put(x, NamedSharding(mesh, P("i")))), want)
    h.assert_close(d.smap(step, mesh, P("i"), P("i"))(x), want)
    untracked = d.smap(
        lambda g: step(g, sharded_over="i"), mesh, P("i"), P("i"), check_vma=False
    )
    h.assert_close(untracked(x), want)
    h.assert_close(
        jax.pmap(lambda g: step(g, sharded_over="i"), axis_name="i")(x), want
    )


def test_stated_optimizer_under_jit_and_pmap() -> None:
    tx = oun.normalize_to_unit_global_norm(sharded_over="i")
    x = h.draw(1, (8, 4))
    want = h.wide(x) / h.norm([x])

    def step(g: jax.Array) -> jax.Array:
        return tx.update(g, tx.init(g))[0]

    h.assert_close(jax.jit(step)(x), want)
    h.assert_close(jax.pmap(step, axis_name="i")(x), want)


def test_shapes_without_running() -> None:
    tx = oun.clip_by_global_norm(1.0)
    region = jax.shard_map(
        lambda g: tx.update(g, tx.init(g)),
        mesh=d.mesh(),
        in_specs=(SPECS,),
        out_specs=(SPECS, P()),
    )
    updates, state = jax.eval_shape(region, X)
    h.assert_same_types(updates, jax.eval_shape(lambda g: g, X))
    assert all(x.shape == () for x in state)


def test_uneven_arrays_under_jit() -> None:
    """XLA pads what does not divide; padding must not count."""
    mesh = d.mesh((3, 2), ("data", "model"))
    x = h.draw(1, (6, 4))
    with jax.set_mesh(mesh):

        @jax.jit
        def run(g: jax.Array) -> jax.Array:
            g = lax.with_sharding_constraint(g[:5], P("data"))
            return oun.global_norm({"w": g + 1})

        h.assert_norm(run(x), h.norm([np.asarray(x[:5]) + np.float32(1)]))
