"""One collective a step, none in a branch: on the program before XLA, and after."""

import functools
import math
import pathlib
import re
from typing import Any

import _helpers as h
import _layouts as d
import _transforms as t
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

# Two for other orders, and where units or slices lie on different devices.
AT_MOST = {2: 1, 1: 1, math.inf: 1, 3: 2}
ALL = [
    pytest.param(row, ord, id=f"{row.name}-{ord}")
    for row in t.FOUND
    for ord in (d.ORDERS if row.takes("ord") else (2,))
]


@functools.cache
def traced(row: t.Row, ord: float, tracked: bool) -> Any:
    by_part = row.name == "clip_by_param_norm" or not tracked
    step = d.update_of(row, ord, d.SPECS if by_part else "auto")
    region = jax.shard_map(
        step,
        mesh=d.mesh(),
        in_specs=(d.SPECS, d.SPECS),
        out_specs=(d.SPECS, P()),
        check_vma=tracked,
    )
    return jax.make_jaxpr(region)(d.GRADS, d.PARAMS).jaxpr


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "untracked"])
@pytest.mark.parametrize(("row", "ord"), ALL)
def test_collectives_of_every_transform(row: t.Row, ord: float, tracked: bool) -> None:
    found = list(d.collectives(traced(row, ord, tracked)))
    assert len(found) <= AT_MOST[ord]
    assert bool(found) == row.norm_based
    for name, inside in found:
        assert not set(inside) & set(d.BRANCHES), f"{name} inside {inside}"
        assert "gather" not in name


def test_the_walk_sees_collectives_in_branches() -> None:
    """What the test above looks for, it finds where it is."""
    tx = optax.apply_if_finite(oun.clip_by_global_norm(1.0, sharded_over=P("data")), 3)
    region = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=d.mesh(),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    found = list(d.collectives(jax.make_jaxpr(region)(jnp.ones(8)).jaxpr))
    assert any("cond" in inside for _, inside in found)


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_options_add_no_collective(nonfinite: Any, scheduled: bool) -> None:
    tx = oun.clip_by_leaf_norm(
        (lambda step: 1.0 / (1 + step)) if scheduled else 1.0, nonfinite=nonfinite
    )
    region = jax.shard_map(
        lambda g: tx.update(g, tx.init(g)),
        mesh=d.mesh(),
        in_specs=(d.SPECS,),
        out_specs=(d.SPECS, P()),
    )
    assert len(list(d.collectives(jax.make_jaxpr(region)(d.GRADS).jaxpr))) == 1


def many(count: int) -> tuple[list[jax.Array], list[P]]:
    kinds = (P("data"), P(None, "model"), P("data", "model"), P())
    return [h.draw(i, (4, 4)) for i in range(count)], [
        kinds[i % 4] for i in range(count)
    ]


@pytest.mark.parametrize("make", [oun.clip_by_global_norm, oun.clip_by_leaf_norm])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_any_number_of_leaves(count: int, make: Any) -> None:
    grads, specs = many(count)
    tx = make(1.0)
    region = jax.shard_map(
        lambda g: tx.update(g, tx.init(g)),
        mesh=d.mesh(),
        in_specs=(specs,),
        out_specs=(specs, P()),
    )
    assert len(list(d.collectives(jax.make_jaxpr(region)(grads).jaxpr))) == 1


def test_replicated_leaves_need_no_collective() -> None:
    tx = oun.clip_by_global_norm(1.0)
    region = jax.shard_map(
        lambda g: tx.update(g, tx.init(g)),
        mesh=d.mesh(),
        in_specs=(P(),),
        out_specs=(P(), P()),
    )
    assert not list(d.collectives(jax.make_jaxpr(region)(d.GRADS).jaxpr))


def test_norms_of_each_device_need_one_for_the_record() -> None:
    tx = oun.clip_by_leaf_norm(1.0, sharded_over=None)
    everywhere = P(("data", "model"))
    region = jax.shard_map(
        lambda g: tx.update(g, tx.init(g)),
        mesh=d.mesh(),
        in_specs=(everywhere,),
        out_specs=(everywhere, P()),
    )
    grads = {"a": jnp.ones((8, 2)), "b": jnp.ones(16)}
    assert len(list(d.collectives(jax.make_jaxpr(region)(grads).jaxpr))) == 1


@pytest.mark.parametrize("ord", d.ORDERS)
def test_all_reduces_in_the_compiled_step(ord: float) -> None:
    """XLA joins what it can and splits what it must; here it does neither."""
    grads, specs = many(12)
    tx = oun.clip_by_global_norm(1.0, ord=ord)
    step = d.smap(lambda g: tx.update(g, tx.init(g)), d.mesh(), (specs,), (specs, P()))
    text = step.lower(grads).compile().as_text()
    d.assert_nothing_moves(text)
    assert d.count(text, "all-reduce") == AT_MOST[ord]


INNER = {"sgd": (optax.sgd(0.1), 1), "clip": (oun.clip_by_global_norm(1.0), 2)}


@pytest.mark.parametrize(("inner", "count"), INNER.values(), ids=INNER)
def test_skip_spikes_around_collectives(inner: Any, count: int) -> None:
    """It measures once, and no branch may hold what the inner transform sends."""
    tx = oun.skip_spikes(inner)
    region = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=d.mesh(),
        in_specs=(d.SPECS,),
        out_specs=d.SPECS,
    )
    found = list(d.collectives(jax.make_jaxpr(region)(d.GRADS).jaxpr))
    assert len(found) == count
    assert not any(set(inside) & set(d.BRANCHES) for _, inside in found)


def test_axis_names_stay_in_the_device_room() -> None:
    """No other module names an axis or sends anything (`__main__` tries it out)."""
    words = re.compile(
        r"\b(axis_name|axis_index|axis_size|psum|pmax|pmin|all_gather|shard_map|Mesh|"
        r"PartitionSpec|get_abstract_mesh)\b"
    )
    home = pathlib.Path(oun.__file__).parent
    for path in home.glob("*.py"):
        if path.name in ("_devices.py", "__main__.py"):
            continue
        code = re.sub(r'"""[\s\S]*?"""|#.*|"[^"\n]*"', "", path.read_text())
        assert not words.findall(code), path.name
