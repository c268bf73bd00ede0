"""jit with NamedShardings: automatic axes, explicit axes, and specs that help."""

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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

MODES = {
    "explicit": (AxisType.Explicit, "auto"),
    "explicit, specs said": (AxisType.Explicit, d.SPECS),
    "automatic, specs said": (AxisType.Auto, d.SPECS),
    "automatic": (AxisType.Auto, "auto"),
}
SCOPES = ("clip_by_global_norm", "normalize_to_unit_leaf_norm", "clip_by_param_norm")


def compiled(fn: Callable[..., Any], mesh: Mesh, *trees: Any) -> tuple[Any, Any]:
    """The program for split arguments, and its result."""
    with jax.set_mesh(mesh):
        args = [d.put(tree, mesh, d.SPECS) for tree in trees]
        program = jax.jit(fn).lower(*args).compile()
        return program, program(*args)


def assert_shardings_kept(updates: Any, mesh: Mesh) -> None:
    for k, x in updates.items():
        want = NamedSharding(mesh, d.SPECS[k])
        assert x.sharding.is_equivalent_to(want, x.ndim), (k, x.sharding)


def collectives_of(row: t.Row, ord: float, mode: str) -> int:
    """All-reduces in the program; XLA makes one for each distinct sharding."""
    passes = 2 if ord == 3 else 1
    if mode != "automatic":
        return passes
    if ord == math.inf:
        passes = 2  # the largest and the flag of NaN reduce in different ways
    return passes * len({frozenset(names) for names in d.NAMES.values() if names})


ROWS = [
    pytest.param(row, ord, mode, marks=() if default else pytest.mark.slow)
    for row in t.having(norm_based=True)
    for ord in (d.ORDERS if row.takes("ord") else (2,))
    for mode in MODES
    for default in [
        (row.name == SCOPES[0] and mode == "explicit")
        or (row.name == SCOPES[0] and mode == "automatic" and ord in (2, math.inf))
        or (row.name in SCOPES and ord == 2 and mode == "automatic, specs said")
        or (row.name == SCOPES[-1] and ord == 2 and mode != "explicit, specs said")
    ]
]


@pytest.mark.parametrize(("row", "ord", "mode"), ROWS)
def test_sharded_arrays(row: t.Row, ord: float, mode: str) -> None:
    kind, said = MODES[mode]
    mesh = d.mesh(kind=kind)
    program, (updates, state) = compiled(
        d.update_of(row, ord, said), mesh, d.GRADS, d.PARAMS
    )
    d.assert_as_worked_out(row, ord, updates, state)
    assert_shardings_kept(updates, mesh)
    if row.name == SCOPES[-1] and mode == "automatic":
        return  # nothing shows how units lie: XLA joins their norms as it sees fit
    d.assert_all_reduces(program.as_text(), collectives_of(row, ord, mode))


@pytest.mark.parametrize(
    ("kind", "ord"), [(AxisType.Auto, 2), (AxisType.Explicit, math.inf)]
)
def test_slices_of_sharded_leaves(kind: AxisType, ord: float) -> None:
    keep = ("both", "cols", "half")
    axes = {k: 0 if k in keep else None for k in d.SPECS}
    row = next(row for row in t.FOUND if row.name == "normalize_to_unit_leaf_norm")
    step = d.update_of(row, ord, d.SPECS, stacked_axis=axes)
    program, (updates, state) = compiled(step, d.mesh(kind=kind), d.GRADS, d.PARAMS)
    for k, x in d.GRADS.items():
        x = h.wide(x)
        blocks = h.stacked(0)([x]) if k in keep else h.each([x])
        for ((_, at),) in blocks:
            got = np.asarray(updates[k])[at]
            h.assert_close(got, x[at] / h.norm([x[at]], ord))
    h.assert_norm(state.grad_norm, h.tree_norm(d.GRADS, ord))
    assert_shardings_kept(updates, d.mesh(kind=kind))
    d.assert_all_reduces(program.as_text(), 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_functions_on_sharded_arrays(kind: AxisType) -> None:
    def run(grads: Any) -> Any:
        return (
            oun.global_norm(grads),
            oun.leaf_norms(grads),
            oun.clip_grad_norm(grads, 0.5),
        )

    program, (norm, each, (clipped, known)) = compiled(run, d.mesh(kind=kind), d.GRADS)
    want = h.tree_norm(d.GRADS)
    h.assert_norm(norm, want)
    h.assert_norm(known, want)
    for k, x in d.GRADS.items():
        h.assert_norm(each[k], h.norm([x]))
    h.assert_close(clipped, jax.tree.map(lambda x: h.wide(x) * 0.5 / want, d.GRADS))
    d.assert_nothing_moves(program.as_text())
    d.assert_same_everywhere((norm, each, known))


# ------------------------------------------------------------------- training
def put_batch(mesh: Mesh, batch: Any) -> Any:
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(True, marks=pytest.mark.slow, id="specs said"),
        pytest.param(False, id="nothing said"),
    ],
)
def test_training_under_jit_equals_one_device(said: bool) -> None:
    """XLA splits an ordinary program; averaging is in the loss itself."""
    layout = d.LAYOUTS["mixed"]
    mesh = layout.mesh()
    specs = dict(layout.specs)
    tx = optax.chain(
        oun.clip_by_global_norm(0.1, sharded_over=specs if said else "auto"),
        optax.adam(1e-2),
    )
    params = d.init_model()
    states = d.state_specs(tx, params, specs)
    named = functools.partial(
        jax.tree.map, lambda s: NamedSharding(mesh, s), is_leaf=d.is_spec
    )
    with jax.set_mesh(mesh):
        step = jax.jit(
            d.step_of(tx, jax.grad(d.loss_of)),
            in_shardings=named((specs, states, P("data"))),
            out_shardings=named((specs, states)),
            donate_argnums=(0, 1),
        )
        placed = jax.device_put((params, tx.init(params)), named((specs, states)))
        got, state = placed
        for batch in d.batches():
            got, state = step(got, state, put_batch(mesh, batch))
    want, alone = d.train_single(
        optax.chain(oun.clip_by_global_norm(0.1), optax.adam(1e-2))
    )
    d.assert_near((got, state), (want, alone))
    d.assert_same_everywhere(state[0])


def test_training_with_explicit_axes_equals_one_device() -> None:
    """Data parallel: the batch is split, and the types of gradients show no split."""
    mesh = d.mesh((8,), ("data",), AxisType.Explicit)
    tx = optax.chain(oun.clip_by_global_norm(0.1), optax.adam(1e-2))
    params = d.init_model()
    with jax.set_mesh(mesh):
        step = jax.jit(d.step_of(tx, jax.grad(d.loss_of)))
        got, state = jax.device_put((params, tx.init(params)), NamedSharding(mesh, P()))
        for batch in d.batches():
            got, state = step(got, state, put_batch(mesh, batch))
    d.assert_near((got, state), d.train_single(tx))
    d.assert_same_everywhere(state[0])


def test_state_can_be_donated() -> None:
    mesh = d.mesh(kind=AxisType.Explicit)
    tx = oun.clip_by_global_norm(1.0)
    with jax.set_mesh(mesh):
        grads = d.put(d.GRADS, mesh, d.SPECS)
        step = jax.jit(lambda g, s: tx.update(g, s), donate_argnums=(0, 1))
        state = jax.jit(tx.init)(grads)
        before = state
        updates, state = step(grads, state)
    assert before.steps.is_deleted()
    assert before.clipped.is_deleted()
    h.assert_norm(state.grad_norm, h.tree_norm(d.GRADS))
    assert_shardings_kept(updates, mesh)


def test_explicit_arrays_outside_of_set_mesh() -> None:
    """The mesh comes with the arrays."""
    mesh = d.mesh(kind=AxisType.Explicit)
    grads = d.put(d.GRADS, mesh, d.SPECS)
    got = jax.jit(oun.global_norm)(grads)
    h.assert_norm(got, h.tree_norm(d.GRADS))


def test_specs_without_a_mesh_in_scope_change_nothing() -> None:
    mesh = d.mesh()
    grads = d.put(d.GRADS, mesh, d.SPECS)
    got = jax.jit(lambda g: oun.global_norm(g, sharded_over=d.SPECS))(grads)
    h.assert_norm(got, h.tree_norm(d.GRADS))


def test_many_small_leaves_are_not_gathered() -> None:
    """Packing small leaves into one would gather those that are split."""
    mesh = d.mesh((8,), ("data",))
    specs = [P("data") if i % 2 else P() for i in range(24)]
    grads = [h.draw(i, (8, 2)) for i in range(24)]
    tx = oun.clip_by_global_norm(1.0)
    with jax.set_mesh(mesh):
        args = d.put(grads, mesh, specs)
        program = jax.jit(lambda g: tx.update(g, tx.init(g))).lower(args).compile()
        _, state = program(args)
    d.assert_all_reduces(program.as_text(), 1)
    h.assert_norm(state.grad_norm, h.norm(grads))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_dtypes_of_sharded_leaves(kind: AxisType) -> None:
    dtypes = ("float8_e4m3fn", "float16", "bfloat16", "float32", "complex64")
    grads = {k: h.draw(i, (8, 3), k) for i, k in enumerate(dtypes)}
    specs = dict.fromkeys(grads, P("data"))
    tx = oun.normalize_to_unit_global_norm()
    mesh = d.mesh(kind=kind)
    with jax.set_mesh(mesh):
        got, state = jax.jit(lambda g: tx.update(g, tx.init(g)))(
            d.put(grads, mesh, specs)
        )
    want = h.tree_norm(grads)
    h.assert_norm(state.grad_norm, want)
    h.assert_close(got, {k: h.wide(x) / want for k, x in grads.items()})
    for k in grads:
        assert got[k].dtype == grads[k].dtype


def test_units_under_explicit_axes() -> None:
    """optax.adaptive_grad_clip raises a ShardingTypeError here."""
    mesh = d.mesh(kind=AxisType.Explicit)
    tx = oun.clip_by_param_norm(0.1)
    x, p = h.draw(1, (8, 8)), h.draw(2, (8, 8))
    with jax.set_mesh(mesh):
        args = d.put((x, p), mesh, (P("data", "model"),) * 2)
        got = jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(*args)
    for i in range(8):
        scale = min(1, 0.1 * h.norm([p[:, i]]) / h.norm([x[:, i]]))
        h.assert_close(np.asarray(got)[:, i], h.wide(x[:, i]) * scale)


def test_unreduced_leaves_are_refused() -> None:
    mesh = d.mesh(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        a = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P(None, "model")))
        b = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("model", None)))

        @jax.jit
        def run(a: jax.Array, b: jax.Array) -> jax.Array:
            sums = jnp.einsum(
                "ij,jk->ik", a, b, out_sharding=P(None, None, unreduced={"model"})
            )
            return oun.global_norm({"w": sums})

        with pytest.raises(ValueError, match=r"unreduced.*'w'"):
            run(a, b)
