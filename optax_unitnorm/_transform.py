"""The corridor: measure, decide, apply, and the state that says what was done."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_unitnorm import _checks, _devices, _fold, _leaves, _measure
from optax_unitnorm._types import (
    Decision,
    History,
    Nonfinite,
    Norms,
    Rule,
    Scope,
    Transform,
    Tree,
)


class NormState(NamedTuple):
    """What a transform did: the last norm and scale, and counts since the start.

    The state of every transform that measures norms, scalars whatever the scope;
    `metrics` reads it out of any optimizer state. Being a NamedTuple of arrays it is
    saved, restored, donated and replicated as other optax states are.

    Attributes:
        grad_norm: norm of everything that counted, before scaling, a scalar; float32,
            or float64 where a parameter was float64 at init. Where devices had norms of
            their own, the largest.
        grad_scale: the smallest scale used, in the same dtype.
        steps: int32, number of updates; schedules run on it.
        clipped: int32, number of steps on which a threshold bound; 0 for normalisers
            and the soft clip. Non-finite steps do not count here.
        nonfinite: int32, number of steps with a non-finite norm.
        repeated: int32, number of steps on which every device contributed the very same
            sum although the leaves were said to be split over devices, where types
            cannot tell. If it equals `steps`, averaged gradients were probably said to
            be split. (Gradients that are all of one size, such as sign updates, look
            the same.)

    Guarantees:
        - Scalars of fixed dtypes, each in a buffer of its own (tests:
          test_contract.py::test_norm_state, ::test_donated).
        - The norm is right to 4 float32 eps, on one device or many (tests:
          test_contract.py::test_norm_state,
          test_devices_auto.py::test_every_transform_and_order).
        - Counts add up over a run, and `steps` does not wrap (tests:
          test_transform.py::test_state_over_a_run,
          ::test_steps_do_not_wrap_a_schedule).
        - `repeated` leaves out zero sums, axes of size 1 and bad norms, and takes sign
          updates for repeated ones (tests:
          test_devices_stated.py::test_zero_sums_do_not_count_as_repeated,
          ::test_axes_of_size_one_do_not_count_as_repeated,
          ::test_non_finite_sums_do_not_count_as_repeated,
          ::test_signs_look_like_repeated_sums_as_documented).
        - Where devices have norms of their own, the largest is recorded, the same on
          each (tests: test_devices_auto.py::test_none_means_a_norm_of_each_device).
        - Any other state is handed back untouched, and the rule still applies (tests:
          test_contract.py::test_foreign_state).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> tx = oun.clip_by_global_norm(2.5)
        >>> state = tx.init(jnp.zeros(2))
        >>> for grads in (jnp.array([3.0, 4.0]), jnp.array([0.5, 0.0])):
        ...     _, state = tx.update(grads, state)
        >>> float(state.grad_norm), int(state.steps), int(state.clipped)
        (0.5, 2, 1)
    """

    grad_norm: jax.Array
    grad_scale: jax.Array
    steps: jax.Array
    clipped: jax.Array
    nonfinite: jax.Array
    repeated: jax.Array


class HistoryState(NamedTuple):
    """The state of a rule with memory.

    Attributes:
        norm: the NormState.
        threshold: the threshold in force on the last step, a scalar or one
            entry a block in leaf order; infinite before the first step.
        memory: what the rule remembers, scalars and vectors.
    """

    norm: NormState
    threshold: jax.Array
    memory: Any


class SkipState(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
        norm: the NormState of the norm that decides; its scale is 0 on a step
            that was skipped.
        skipped: int32, number of steps skipped in all.
        skipped_in_a_row: int32, number of steps skipped since the last accepted.
        threshold: the norm above which this step would have been skipped.
        memory: the window of norms (and of losses).
        inner: the state of the wrapped transform.
    """

    norm: NormState
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    threshold: jax.Array
    memory: Any
    inner: Any


def init_norm_state(params: Tree) -> NormState:
    """A NormState before the first step, each field in a buffer of its own."""
    leaves = [x for x in jax.tree.leaves(params) if _leaves.counts(x)]
    dtype = _fold.accumulator([jnp.result_type(x) for x in leaves])

    def counter() -> jax.Array:
        return jnp.zeros((), jnp.int32)

    return NormState(
        grad_norm=jnp.zeros((), dtype),
        grad_scale=jnp.ones((), dtype),
        steps=counter(),
        clipped=counter(),
        nonfinite=counter(),
        repeated=counter(),
    )


def transform(
    scope: Scope,
    rule: Rule,
    *thresholds: Any,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    history: "History | None" = None,
    against_params: bool = False,
    scales: bool = True,
) -> Transform:
    """Builds a gradient transformation from a scope and a rule.

    thresholds: what the rule (or the history) takes beside the norms, checked.
    history: makes the rule's threshold of this step from the norms seen so far.
    against_params: the rule needs the norms of the parameters.
    scales: False hands the updates through, whatever their norm is.
    """
    order = _checks.order(ord)
    _leaves.check_mask(mask)
    built_with = _devices.check_statement(sharded_over)
    _checks.choice("nonfinite", nonfinite, ("propagate", "zero"))

    def init(params: Tree) -> Any:
        state = init_norm_state(params)
        if history is None:
            return state
        what = _measure.subject(params, scope, mask=mask, sharded_over=None)
        if any(share.kept for share in what.shares):
            # Only the number of slices depends on how leaves lie.
            what = _measure.subject(params, scope, mask=mask, sharded_over=built_with)
        blocks = _measure.plan(what, order).size
        return HistoryState(state, *history.init(blocks, state.grad_norm.dtype))

    def update(
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        sharded_over: Any = "auto",
        **extra_args: Any,
    ) -> tuple[Tree, Any]:
        del extra_args
        stated = _devices.stated_now(built_with, sharded_over)
        record = _record_in(state, history)
        if record is None and any(map(callable, thresholds)):
            raise ValueError(
                "`state` must be the state of this transform where a threshold is a "
                f"schedule, whose step it counts; got {type(state).__name__}."
            )
        what = _measure.subject(
            updates, scope, mask=mask, sharded_over=stated, params=params
        )
        reference = None
        if against_params:
            if params is None:
                raise ValueError(
                    "`params` must be given to the update of a transform that clips "
                    "by their norm; got None."
                )
            reference = _measure.reference_of(what, params, stated)
        measured, plan = _measure.measure(what, order, reference)
        norms = measured.norms
        dtype = norms.block.dtype
        now = [at_step(t, record, dtype) for t in thresholds]

        if history is None:
            outcome = _amend(norms, rule(norms, *now), nonfinite if scales else None)
            if scales:
                arrays = _apply(what.leaves.arrays, outcome, plan=plan)
                updates = what.leaves.rebuild(arrays)
            if record is None:
                return updates, state
            seen = _devices.largest(_summary(norms, outcome))
            return updates, count_step(record, seen, measured.repeated)

        assert record is not None  # a rule with memory takes no foreign state
        # The history is the same on all devices, even where their norms are not.
        common = _common(norms, record.grad_norm.dtype)
        now = [t.astype(common.total.dtype) for t in now]
        threshold, memory = history.step(
            jax.lax.stop_gradient(state.memory), common, *now
        )
        decision = rule(norms, threshold.astype(dtype))
        arrays = _apply(
            what.leaves.arrays, _amend(norms, decision, nonfinite), plan=plan
        )
        seen = _summary(common, _amend(common, rule(common, threshold), nonfinite))
        memory = _keep_if(jnp.isfinite(common.total), memory, state.memory)
        record = count_step(record, seen, measured.repeated)
        new = HistoryState(record, threshold, memory)
        return what.leaves.rebuild(arrays), new

    return optax.GradientTransformationExtraArgs(init, update)


def scale_tree(
    what: _measure.Subject,
    plan: _measure.Plan,
    norms: Norms,
    decision: Decision,
    nonfinite: Nonfinite,
) -> Tree:
    """The subject's tree, scaled as decided."""
    _checks.choice("nonfinite", nonfinite, ("propagate", "zero"))
    outcome = _amend(norms, decision, nonfinite)
    return what.leaves.rebuild(_apply(what.leaves.arrays, outcome, plan=plan))


class _Outcome(NamedTuple):
    """What to do to each block, and whether a threshold bound."""

    scale: _fold.Scale
    changes: jax.Array
    drops: "jax.Array | None"
    bound: jax.Array


def _record_in(state: Any, history: "History | None") -> "NormState | None":
    """The NormState in a state, None in one of another transform."""
    if history is None:
        return state if isinstance(state, NormState) else None
    if not isinstance(state, HistoryState):
        raise ValueError(
            "`state` must be the state of this transform, which remembers norms; got "
            f"{type(state).__name__}."
        )
    return state.norm


def at_step(threshold: Any, record: "NormState | None", dtype: Any) -> jax.Array:
    """A threshold as an array, a schedule called with the transform's own step."""
    if callable(threshold):
        assert record is not None
        threshold = threshold(record.steps)
    return jnp.asarray(threshold).astype(dtype)


# Compiled, as the measuring and the applying are, for the sake of eager steps.
@functools.partial(jax.jit, static_argnames=("nonfinite",))
def _amend(norms: Norms, decision: Decision, nonfinite: Any) -> _Outcome:
    """The scale of each block, with what `nonfinite` says of a bad norm."""
    scale = _fold.divide(decision.num, decision.den)
    bad = ~jnp.isfinite(norms.block)
    if nonfinite is None:
        return _Outcome(scale, decision.changes, None, decision.bound)
    instead = 0.0 if nonfinite == "zero" else jnp.nan
    scale = scale._replace(first=jnp.where(bad, instead, scale.first))
    drops = bad if nonfinite == "zero" else None
    return _Outcome(scale, decision.changes | bad, drops, decision.bound)


# Compiled by itself as well, so that an eager step is one call a tree, not a leaf.
@functools.partial(jax.jit, static_argnames=("plan",))
def _apply(
    arrays: "list[jax.Array]", outcome: _Outcome, *, plan: _measure.Plan
) -> "list[jax.Array]":
    # Stacked behind a barrier: a compiler would otherwise work out all scales anew
    # in each leaf's loop, and take minutes to write that down.
    rows = [*outcome.scale, outcome.changes]
    if outcome.drops is not None:
        rows.append(outcome.drops)
    dtype = outcome.scale.first.dtype
    stacked = lax.optimization_barrier(jnp.stack([row.astype(dtype) for row in rows]))
    here = functools.partial(_apply_here, plan=plan)
    if not any(block.shape for block in plan.blocks):
        return here(arrays, stacked)
    # Scales along a leaf are cut as the leaf is; XLA would rather move the leaf.
    layouts = plan.layouts[: len(arrays)]
    return _devices.manually(here, arrays, layouts, stacked, as_leaves=True)


def _apply_here(
    arrays: "list[jax.Array]", rows: jax.Array, *, plan: _measure.Plan
) -> "list[jax.Array]":
    scaled: list[jax.Array] = []
    spread = _measure.spread(rows, plan=plan, leaves=len(arrays))
    known: dict[int, Any] = {}  # leaves of one block share their list
    for leaf, own in zip(arrays, spread, strict=True):
        if id(own) not in known:
            drops = own[4] > 0 if len(own) > 4 else None
            known[id(own)] = _fold.Scale(*own[:3]), own[3] > 0, drops
        scaled.append(_fold.scaled(leaf, *known[id(own)]))
    return scaled


@jax.jit
def _summary(norms: Norms, outcome: _Outcome) -> jax.Array:
    """What a step has to say: the norm, minus the smallest scale, what happened.

    One vector, and the larger is what to record where devices differ.
    """
    used = jnp.where(outcome.changes, outcome.scale.value(), 1)
    smallest = jnp.min(used) if used.size else jnp.ones((), used.dtype)
    finite = jnp.isfinite(norms.total)
    flags = jnp.stack([outcome.bound & finite, ~finite]).astype(norms.total.dtype)
    return jnp.concatenate([jnp.stack([norms.total, -smallest]), flags])


def count_step(record: NormState, seen: jax.Array, repeated: jax.Array) -> NormState:
    """The record after a step; see `_summary` for what was seen."""
    norm, minus_scale, bound, bad = seen
    dtype = record.grad_norm.dtype
    repeated = repeated & (bad == 0)
    return NormState(
        grad_norm=norm.astype(dtype),
        grad_scale=(-minus_scale).astype(dtype),
        steps=jnp.asarray(optax.safe_increment(record.steps)),
        clipped=record.clipped + (bound > 0).astype(jnp.int32),
        nonfinite=record.nonfinite + (bad > 0).astype(jnp.int32),
        repeated=record.repeated + repeated.astype(jnp.int32),
    )


def _common(norms: Norms, dtype: Any) -> Norms:
    """The largest norms over devices that have their own, in the memory's dtype."""
    every = jnp.concatenate([norms.block, norms.total[None]]).astype(dtype)
    every = _devices.largest(every)
    size = norms.size.astype(dtype)
    return norms._replace(block=every[:-1], size=size, total=every[-1])


def _keep_if(finite: jax.Array, new: Any, old: Any) -> Any:
    """A non-finite norm never enters a history."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
