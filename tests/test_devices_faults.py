"""NaN or inf on one device: the same decision everywhere, and nothing hangs."""

import functools
import math
import subprocess
import sys
from typing import Any

import _helpers as h
import _layouts as d
import _transforms as t
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def spoil(grads: dict[str, jax.Array], key: str, at: int, bad: float) -> Any:
    """One bad element, so on one device only where the leaf is split."""
    x = np.array(grads[key], np.float32).ravel()
    x[at] = bad
    return grads | {key: jnp.asarray(x.reshape(grads[key].shape), grads[key].dtype)}


@functools.cache
def program(name: str, ord: float, nonfinite: str, tracked: bool) -> Any:
    row = next(row for row in t.FOUND if row.name == name)
    said = "auto" if tracked else d.SPECS
    step = d.update_of(row, ord, said, nonfinite=nonfinite)
    return d.smap(step, d.mesh(), (d.SPECS, d.SPECS), (d.SPECS, P()), check_vma=tracked)


CASES = [
    pytest.param(
        ord,
        nonfinite,
        tracked,
        marks=()
        if tracked != (ord == 2) and (nonfinite == "zero" or ord == 2)
        else pytest.mark.slow,
    )
    for ord in d.ORDERS
    for nonfinite in ("propagate", "zero")
    for tracked in (True, False)
]


@pytest.mark.parametrize(("ord", "nonfinite", "tracked"), CASES)
def test_bad_element_on_one_device(ord: float, nonfinite: str, tracked: bool) -> None:
    run = program("clip_by_global_norm", ord, nonfinite, tracked)
    want = 0.0 if nonfinite == "zero" else math.nan
    for bad in BAD.values():
        # On the last device, on one in the middle, and on all of them.
        for key, at in (("both", 47), ("flat", 7), ("half", 0), ("whole", 2)):
            updates, state = run(spoil(d.GRADS, key, at, bad), d.PARAMS)
            for x in jax.tree.leaves(updates):
                held = np.asarray(x, np.float32)
                assert np.array_equal(held, np.full_like(held, want), equal_nan=True)
            assert state.nonfinite == 1
            assert not np.isfinite(state.grad_norm)
            d.assert_same_everywhere(state)
    updates, state = run(d.GRADS, d.PARAMS)
    assert state.nonfinite == 0
    assert all(np.all(np.isfinite(np.float32(x))) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("ord", [2, math.inf])
def test_bad_element_spoils_its_own_block_only(ord: float) -> None:
    run = program("normalize_to_unit_leaf_norm", ord, "zero", True)
    updates, state = run(spoil(d.GRADS, "flat", 23, math.nan), d.PARAMS)
    assert np.array_equal(updates["flat"], np.zeros(24))
    for k, x in d.GRADS.items():
        if k != "flat":
            h.assert_close(updates[k], h.wide(x) / h.norm([x], ord))
    assert state.nonfinite == 1
    d.assert_same_everywhere(state)


def test_nan_is_recorded_where_devices_have_their_own_norms() -> None:
    """lax.pmax drops NaN on CPU."""
    tx = oun.clip_by_global_norm(1.0, sharded_over=None, nonfinite="zero")
    run = d.smap(
        lambda g: tx.update(g, tx.init(g)), d.mesh((8,), ("i",)), P("i"), (P("i"), P())
    )
    for device in (0, 3, 7):
        x = h.draw(1, (16,)).at[2 * device].set(jnp.nan)
        updates, state = run(x)
        assert np.isnan(state.grad_norm)
        assert state.nonfinite == 1
        assert np.flatnonzero(np.asarray(updates) == 0).tolist() == [
            2 * device,
            2 * device + 1,
        ]
        d.assert_same_everywhere(state)


@pytest.mark.parametrize("row", d.with_memory())
def test_bad_element_on_one_device_never_enters_a_history(row: t.Row) -> None:
    tx = row.make()

    def run(grads: Any, bad: Any) -> Any:
        _, before = tx.update(grads, tx.init(grads), grads)
        _, after = tx.update(bad, before, grads)
        return before.memory, after.memory

    before, after = d.smap(run, d.mesh(), (d.SPECS, d.SPECS), P())(
        d.GRADS, spoil(d.GRADS, "both", 47, math.inf)
    )
    h.assert_same_bits(after, before)
    d.assert_same_everywhere(after)


# --------------------------------------------------------------- what would hang
_PROGRAM = """
import sys
import jax, jax.numpy as jnp, optax
from jax.sharding import AxisType, PartitionSpec as P
import optax_unitnorm as oun

assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
if sys.argv[1] == "zero":
    tx = oun.clip_by_global_norm(1.0, sharded_over="d", nonfinite="zero")
else:
    tx = optax.apply_if_finite(oun.clip_by_global_norm(1.0, sharded_over="d"), 100)

@jax.jit
def run(g):
    step = lambda g: tx.update(g, tx.init(g))[0]
    return jax.shard_map(
        step, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)(g)

print("finite", run(jnp.arange(16.0)).sum() > 0, flush=True)
print("updates", run(jnp.arange(16.0).at[3].set(jnp.nan)).tolist(), flush=True)
"""


def in_a_process(how: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """Runs with collectives that give up after some seconds, which ends the process."""
    flags = (
        "--xla_force_host_platform_device_count=8 "
        f"--xla_cpu_collective_call_terminate_timeout_seconds={seconds} "
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    )
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, how],
        capture_output=True,
        text=True,
        timeout=120,
        env=d.process_env(JAX_PLATFORMS="cpu", XLA_FLAGS=flags),
    )


def test_zero_does_not_hang_where_a_branch_around_the_collective_does() -> None:
    """Seven devices would wait for the one that saw the NaN and took the branch."""
    ours = in_a_process("zero", 60)
    assert ours.returncode == 0, ours.stderr
    assert f"updates {[0.0] * 16}" in ours.stdout

    theirs = in_a_process("apply_if_finite", 3)
    assert "finite True" in theirs.stdout
    assert "updates" not in theirs.stdout
    assert theirs.returncode != 0
    assert "Termination timeout" in theirs.stderr
