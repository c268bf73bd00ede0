"""Transforms that clip, record, or scale by any function of the norm."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_unitnorm import _checks, _fold, _leaves, _rules, _scopes
from optax_unitnorm._transform import transform
from optax_unitnorm._types import Nonfinite, Transform, Tree


def clip_by_global_norm(
    max_norm: Any,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    return transform(
        _scopes.whole_tree(),
        _rules.clip(),
        _checks.threshold("max_norm", max_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def clip_by_leaf_norm(
    max_norm: Any,
    stacked_axis: Tree = None,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    return transform(
        _scopes.each_leaf(stacked_axis),
        _rules.clip(),
        _checks.threshold("max_norm", max_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def clip_by_group_norm(
    max_norm: Any,
    groups: Tree,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    return transform(
        _scopes.each_group(groups),
        _rules.clip(),
        _checks.threshold("max_norm", max_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def clip_by_global_rms(
    max_rms: Any,
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    return transform(
        _scopes.whole_tree(),
        _rules.clip(rms=True),
        _checks.threshold("max_rms", max_rms),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def clip_by_leaf_rms(
    max_rms: Any,
    stacked_axis: Tree = None,
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    return transform(
        _scopes.each_leaf(stacked_axis),
        _rules.clip(rms=True),
        _checks.threshold("max_rms", max_rms),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def soft_clip_by_global_norm(
    max_norm: Any,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    return transform(
        _scopes.whole_tree(),
        _rules.soft_clip(),
        _checks.threshold("max_norm", max_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def clip_by_param_norm(
    ratio: Any,
    eps: Any = 1e-3,
    axis: Tree = None,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    return transform(
        _scopes.each_unit(axis),
        _rules.clip_to_reference(),
        _checks.threshold("ratio", ratio),
        _checks.number("eps", eps),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
        against_params=True,
    )


def record_norm(
    *, ord: Any = None, mask: Tree = None, sharded_over: Any = "auto"
) -> Transform:
    return transform(
        _scopes.whole_tree(),
        _rules.keep(),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=None,
    )


def scale_from_norm(
    fn: Callable[[Any], Any],
    per: Literal["global", "leaf"] = "global",
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    if not callable(fn):
        raise TypeError(f"`fn` must be a function of the norm; got {fn!r}.")
    _checks.choice("per", per, ("global", "leaf"))
    return transform(
        _scopes.whole_tree() if per == "global" else _scopes.each_leaf(),
        _rules.from_function(fn),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


class StepState(NamedTuple):
    """The step counter of `clip_by_value` with a scheduled bound."""

    steps: jax.Array


def clip_by_value(max_value: Any, min_value: Any = None) -> Transform:
    high = _checks.threshold("max_value", max_value, signed=min_value is not None)
    low = None
    if min_value is not None:
        low = _checks.threshold("min_value", min_value, signed=True)
        known = not any(callable(v) or isinstance(v, jax.Array) for v in (low, high))
        if known and low > high:
            raise ValueError(
                f"`min_value` must be <= `max_value`; got {low!r} > {high!r}."
            )
    scheduled = callable(high) or callable(low)

    def init(params: Tree) -> Any:
        del params
        return StepState(jnp.zeros((), jnp.int32)) if scheduled else optax.EmptyState()

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        del params, extra_args
        bounds = [high, low]
        if scheduled:
            if not isinstance(state, StepState):
                raise ValueError(
                    "`state` must be the state of this transform where a bound is a "
                    f"schedule, whose step it counts; got {type(state).__name__}."
                )
            bounds = [b(state.steps) if callable(b) else b for b in bounds]
            state = StepState(optax.safe_increment(state.steps))
        leaves = _leaves.count(updates, None)
        for i, x in zip(leaves.index, leaves.arrays, strict=True):
            if low is not None and jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise ValueError(
                    "`min_value` must be None where a leaf is complex and clipped by "
                    f"magnitude; got {low!r} and a complex leaf at "
                    f"{_leaves.paths(updates)[i]!r}."
                )
        arrays = [_fold.clamped(x, *bounds) for x in leaves.arrays]
        return leaves.rebuild(arrays), state

    return optax.GradientTransformationExtraArgs(init, update)
