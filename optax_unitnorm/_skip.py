"""The wrapper that leaves a step out, its inner state with it."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from optax_unitnorm import _checks, _devices, _leaves, _measure, _scopes
from optax_unitnorm._history import Window, empty_window, push
from optax_unitnorm._transform import SkipState, at_step, count_step, init_norm_state
from optax_unitnorm._types import Transform, Tree


class SkipMemory(NamedTuple):
    """What `skip_spikes` remembers.

    norms, losses: the last that were observed; None without `sigmas`.
    spikes: int32, finite steps skipped since the last accepted one.
    """

    norms: Window | None
    losses: Window | None
    spikes: jax.Array


def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    skip_norm: Any = jnp.inf,
    sigmas: Any = None,
    window: int = 128,
    warmup: int | None = None,
    observe: Literal["accepted", "raw"] = "accepted",
    max_consecutive: int | None = None,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
) -> Transform:
    """Takes no step at all where the norm of the gradients is a spike.

    A step is skipped where the norm of the whole tree is not finite, is at least
    `skip_norm` or, with `sigmas`, exceeds mean + sigmas * (sample standard deviation)
    of the last norms. Its update is zero, and the state of `inner`, which may be a
    whole optimizer, stays exactly as it was. If the step passes its loss, as optax's
    linesearches take it (`tx.update(grads, state, params, value=loss)`), a loss that is
    not finite or exceeds its own last ones in the same way skips too; `skip_norm` is
    for norms alone.

    Experimental: this may change in any release. Options and common promises:
    `help(optax_unitnorm)`.

    Args:
        inner: the gradient transformation around which to skip.
        skip_norm: the norm from which on a step is skipped, >= 0: a number, a scalar
            array or an optax schedule, which counts this transform's steps. It holds
            from the first step on.
        sigmas: how many standard deviations above the mean a spike is, >= 0, likewise;
            None looks at no history.
        window: how many norms (and losses) are remembered, >= 2; static.
        warmup: how many must have been seen before they count, from 2 to `window`;
            static. None is half the window.
        observe: "accepted" keeps the norms of skipped steps out of the window, "raw"
            lets finite ones in; static. After a change of regime "accepted" alone may
            skip for ever (give `max_consecutive`); "raw" adapts within the window, and
            so does a series of spikes to itself.
        max_consecutive: after so many finite steps were skipped in a row the next
            finite one is accepted, >= 1; static. None is no limit.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are not counted. A skipped step has zeros there too.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs. If it is said
            in the step, `inner` hears it too.

    Returns:
        A gradient transformation. Its state holds a `NormState` (a scale of 0 is a
        skipped step; `clipped` counts those with a finite norm), int32 counts of the
        steps skipped in all and in a row, the norm above which this step would have
        been skipped (`grad_threshold` in `metrics`), the windows, and the state of
        `inner`. Leaves that do not count pass as they are.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built; for a
            static one that is traced, with the way out.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients;
            if the state is not this transform's; if `value` is no scalar; if `inner`
            changes the structure of updates or state.

    Guarantees:
        - A skipped step has zeros for updates, and not a bit of the inner state moves
          (tests: test_history.py::test_skipped_step_leaves_everything).
        - Norms and losses are held to mean + sigmas * deviation of the last ones
          (tests: test_history.py::test_skip_oracle, ::test_golden, ::test_value).
        - Equal norms are no spikes (tests:
          test_history.py::test_equal_norms_are_no_spikes).
        - A non-finite norm changes nothing that comes after it (tests:
          test_history.py::test_one_nan_changes_nothing_after_it,
          ::test_norm_beyond_float32).
        - No NaN passes, however many come in a row (tests:
          test_history.py::test_max_consecutive).
        - A regime change cannot lock training out with `max_consecutive` or "raw"
          (tests: test_history.py::test_regime_change_skip).
        - All devices skip or none does; around a transform with a collective there is
          no branch to wait in (tests:
          test_history.py::test_two_devices_that_would_disagree,
          ::test_one_collective_and_none_in_a_branch,
          ::test_a_nan_on_one_device_does_not_hang). A loss that differs between
          devices, where types show it, costs one more collective (tests:
          test_history.py::test_a_local_loss_costs_one_more_collective).
        - Around one without, it is a branch, with the memory of `optax.apply_if_finite`
          (tests: test_history.py::test_memory_of_a_wrapped_optimizer,
          ::test_a_branch_where_nothing_is_sent).
        - `inner` is traced once and given all extra arguments (tests:
          test_history.py::test_inner_is_traced_once,
          ::test_extra_arguments_reach_the_inner_transform).
        - A run restored from a checkpoint continues bit for bit (tests:
          test_history.py::test_a_restored_run_continues_bit_for_bit).

    References:
        Chowdhery et al., PaLM: Scaling language modeling with pathways, 2022,
        https://arxiv.org/abs/2204.02311, section 5.1 (spikes, and batches left out).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_unitnorm as oun
        >>> tx = oun.skip_spikes(optax.adam(0.1), skip_norm=10.0)
        >>> params = jnp.array([1.0])
        >>> state = tx.init(params)
        >>> for grad in [1.0, 500.0, float("nan"), 1.0]:
        ...     updates, state = tx.update(jnp.array([grad]), state, params)
        >>> int(state.skipped), int(state.inner[0].count)  # adam has seen two steps
        (2, 2)
    """
    tx = _checked_inner(inner)
    limits = [_checks.threshold("skip_norm", skip_norm)]
    limits += [] if sigmas is None else [_checks.threshold("sigmas", sigmas)]
    size, needed = _sizes(window, warmup)
    _checks.choice("observe", observe, ("accepted", "raw"))
    if max_consecutive is not None:
        _checks.integer("max_consecutive", max_consecutive, at_least=1)
    order = _checks.order(ord)
    _leaves.check_mask(mask)
    built_with = _devices.check_statement(sharded_over)

    def init(params: Tree) -> SkipState:
        record = init_norm_state(params)
        dtype = record.grad_norm.dtype

        def ring() -> Window | None:
            return None if sigmas is None else empty_window(size, dtype)

        return SkipState(
            norm=record,
            skipped=jnp.zeros((), jnp.int32),
            skipped_in_a_row=jnp.zeros((), jnp.int32),
            threshold=jnp.full((), jnp.inf, dtype),
            memory=SkipMemory(ring(), ring(), jnp.zeros((), jnp.int32)),
            inner=tx.init(params),
        )

    def update(
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        value: Any = None,
        sharded_over: Any = "auto",
        **extra_args: Any,
    ) -> tuple[Tree, SkipState]:
        if not isinstance(state, SkipState):
            raise ValueError(
                "`state` must be the state of this transform, which remembers norms; "
                f"got {type(state).__name__}."
            )
        what = _measure.subject(
            updates,
            _scopes.whole_tree(),
            mask=mask,
            sharded_over=_devices.stated_now(built_with, sharded_over),
            params=params,
        )
        measured, _ = _measure.measure(what, order)
        record, memory = state.norm, state.memory
        dtype = record.grad_norm.dtype
        norm, loss = _common(measured.norms.total, value, dtype)
        skip_above, *rest = [at_step(limit, record, dtype) for limit in limits]

        usual = _usual(memory.norms, needed, *rest)
        spike = (norm >= skip_above) | (norm > usual)
        finite = jnp.isfinite(norm)
        if loss is not None:
            spike = spike | (loss > _usual(memory.losses, needed, *rest))
            finite = finite & jnp.isfinite(loss)
        if max_consecutive is not None:
            spike = spike & (memory.spikes < max_consecutive)
        skip = spike | ~finite

        if value is not None:
            extra_args["value"] = value
        if not (isinstance(sharded_over, str) and sharded_over == "auto"):
            extra_args["sharded_over"] = sharded_over
        updates, after = _unless(skip, tx, updates, state.inner, params, extra_args)

        take = ~skip if observe == "accepted" else jnp.ones((), bool)
        in_a_row = jnp.where(skip, state.skipped_in_a_row + 1, 0)
        spikes = memory.spikes + (skip & finite).astype(jnp.int32)
        seen = jnp.stack([norm, -(~skip).astype(dtype), *_flags(skip, norm)])
        new = SkipState(
            norm=count_step(record, seen, measured.repeated),
            skipped=state.skipped + skip.astype(jnp.int32),
            skipped_in_a_row=in_a_row,
            threshold=jnp.minimum(skip_above, usual),
            memory=SkipMemory(
                _push_finite(memory.norms, norm, take),
                _push_finite(memory.losses, loss, take),
                jnp.where(skip, spikes, 0),
            ),
            inner=after,
        )
        return updates, new

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"`inner` must be a gradient transformation; got {inner!r}.")
    return optax.with_extra_args_support(inner)


def _sizes(window: Any, warmup: Any) -> tuple[int, int]:
    """The size of the window, and how many norms it must hold before it counts."""
    size = _checks.integer("window", window, at_least=2)
    if warmup is None:
        return size, max(size // 2, 2)
    needed = _checks.integer("warmup", warmup, at_least=2)
    if needed > size:
        raise ValueError(f"`warmup` must be <= `window`; got {needed} > {size}.")
    return size, needed


def _common(
    total: jax.Array, value: Any, dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The norm and the loss that decide, the same on all devices."""
    total = total.astype(dtype)
    if value is None:
        return _devices.largest(total[None])[0], None
    loss = jnp.asarray(value)
    if loss.ndim:
        raise ValueError(f"`value` must be a scalar; got shape {loss.shape}.")
    loss = loss.astype(dtype)
    # A loss of minus infinity would be lost among larger ones.
    loss = jnp.where(jnp.isfinite(loss), loss, jnp.nan)
    both = _devices.largest(jnp.stack([total, loss]))
    return both[0], both[1]


def _usual(window: Window | None, needed: int, *sigmas: jax.Array) -> jax.Array | float:
    """Mean + sigmas * sample deviation; infinite until enough has been seen."""
    if window is None:
        return jnp.inf
    values, count = lax.stop_gradient(window.values), window.count
    seen = jnp.arange(values.size, dtype=jnp.int32) < count
    # From the first value on, and in units of the largest difference: then equal
    # norms have no deviation, and no square leaves the range.
    base = jnp.where(count > 0, values[0], 0)
    off = jnp.where(seen, values - base, 0)
    top = jnp.max(jnp.abs(off))
    unit = jnp.where(top > 0, top, 1)
    number = count.astype(values.dtype)
    mean = jnp.sum(off / unit) / jnp.maximum(number, 1)
    squares = jnp.where(seen, off / unit - mean, 0) ** 2
    std = jnp.sqrt(jnp.sum(squares) / jnp.maximum(number - 1, 1))
    limit = base + unit * (mean + sigmas[0] * std)
    return jnp.where(count >= needed, limit, jnp.inf)


def _push_finite(
    window: Window | None, new: jax.Array | None, take: jax.Array
) -> Window | None:
    if window is None or new is None:
        return window
    return push(window, new, take & jnp.isfinite(new))


def _flags(skip: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether a threshold bound, and whether the norm was not finite."""
    finite = jnp.isfinite(norm)
    return (skip & finite).astype(norm.dtype), (~finite).astype(norm.dtype)


def _unless(
    skip: jax.Array,
    tx: optax.GradientTransformationExtraArgs,
    updates: Tree,
    state: Tree,
    params: Tree,
    extra_args: dict[str, Any],
) -> tuple[Tree, Tree]:
    """The inner update, or zeros and the inner state as it was.

    A branch spares the work of a skipped step and the memory of both outcomes. It
    is taken unless the inner update, traced, sends anything over devices: a device
    that waits there for one that skips would wait for ever. Whether it does is read
    from its program, since where we are (a mapped region, or around one) says
    neither that it does nor that it does not. Then both are made and one selected.
    """
    leaves, treedef = jax.tree.flatten(updates)
    places = [i for i, leaf in enumerate(leaves) if _leaves.counts(leaf)]
    for i in places:
        leaves[i] = _leaves.as_array(leaves[i])

    def accepted() -> tuple[list[Any], Tree]:
        given = treedef.unflatten(leaves)
        new, after = tx.update(given, state, params, **extra_args)
        made, made_def = jax.tree.flatten(new)
        if made_def != treedef:
            raise ValueError(
                "`inner` must return updates of the structure of the gradients; got "
                f"{made_def}."
            )
        return [made[i] for i in places], after

    def rebuilt(counted: list[Any]) -> Tree:
        whole = list(leaves)
        for i, leaf in zip(places, counted, strict=True):
            whole[i] = leaf
        return treedef.unflatten(whole)

    known = not _leaves.is_traced(skip)
    if known and not skip:
        new, after = accepted()
        return rebuilt(new), after
    program, shapes = jax.make_jaxpr(accepted, return_shape=True)()
    if jax.tree.structure(shapes[1]) != jax.tree.structure(state):
        raise ValueError(
            "`inner` must keep the structure of its state; got "
            f"{jax.tree.structure(shapes[1])}."
        )

    def skipped() -> list[Any]:
        zeros = [
            jnp.zeros_like(leaves[i]).astype(shape.dtype)
            for i, shape in zip(places, shapes[0], strict=True)
        ]
        return [*zeros, *jax.tree.leaves(state)]

    if known:
        return rebuilt(skipped()[: len(places)]), state
    run = jaxpr_as_fun(program)
    alike = all(map(_devices.same_type, skipped(), program.out_avals))
    if alike and not _devices.communicates(program.jaxpr):
        # Zeros made outside the branch would take memory, and the other way round
        # XLA keeps one more copy of the state.
        chosen = lax.cond(~skip, run, skipped)
    else:
        chosen = [jnp.where(skip, a, b) for a, b in zip(skipped(), run(), strict=True)]
    new, after = jax.tree.structure(shapes).unflatten(chosen)
    return rebuilt(new), after
