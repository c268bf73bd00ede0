"""The corridor: scopes, state, options and errors that name a path."""

import math
from typing import Any

import _helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

LAYERS = {
    "layers": jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]),
    "head": jnp.array([[6.0, 0.0], [8.0, 0.1]]),
}


# ------------------------------------------------------------------ stacked axes


@pytest.mark.parametrize("axis", [0, -2, {"layers": 0, "head": None}, {"layers": -2}])
def test_stacked_axis(axis: Any) -> None:
    """Each slice is clipped by its own norm: one int, negative, or a tree."""
    grads = LAYERS if axis != {"layers": -2} else {"layers": LAYERS["layers"]}
    updates, state = jax.jit(oun.clip_by_leaf_norm(1.0, stacked_axis=axis).update)(
        grads, oun.clip_by_leaf_norm(1.0).init(grads)
    )
    layers = np.array([[0.6, 0.8], [0.3, 0.4], [0, 0]])
    h.assert_close(updates["layers"], layers)
    h.assert_same_bits(updates["layers"][1], grads["layers"][1])
    if axis in (0, -2):
        h.assert_close(updates["head"][0], np.array([1.0, 0.0]))
    elif "head" in grads:
        whole = h.wide(grads["head"]) / h.norm([grads["head"]])
        h.assert_close(updates["head"], whole)
    assert int(state.clipped) == 1


def test_stacked_axis_in_the_middle() -> None:
    """Any axis of any rank, and every rule that has the option."""
    grads = {"x": h.draw(1, (2, 3, 4)), "y": h.draw(2, (5, 3), "bfloat16")}
    blocks = h.stacked(1)([h.wide(x) for x in jax.tree.leaves(grads)])
    assert len(blocks) == 6
    leaves = [h.wide(x) for x in jax.tree.leaves(grads)]
    for make, rms, limit in (
        (oun.normalize_to_unit_leaf_norm, False, None),
        (oun.normalize_to_unit_leaf_rms, True, None),
        (lambda **k: oun.clip_by_leaf_norm(0.5, **k), False, 0.5),
        (lambda **k: oun.clip_by_leaf_rms(0.5, **k), True, 0.5),
    ):
        want = [x.copy() for x in leaves]
        for ((i, at),) in blocks:
            part = leaves[i][at]
            n = h.norm([part]) / (math.sqrt(part.size) if rms else 1)
            want[i][at] = part * (1 / n if limit is None else min(1, limit / n))
        updates, _ = jax.jit(make(stacked_axis=1).update)(grads, None)
        h.assert_close(jax.tree.leaves(updates), want)


def test_stacked_axis_with_a_bad_slice() -> None:
    """One layer's NaN is that layer's own affair."""
    grads = {"layers": LAYERS["layers"].at[0, 0].set(math.nan)}
    for nonfinite, fill in (("propagate", math.nan), ("zero", 0.0)):
        tx = oun.clip_by_leaf_norm(0.1, stacked_axis=0, nonfinite=nonfinite)
        updates, _ = tx.update(grads, None)
        want = np.array([[fill, fill], [0.06, 0.08], [0, 0]])
        h.assert_close(updates["layers"], want)


@pytest.mark.parametrize("axis", [2, -3, {"layers": 2, "head": None}])
def test_stacked_axis_that_is_not_there(axis: Any) -> None:
    tx = oun.clip_by_leaf_norm(1.0, stacked_axis=axis)
    with pytest.raises(ValueError, match=r"layers|head"):
        tx.update(LAYERS, None)
    scalar = {"deep": {"temperature": jnp.float32(1)}}
    with pytest.raises(ValueError, match="temperature"):
        oun.normalize_to_unit_leaf_norm(0).update(scalar, None)


def test_stacked_axis_that_does_not_match() -> None:
    tx = oun.clip_by_leaf_norm(1.0, stacked_axis={"layers": 0, "tail": None})
    with pytest.raises(ValueError, match=r"`stacked_axis`(.|\n)*(head|tail)"):
        tx.update(LAYERS, None)


# ------------------------------------------------------------------ groups

GROUPED = {
    "wild": jnp.full(4, 5e7),
    "rest": {"a": jnp.array([0.3]), "b": jnp.array([0.4])},
}


@pytest.mark.parametrize(
    "groups",
    [
        {"wild": "w", "rest": {"a": "r", "b": "r"}},
        {"wild": "w", "rest": "r"},
        {"wild": 0, "rest": 1},
        {"wild": frozenset({1}), "rest": frozenset({2})},
        lambda grads: {"wild": "w", "rest": "r"},
    ],
    ids=["tree", "prefix", "numbers", "hashables", "callable"],
)
def test_groups(groups: Any) -> None:
    """One wild tensor does not starve the others."""
    tx = oun.clip_by_group_norm(1.0, groups)
    updates, state = jax.jit(tx.update)(GROUPED, tx.init(GROUPED))
    h.assert_same_bits(updates["rest"], GROUPED["rest"])
    h.assert_close(updates["wild"], np.full(4, 0.5))
    h.assert_norm(state.grad_norm, h.tree_norm(GROUPED))
    updates, _ = oun.normalize_to_unit_group_norm(groups).update(GROUPED, None)
    h.assert_close(updates["rest"], {"a": np.array([0.6]), "b": np.array([0.8])})
    h.assert_close(updates["wild"], np.full(4, 0.5))


def test_group_of_none() -> None:
    """Not counted, not scaled: for a leaf, and for everything below a prefix."""
    for groups in (
        {"wild": None, "rest": {"a": "r", "b": "r"}},
        {"wild": None, "rest": "r"},
        lambda grads: {"wild": None, "rest": "r"},
    ):
        tx = oun.clip_by_group_norm(0.1, groups)
        updates, state = tx.update(GROUPED, tx.init(GROUPED))
        h.assert_same_bits(updates["wild"], GROUPED["wild"])
        h.assert_norm(state.grad_norm, 0.5)
        h.assert_close(updates["rest"], {"a": np.array([0.06]), "b": np.array([0.08])})
    both = oun.normalize_to_unit_group_norm({"wild": None, "rest": None})
    h.assert_same_bits(both.update(GROUPED, None)[0], GROUPED)


def test_groups_beside_none_in_the_gradients() -> None:
    """A None among the gradients needs no label."""
    grads = {"a": jnp.array([3.0, 4.0]), "b": None, "c": jnp.array([2.0])}
    for groups in ({"a": 0, "b": None, "c": 1}, {"a": 0, "b": 5, "c": 1}):
        updates, _ = oun.normalize_to_unit_group_norm(groups).update(grads, None)
        want = {"a": np.array([0.6, 0.8]), "b": None, "c": np.array([1.0])}
        h.assert_close(updates, want)


@pytest.mark.parametrize(
    "groups",
    [
        {"wild": "w"},
        {"wild": "w", "rest": {"a": "r"}},
        {"wild": "w", "other": "r"},
        {"wild": "w", "rest": ["r", "r"]},
        lambda grads: {"wild": "w", "rest": {"a": "r"}},
    ],
)
def test_groups_that_do_not_match(groups: Any) -> None:
    tx = oun.clip_by_group_norm(1.0, groups)
    with pytest.raises(ValueError, match=r"`groups`(.|\n)*rest"):
        tx.update(GROUPED, tx.init(GROUPED))


def test_label_that_is_not_hashable() -> None:
    tx = oun.clip_by_group_norm(1.0, {"wild": np.ones(2), "rest": "r"})
    with pytest.raises((TypeError, ValueError), match=r"`groups`(.|\n)*wild"):
        tx.update(GROUPED, None)


# ------------------------------------------------------------------ masks


def test_mask_of_wrong_values() -> None:
    """A mask of numbers or words is a mistake, not a mask."""
    for bad in (1.0, "yes", 2):
        with pytest.raises((TypeError, ValueError), match=r"`mask`(.|\n)*wild"):
            oun.clip_by_global_norm(1.0, mask={"wild": bad, "rest": True})
        tx = oun.clip_by_global_norm(1.0, mask=lambda g, bad=bad: bad)
        with pytest.raises((TypeError, ValueError), match=r"`mask`(.|\n)*wild|rest"):
            tx.update(GROUPED, None)


def test_mask_is_a_single_bool() -> None:
    """The shortest prefix is the root."""
    updates, _ = oun.normalize_to_unit_global_norm(mask=False).update(GROUPED, None)
    h.assert_same_bits(updates, GROUPED)
    updates, _ = oun.normalize_to_unit_global_norm(mask=True).update(GROUPED, None)
    h.assert_norm(jnp.float32(h.tree_norm(updates)), 1.0)


def test_mask_and_groups_and_slices_together() -> None:
    grads = {**GROUPED, "layers": LAYERS["layers"]}
    mask = {"wild": False, "rest": True, "layers": True}
    updates, state = oun.clip_by_leaf_norm(
        1.0, stacked_axis={"wild": None, "rest": None, "layers": 0}, mask=mask
    ).update(grads, oun.clip_by_leaf_norm(1.0).init(grads))
    h.assert_same_bits(updates["wild"], grads["wild"])
    h.assert_close(updates["layers"], np.array([[0.6, 0.8], [0.3, 0.4], [0, 0]]))
    h.assert_norm(state.grad_norm, math.sqrt(25 + 0.25 + 0.25))


# ------------------------------------------------------------------ units


@pytest.mark.parametrize(
    ("axis", "keep"),
    [(0, (1,)), (1, (0,)), (-1, (0,)), ((0, 1), ()), ((), (0, 1)), ((-2,), (1,))],
)
def test_axis_of_param_norm(axis: Any, keep: tuple[int, ...]) -> None:
    """One axis or several: the norm is taken along them."""
    grads, params = h.draw(1, (4, 3)), h.draw(2, (4, 3), top=-2)
    want = h.wide(grads).copy()
    for index in h.slices(want, keep):
        n, m = h.norm([want[index]]), h.norm([h.wide(params)[index]])
        want[index] = want[index] * min(1, 0.1 * max(m, 1e-3) / n)
    for form in (axis, {"w": axis}):
        tx = oun.clip_by_param_norm(0.1, axis=form)
        updates, _ = jax.jit(tx.update)({"w": grads}, None, {"w": params})
        h.assert_close(updates["w"], want)


def test_axis_tree_of_param_norm() -> None:
    """A tree of axes; None infers that leaf's units from its rank."""
    grads = {"a": h.draw(1, (4, 3)), "b": h.draw(2, (4, 3)), "c": h.draw(3, (5,))}
    params = jax.tree.map(lambda x: x[::-1] * 0.1, grads)
    tree = oun.clip_by_param_norm(0.1, axis={"a": 1, "b": None, "c": 0})
    updates, _ = tree.update(grads, None, params)
    for name, axis in (("a", 1), ("b", 0), ("c", 0)):
        alone, _ = oun.clip_by_param_norm(0.1, axis=axis).update(
            grads[name], None, params[name]
        )
        h.assert_close(updates[name], h.wide(alone))


@pytest.mark.parametrize("axis", [2, -3, (0, 2), {"w": 5, "b": 0}])
def test_axis_that_is_not_there(axis: Any) -> None:
    grads = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    tx = oun.clip_by_param_norm(0.1, axis=axis)
    with pytest.raises(ValueError, match=r"w|b"):
        tx.update(grads, None, grads)


def test_rank_without_a_rule() -> None:
    """Rank 6 has no usual units; the error names the leaf and the way out."""
    grads = {"odd": jnp.full((1, 2, 1, 2, 1, 2), 3.0)}
    with pytest.raises(ValueError, match=r"odd(.|\n)*axis|axis(.|\n)*odd"):
        oun.clip_by_param_norm(0.1).update(grads, None, grads)
    updates, _ = oun.clip_by_param_norm(0.1, axis=tuple(range(6))).update(
        grads, None, grads
    )
    h.assert_close(updates["odd"], 0.1 * h.wide(grads["odd"]))


@pytest.mark.parametrize("bad", [-1.0, math.nan, True, "1", None])
def test_bad_eps(bad: Any) -> None:
    h.refused(lambda: oun.clip_by_param_norm(0.1, eps=bad), "eps")


# ------------------------------------------------------------------ state


def test_state_over_a_run() -> None:
    """Counts add up; the norm and the scale are those of the last step."""
    tx = oun.clip_by_global_norm(1.0)
    grads = [jnp.array([3.0, 4.0]) * s for s in (1.0, 0.1, math.nan, 2.0, 0.0)]
    state = tx.init(grads[0])
    seen = []
    for g in grads:
        _, state = jax.jit(tx.update)(g, state)
        seen.append((float(state.grad_norm), int(state.clipped), int(state.nonfinite)))
    assert seen[:2] == [(5.0, 1, 0), (0.5, 1, 0)]
    assert math.isnan(seen[2][0]) and seen[2][1:] == (1, 1)
    assert seen[3:] == [(10.0, 2, 1), (0.0, 2, 1)]
    assert int(state.steps) == 5
    assert int(state.repeated) == 0


def test_state_starts_at_nothing() -> None:
    state = oun.normalize_to_unit_global_norm().init({"w": jnp.ones(2)})
    assert [float(x) for x in state[2:]] == [0, 0, 0, 0]
    assert float(state.grad_norm) == 0


def test_normalisers_and_soft_clip_never_count_as_clipping() -> None:
    for tx in (
        oun.normalize_to_unit_leaf_rms(),
        oun.soft_clip_by_global_norm(0.1),
        oun.record_norm(),
    ):
        _, state = tx.update(GROUPED, tx.init(GROUPED))
        assert (int(state.steps), int(state.clipped)) == (1, 0)


def test_smallest_scale() -> None:
    grads = {"a": jnp.full(4, 5.0), "b": jnp.full(4, 50.0), "c": jnp.full(4, 0.1)}
    tx = oun.clip_by_leaf_norm(1.0)
    _, state = tx.update(grads, tx.init(grads))
    h.assert_close(state.grad_scale, np.float64(0.01))
    tx = oun.normalize_to_unit_leaf_norm()
    _, state = tx.update(grads, tx.init(grads))
    h.assert_close(state.grad_scale, np.float64(0.01))


def test_record_norm_touches_nothing() -> None:
    """The same bits, NaN and inf included, and the norm in the state."""
    grads = {"w": jnp.array([1.0, math.nan, -0.0, 1e-45]), "b": jnp.array([math.inf])}
    tx = oun.record_norm()
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    h.assert_same_bits(updates, grads)
    assert (int(state.nonfinite), int(state.clipped)) == (1, 0)
    _, state = tx.update({"w": jnp.array([3.0, 4.0])}, state)
    h.assert_norm(state.grad_norm, 5.0)
    _, state = oun.record_norm(ord=1).update({"w": jnp.array([3.0, -4.0])}, state)
    h.assert_norm(state.grad_norm, 7.0)


def test_steps_do_not_wrap_a_schedule() -> None:
    """The counter saturates rather than turn negative, as those of optax do."""
    tx = oun.clip_by_global_norm(lambda count: jnp.where(count < 0, 9.0, 1.0))
    grads = jnp.array([3.0, 4.0])
    last = np.iinfo(np.int32).max
    state = tx.init(grads)._replace(steps=jnp.int32(last))
    for _ in range(2):
        updates, state = tx.update(grads, state)
        h.assert_close(updates, np.array([0.6, 0.8]))
        assert int(state.steps) > 0


def test_schedule_of_optax() -> None:
    schedule = optax.linear_schedule(1.0, 0.5, transition_steps=2)
    tx = optax.chain(oun.clip_by_global_norm(schedule), optax.scale(1.0))
    state, grads = tx.init(jnp.ones(2)), jnp.array([3.0, 4.0])
    for want in (1.0, 0.75, 0.5, 0.5):
        updates, state = jax.jit(tx.update)(grads, state)
        h.assert_norm(jnp.float32(h.norm([updates])), want)


# ------------------------------------------------------------------ sharded_over


@pytest.mark.parametrize("axes", ["auto", ("i", "j"), {"wild": P("i"), "rest": P()}])
def test_names_outside_a_mapped_region(axes: Any) -> None:
    """They are ignored, so that one optimizer works inside and outside."""
    for tx in (
        oun.normalize_to_unit_global_norm(sharded_over=axes),
        oun.clip_by_param_norm(0.1, sharded_over=axes),
    ):
        want, _ = type(tx)(tx.init, tx.update).update(GROUPED, None, GROUPED)
        got, _ = jax.jit(tx.update)(GROUPED, None, GROUPED)
        h.assert_close(got, jax.tree.map(h.wide, want))


def test_specs_that_do_not_match() -> None:
    specs = {"wild": P(), "other": P()}
    tx = oun.normalize_to_unit_global_norm(sharded_over=specs)
    with pytest.raises(ValueError, match=r"`sharded_over`(.|\n)*(rest|other)"):
        tx.update(GROUPED, None)


def test_said_in_the_step() -> None:
    """`sharded_over` at update time replaces "auto", and only "auto"."""
    for axes in ("auto", "i"):
        tx = optax.chain(
            oun.clip_by_global_norm(1.0, sharded_over=axes), optax.sgd(1.0)
        )
        state = tx.init(GROUPED)
        got, _ = jax.jit(lambda g, s, tx=tx: tx.update(g, s, g, sharded_over=None))(
            GROUPED, state
        )
        want, _ = tx.update(GROUPED, state, GROUPED)
        h.assert_close(got, jax.tree.map(h.wide, want))
    tx = oun.clip_by_global_norm(1.0)
    h.refused(lambda: tx.update(GROUPED, None, sharded_over=3), "sharded_over")


# ------------------------------------------------------------------ arguments


def test_bad_per_and_fn() -> None:
    h.refused(lambda: oun.scale_from_norm(lambda n: n, per="tensor"), "per")
    h.refused(lambda: oun.scale_from_norm(2.0), "fn")


def test_message_shape() -> None:
    """The one sentence, to the letter."""
    with pytest.raises(ValueError) as error:
        oun.clip_by_global_norm(-1.0)
    assert str(error.value) == "`max_norm` must be >= 0; got -1.0."


def test_eager_checks_stay_out_of_traces() -> None:
    """A traced threshold of any value is not looked at."""
    updates = jax.jit(lambda m: oun.clip_by_global_norm(m).update(LAYERS, None)[0])
    h.assert_same_types(updates(jnp.float32(-1)), LAYERS)
