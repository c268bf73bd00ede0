"""From norms to thresholds, with memory.

A history only makes the threshold of a step; the rule of `_rules.clip` applies it.
Its memory has a fixed size: scalars, and vectors of norms. What it remembers are
constants to differentiation, so that a threshold is one too.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_unitnorm import _checks, _rules, _scopes
from optax_unitnorm._transform import transform
from optax_unitnorm._types import History, Nonfinite, Norms, Transform, Tree


# ---------------------------------------------------------------- the last norms
class Window(NamedTuple):
    """The last norms, as a ring.

    values: shape (window,), infinite where nothing has been seen yet.
    next: int32, where the oldest stands. count: int32, how many have been seen.
    """

    values: jax.Array
    next: jax.Array
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


def empty_window(size: int, dtype: Any) -> Window:
    """A window before the first norm."""
    return Window(jnp.full((size,), jnp.inf, dtype), _zero(), _zero())


def push(window: Window, new: jax.Array, take: jax.Array) -> Window:
    """The window with a norm in place of the oldest; the same if not `take`."""
    size = window.values.shape[0]
    kept = jnp.where(take, new, window.values[window.next])
    step = take.astype(jnp.int32)
    return Window(
        window.values.at[window.next].set(kept),
        (window.next + step) % size,
        jnp.minimum(window.count + step, size),
    )


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


# ---------------------------------------------------------------- percentile
class PercentileMemory(NamedTuple):
    """The last norms in the order they came, and the same from small to large."""

    recent: Window
    ordered: jax.Array


def _percentile(window: int, include_current: bool) -> History:
    def init(blocks: int, dtype: Any) -> tuple[jax.Array, PercentileMemory]:
        ordered = jnp.full((window,), jnp.inf, dtype)
        memory = PercentileMemory(empty_window(window, dtype), ordered)
        return jnp.full((), jnp.inf, dtype), memory

    def step(
        memory: PercentileMemory,
        norms: Norms,
        percentile: jax.Array,
        max_norm: jax.Array,
    ) -> tuple[jax.Array, PercentileMemory]:
        new = lax.stop_gradient(norms.total)
        take = jnp.isfinite(new)
        oldest = memory.recent.values[memory.recent.next]
        ordered = jnp.where(
            take, _exchange(memory.ordered, oldest, new), memory.ordered
        )
        after = PercentileMemory(push(memory.recent, new, take), ordered)
        used = after if include_current else memory
        found = _at_percentile(used.ordered, used.recent.count, percentile)
        return jnp.minimum(found, max_norm), after

    return History(init, step)


def _exchange(ordered: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Ascending numbers with one of them exchanged for another.

    All between the places of the two move by one. A sort would do the same in ten
    times the time on a CPU.
    """
    index = jnp.arange(ordered.size)
    start = jnp.sum(ordered < old)
    end = jnp.sum(ordered < new) - (old < new).astype(index.dtype)
    below = jnp.concatenate([ordered[:1], ordered[:-1]])
    above = jnp.concatenate([ordered[1:], ordered[-1:]])
    moved = jnp.where((end < index) & (index <= start), below, ordered)
    moved = jnp.where((start <= index) & (index < end), above, moved)
    return jnp.where(index == end, new, moved)


def _at_percentile(
    ordered: jax.Array, count: jax.Array, percentile: jax.Array
) -> jax.Array:
    """Linear interpolation between the first `count` numbers; infinite for none."""
    last = jnp.maximum(count - 1, 0)
    # In hundredths of a place, so that the fraction keeps its digits.
    place = percentile * last.astype(ordered.dtype)
    whole = jnp.floor(place / 100)
    low = jnp.clip(whole.astype(jnp.int32), 0, last)
    below, above = ordered[low], ordered[jnp.minimum(low + 1, last)]
    rise = jnp.where(count > 0, above - below, 0)
    return below + (place - 100 * whole) / 100 * rise


def clip_by_global_norm_percentile(
    percentile: Any,
    *,
    window: int = 1000,
    include_current: bool = True,
    max_norm: Any = None,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    """Scales all gradients down where their norm exceeds a percentile of the last ones.

    Every element is multiplied by `min(1, c / n)`, with n the norm of the whole tree
    and c the percentile (linear interpolation) of the norms of the last `window` steps:
    the threshold follows the run, with no number to tune per task. With the current
    norm included and a percentile of 10, as published, nine steps of ten are clipped:
    that is nearer to normalising than to catching spikes. For spikes take 90 or more.

    Experimental: this may change in any release. Options and common promises:
    `help(optax_unitnorm)`.

    Args:
        percentile: in [0, 100]: a number, a scalar array or an optax schedule, which
            counts this transform's steps.
        window: how many norms are remembered, >= 1; static.
        include_current: whether the norm of this step is among them; static. If so, the
            first step is never clipped, and a single spike is clipped to something
            between the others and itself where few norms have been seen.
        max_norm: the largest threshold, as `percentile` a number, an array or a
            schedule; None is infinite. Before any norm has been seen it is the
            threshold.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves
            at False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero". It never enters the history.

    Returns:
        A gradient transformation. Its state holds a `NormState`, the threshold now in
        force (a scalar, `grad_threshold` in `metrics`), and the last norms: two vectors
        of `window` floats (float32; float64 where a parameter was float64 at init).

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built; for a
            static one that is traced, with the way out.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients,
            or if the state is not this transform's.

    Guarantees:
        - Published values come out (tests: test_history.py::test_golden).
        - The threshold is numpy's percentile of the last `window` finite norms, for
          ever (tests: test_history.py::test_percentile_oracle).
        - A non-finite norm changes nothing that comes after it (tests:
          test_history.py::test_one_nan_changes_nothing_after_it,
          ::test_norm_beyond_float32).
        - What does not bind leaves the same bits, zeros stay zeros (tests:
          test_contract.py::test_not_binding, ::test_zero).
        - The threshold is a constant to differentiation (tests:
          test_history.py::test_derivative_of_a_learned_threshold,
          ::test_derivative_through_a_run).
        - The cost is a few operations for each norm in the window, and no sort (tests:
          test_history.py::test_percentile_cost).
        - Devices that would each decide otherwise keep one history, with one collective
          a step and none in a branch (tests:
          test_history.py::test_two_devices_that_would_disagree, ::test_pmap,
          ::test_one_collective_and_none_in_a_branch).
        - A run restored from a checkpoint continues bit for bit (tests:
          test_history.py::test_a_restored_run_continues_bit_for_bit).

    References:
        Seetharaman, Wichern, Pardo and Le Roux, AutoClip: Adaptive gradient clipping
        for source separation networks, 2020, https://arxiv.org/abs/2007.14469.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> tx = oun.clip_by_global_norm_percentile(50, include_current=False)
        >>> state = tx.init(jnp.zeros(2))
        >>> for norm in [1.0, 2.0, 3.0, 100.0]:
        ...     updates, state = tx.update(jnp.array([0.0, norm]), state)
        >>> updates, float(state.threshold)  # the median of 1, 2 and 3
        (Array([0., 2.], dtype=float32), 2.0)
    """
    if not callable(percentile):
        percentile = _checks.number("percentile", percentile, high=100.0)
    window = _checks.integer("window", window, at_least=1)
    include_current = _checks.boolean("include_current", include_current)
    cap = jnp.inf if max_norm is None else _checks.threshold("max_norm", max_norm)
    return transform(
        _scopes.whole_tree(),
        _rules.clip(),
        percentile,
        cap,
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
        history=_percentile(window, include_current),
    )


# ---------------------------------------------------------------- z-score
class ZScoreMemory(NamedTuple):
    """Mean and deviation of the norms, and the number seen (at most the warm-up).

    std: the standard deviation, whose square might leave float32's range.
    """

    mean: jax.Array
    std: jax.Array
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


# The published method adds it to the standard deviation, for those of zero.
_Z_EPS = 1e-6


def _zscore(warmup: int, mode: str, observe: str) -> History:
    def init(blocks: int, dtype: Any) -> tuple[jax.Array, ZScoreMemory]:
        memory = ZScoreMemory(jnp.zeros((), dtype), jnp.zeros((), dtype), _zero())
        return jnp.full((), jnp.inf, dtype), memory

    def step(
        memory: ZScoreMemory,
        norms: Norms,
        z_threshold: jax.Array,
        decay: jax.Array,
        max_norm: jax.Array,
    ) -> tuple[jax.Array, ZScoreMemory]:
        # A norm that is not finite is no spike, and the corridor forgets it.
        new = lax.stop_gradient(jnp.where(jnp.isfinite(norms.total), norms.total, 0))
        mean, std, count = memory
        warm = count < warmup
        z = (new - mean) / (std + _Z_EPS)
        spike = (z > z_threshold) & ~warm
        to = mean
        if mode == "adaptive":
            to = mean + z_threshold**2 * std / jnp.where(spike, z, 1)
        # Where it is no spike, the norm from which on it would have been one.
        bound = jnp.maximum(mean + z_threshold * (std + _Z_EPS), new)
        threshold = jnp.where(spike, to, jnp.where(warm, jnp.inf, bound))

        seen = jnp.where(spike & (observe == "clipped"), to, new)
        moved = _averaged(memory, *lax.stop_gradient((seen, 1 - decay)))
        if observe == "none":
            moved = _select(spike, memory, moved)
        after = _select(warm, _counted(memory, new), moved)
        return jnp.minimum(threshold, max_norm), after

    return History(init, step)


def _counted(memory: ZScoreMemory, new: jax.Array) -> ZScoreMemory:
    """Mean and population deviation with one more number."""
    count = memory.count + 1
    part = 1 / count.astype(new.dtype)
    off = new - memory.mean
    std = jnp.hypot(memory.std * jnp.sqrt(1 - part), off * jnp.sqrt(part * (1 - part)))
    return ZScoreMemory(memory.mean + off * part, std, count)


def _averaged(memory: ZScoreMemory, new: jax.Array, part: jax.Array) -> ZScoreMemory:
    """Moving mean and variance, the new mean first."""
    mean = memory.mean + part * (new - memory.mean)
    std = jnp.hypot(memory.std * jnp.sqrt(1 - part), (new - mean) * jnp.sqrt(part))
    return memory._replace(mean=mean, std=std)


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def clip_by_global_norm_zscore(
    z_threshold: Any = 2.5,
    *,
    decay: Any = 0.97,
    warmup: int = 25,
    max_norm: Any = 1.0,
    mode: Literal["adaptive", "mean"] = "adaptive",
    observe: Literal["clipped", "raw", "none"] = "clipped",
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    """Scales all gradients down where their norm lies far above its moving mean.

    With n the norm of the whole tree, z = (n - mean) / (std + 1e-6). Where z exceeds
    `z_threshold` the step is a spike, and every element is multiplied by c / n, where c
    is mean + z_threshold**2 * std / z (the larger the spike, the nearer to the mean)
    or, with mode "mean", the mean itself. `max_norm` caps every step. During the first
    `warmup` steps it is all there is: the rule is blind to spikes then, and those it
    lets in stay in its mean for long, so do not set it to infinity.

    Experimental: this may change in any release. Options and common promises:
    `help(optax_unitnorm)`.

    Args:
        z_threshold: how many standard deviations above the mean a spike is, >= 0: a
            number, a scalar array or an optax schedule, which counts this transform's
            steps.
        decay: of the moving mean and variance, in [0, 1]: a number or a scalar array.
        warmup: how many finite norms make the first mean and (population) variance,
            >= 1; static.
        max_norm: the largest norm that passes on any step, >= 0: a number, an array or
            a schedule.
        mode: "adaptive" or "mean", as above; static.
        observe: what a spike adds to mean and variance: "clipped" (the threshold,
            before `max_norm`), "raw" (its norm) or "none" (nothing); static. After a
            change of regime "raw" follows at once, the others may take very long, and
            after a warm-up of zeros alone they let nothing through at all.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves
            at False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero". It never enters the history.

    Returns:
        A gradient transformation. Its state holds a `NormState`, the threshold now in
        force (a scalar, `grad_threshold` in `metrics`; on a step that is no spike, the
        norm from which on it would have been one), and mean, standard deviation and a
        count: scalars, float32 (float64 where a parameter was float64 at init) and
        int32.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built; for a
            static one that is traced, with the way out.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients,
            or if the state is not this transform's.

    Guarantees:
        - Published values come out (tests: test_history.py::test_golden).
        - The recursion is the published one, also where squares of the norms would
          overflow (tests: test_history.py::test_zscore_oracle).
        - `max_norm` holds from the first step on (tests:
          test_history.py::test_a_cap_is_not_blind_in_the_warm_up,
          ::test_first_step_a_spike).
        - A non-finite norm changes nothing that comes after it (tests:
          test_history.py::test_one_nan_changes_nothing_after_it,
          ::test_norm_beyond_float32).
        - Zeros make no NaN, in the warm-up and after it (tests:
          test_history.py::test_run_of_zeros,
          ::test_zeros_stay_with_who_observes_what_it_clips).
        - The threshold is a constant to differentiation (tests:
          test_history.py::test_derivative_of_a_learned_threshold,
          ::test_derivative_through_a_run).
        - Devices that would each decide otherwise keep one history, with one collective
          a step and none in a branch (tests:
          test_history.py::test_two_devices_that_would_disagree, ::test_pmap,
          ::test_one_collective_and_none_in_a_branch).
        - A run restored from a checkpoint continues bit for bit (tests:
          test_history.py::test_a_restored_run_continues_bit_for_bit).

    References:
        Kumar, Owen, Chowdhury and Guera, ZClip: Adaptive spike mitigation for LLM
        pre-training, 2025, https://arxiv.org/abs/2504.02507.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> tx = oun.clip_by_global_norm_zscore(warmup=3, max_norm=10.0)
        >>> state = tx.init(jnp.zeros(2))
        >>> for norm in [1.0, 2.0, 3.0, 100.0]:
        ...     updates, state = tx.update(jnp.array([0.0, norm]), state)
        >>> print(round(float(updates[1]), 2))  # back to near the mean, 2
        2.04
    """
    history = _zscore(
        _checks.integer("warmup", warmup, at_least=1),
        _checks.choice("mode", mode, ("adaptive", "mean")),
        _checks.choice("observe", observe, ("clipped", "raw", "none")),
    )
    return transform(
        _scopes.whole_tree(),
        _rules.clip(),
        _checks.threshold("z_threshold", z_threshold),
        _checks.number("decay", decay, high=1.0),
        _checks.threshold("max_norm", max_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
        history=history,
    )


# ---------------------------------------------------------------- leaf EMA
class LeafEmaMemory(NamedTuple):
    """gamma of every block, shape (blocks,), and steps seen (at most the warm-up)."""

    gamma: jax.Array
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


def _leaf_ema(warmup: int, initial: str) -> History:
    def init(blocks: int, dtype: Any) -> tuple[jax.Array, LeafEmaMemory]:
        start = jnp.inf if initial == "min" else 0.0
        memory = LeafEmaMemory(jnp.full((blocks,), start, dtype), _zero())
        return jnp.full((blocks,), jnp.inf, dtype), memory

    def step(
        memory: LeafEmaMemory,
        norms: Norms,
        ratio: jax.Array,
        decay: jax.Array,
        max_norm: jax.Array,
        floor: jax.Array,
    ) -> tuple[jax.Array, LeafEmaMemory]:
        gamma, count = memory
        if gamma.shape != norms.block.shape:
            raise ValueError(
                "`state` must remember every leaf (or slice) that counts; got a state "
                f"of {gamma.size} and gradients of {norms.block.size}."
            )
        warm = count < warmup
        # An infinite ratio times the derivative of zero would be NaN.
        finite = ratio < jnp.inf
        own = jnp.where(finite, ratio, 1) * jnp.maximum(gamma, floor)
        own = jnp.where(finite, own, jnp.inf)
        capped = max_norm < jnp.inf
        shares = _shares(norms, jnp.where(capped, max_norm, 1))
        shares = jnp.where(capped, shares, jnp.inf)
        threshold = jnp.where(warm, shares, own)

        clipped = lax.stop_gradient(jnp.minimum(norms.block, threshold))
        if initial == "min":
            first = jnp.minimum(gamma, clipped)
        else:
            first = gamma + (clipped - gamma) / (count + 1).astype(gamma.dtype)
        moved = gamma + lax.stop_gradient(1 - decay) * (clipped - gamma)
        after = jnp.where(warm, first, moved)
        return threshold, LeafEmaMemory(after, jnp.minimum(count + 1, warmup))

    return History(init, step)


def _shares(norms: Norms, max_norm: jax.Array) -> jax.Array:
    """The global clip at max_norm, as a threshold for each block.

    Where the global norm is not finite, blocks that are finite have no share: each
    is held to max_norm by itself.
    """
    binds = norms.total > max_norm
    # The larger first: its quotient is lost only where the product is, too.
    large, small = (f(norms.block, max_norm) for f in (jnp.maximum, jnp.minimum))
    share = large / jnp.where(binds, norms.total, 1) * small
    own = jnp.where(jnp.isfinite(norms.total), jnp.inf, max_norm)
    return jnp.where(binds & jnp.isfinite(norms.total), share, own)


def clip_by_leaf_norm_ema(
    ratio: Any = 1.05,
    *,
    decay: Any = 0.98,
    warmup: int = 100,
    max_norm: Any = 1.0,
    floor: Any = 0.0,
    initial: Literal["min", "mean"] = "min",
    stacked_axis: Tree = None,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    """Scales each leaf down where its norm exceeds a moving average of its own.

    For the first `warmup` steps this is `clip_by_global_norm(max_norm)`, while gamma of
    each leaf becomes the minimum or mean of its clipped norms. Then each leaf, or each
    of its slices along `stacked_axis`, is multiplied by `min(1, c / n)`, with n its
    norm and c = ratio * max(gamma, floor), and gamma moves towards the clipped norm. A
    threshold can so rise by a few per cent a step only. With the defaults this is the
    paper, and a leaf whose first gradient is zero stays frozen for ever (A of a LoRA,
    while B is zero): give a `floor` wherever that may be, of the size of the smallest
    norm that should pass.

    Experimental: this may change in any release. Options and common promises:
    `help(optax_unitnorm)`.

    Args:
        ratio: of the threshold to gamma, >= 0: a number, a scalar array or an optax
            schedule, which counts this transform's steps.
        decay: of gamma, in [0, 1]: a number or a scalar array.
        warmup: how many steps with a finite norm come first, >= 1; static.
        max_norm: the global norm that passes during those, >= 0: a number, an array or
            a schedule.
        floor: the smallest gamma that is used, >= 0: a number, an array or a schedule.
        initial: "min" or "mean", what gamma is after the warm-up; static.
        stacked_axis: None, an axis, or a prefix tree of them as in_axes of vmap is:
            each slice along it counts as a leaf of its own (scanned layers).
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves
            at False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero". It never enters the history, nor does what other leaves
            hold on that step; in the warm-up they are then held to `max_norm` each.

    Returns:
        A gradient transformation. Its state holds a `NormState`, the thresholds now in
        force and gamma (a vector each, one entry a leaf or slice in leaf order,
        float32, or float64 where a parameter was float64 at init; `grad_threshold` in
        `metrics`), and an int32 count. During the warm-up the threshold of a leaf is
        its share of `max_norm`, infinite where that does not bind.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built; for a
            static one that is traced, with the way out.
        ValueError: at update, if a leaf lacks its stacked axis; if a tree does not fit
            the gradients; if a leaf with slices is split over devices and no
            PartitionSpec says how; if the state is not this transform's, or not of as
            many leaves.

    Guarantees:
        - Published values come out (tests: test_history.py::test_golden).
        - The recursion is the published one (tests:
          test_history.py::test_leaf_ema_oracle).
        - A leaf that starts at zero comes back with a floor, and does not without
          (tests: test_history.py::test_a_leaf_that_starts_at_zero).
        - A slice has a history as a leaf would have (tests:
          test_history.py::test_stacked_axis, ::test_slices_of_a_split_leaf).
        - A non-finite norm changes nothing that comes after it (tests:
          test_history.py::test_one_nan_changes_nothing_after_it,
          ::test_norm_beyond_float32).
        - During the warm-up the derivative is that of the global clip; later the
          threshold is a constant to differentiation (tests:
          test_history.py::test_derivative_in_the_warm_up_of_the_leaf_ema,
          ::test_derivative_through_a_run).
        - Devices that would each decide otherwise keep one history, with one collective
          a step and none in a branch (tests:
          test_history.py::test_two_devices_that_would_disagree, ::test_pmap,
          ::test_one_collective_and_none_in_a_branch).
        - A run restored from a checkpoint continues bit for bit (tests:
          test_history.py::test_a_restored_run_continues_bit_for_bit).

    References:
        Wang et al., AdaGC: Improving training stability for large language model
        pretraining, 2025, https://arxiv.org/abs/2502.11034.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> tx = oun.clip_by_leaf_norm_ema(1.5, warmup=2, max_norm=10.0, floor=1e-3)
        >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
        >>> state = tx.init(grads)
        >>> for scale in [1, 1, 100]:
        ...     spike = {"w": scale * grads["w"], "b": grads["b"]}
        ...     updates, state = tx.update(spike, state)
        >>> updates["w"], updates["b"]  # 1.5 times the usual norm of w, which is 5
        (Array([4.5, 6. ], dtype=float32), Array([1.], dtype=float32))
    """
    history = _leaf_ema(
        _checks.integer("warmup", warmup, at_least=1),
        _checks.choice("initial", initial, ("min", "mean")),
    )
    return transform(
        _scopes.each_leaf(stacked_axis),
        _rules.clip(),
        _checks.threshold("ratio", ratio),
        _checks.number("decay", decay, high=1.0),
        _checks.threshold("max_norm", max_norm),
        _checks.threshold("floor", floor),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
        history=history,
    )
