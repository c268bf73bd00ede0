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
    count: jax.Array


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
        ordered = jnp.where(take, _exchange(memory.ordered, oldest, new), memory.ordered)
        after = PercentileMemory(push(memory.recent, new, take), ordered)
        used = after if include_current else memory
        found = _at_percentile(used.ordered, used.recent.count, percentile)
        return jnp.minimum(found, max_norm), after

    return History(init, step)


def _exchange(ordered: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Ascending numbers with one of them exchanged for another.

    A sort would do; this takes a twentieth of its time on a CPU.
    """
    index = jnp.arange(ordered.size)
    left = jnp.concatenate([ordered[1:], jnp.full((1,), jnp.inf, ordered.dtype)])
    rest = jnp.where(index < jnp.sum(ordered < old), ordered, left)
    place = jnp.sum(rest < new)
    right = jnp.where(index > place, jnp.roll(rest, 1), new)
    return jnp.where(index < place, rest, right)


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
    """Clips to a percentile of the last norms."""
    if not callable(percentile):
        percentile = _checks.number("percentile", percentile, high=100)
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
    count: jax.Array


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
    """Clips norms that are many standard deviations above their mean."""
    history = _zscore(
        _checks.integer("warmup", warmup, at_least=1),
        _checks.choice("mode", mode, ("adaptive", "mean")),
        _checks.choice("observe", observe, ("clipped", "raw", "none")),
    )
    return transform(
        _scopes.whole_tree(),
        _rules.clip(),
        _checks.threshold("z_threshold", z_threshold),
        _checks.number("decay", decay, high=1),
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
    count: jax.Array


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
        own = ratio * jnp.maximum(gamma, floor)
        threshold = jnp.where(warm, _shares(norms, max_norm), own)

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
    share = norms.block / jnp.where(binds, norms.total, 1) * max_norm
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
    """Clips each leaf to a moving average of its own clipped norms."""
    history = _leaf_ema(
        _checks.integer("warmup", warmup, at_least=1),
        _checks.choice("initial", initial, ("min", "mean")),
    )
    return transform(
        _scopes.each_leaf(stacked_axis),
        _rules.clip(),
        _checks.threshold("ratio", ratio),
        _checks.number("decay", decay, high=1),
        _checks.threshold("max_norm", max_norm),
        _checks.threshold("floor", floor),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
        history=history,
    )
