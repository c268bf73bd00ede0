"""Transforms to unit norm."""

from typing import Any

from optax_unitnorm import _checks, _rules, _scopes
from optax_unitnorm._transform import transform
from optax_unitnorm._types import Nonfinite, Transform, Tree


def normalize_to_unit_global_norm(
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    min_norm: Any = 0.0,
) -> Transform:
    return transform(
        _scopes.whole_tree(),
        _rules.unit(),
        _checks.threshold("min_norm", min_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def normalize_to_unit_leaf_norm(
    stacked_axis: Tree = None,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    min_norm: Any = 0.0,
) -> Transform:
    return transform(
        _scopes.each_leaf(stacked_axis),
        _rules.unit(),
        _checks.threshold("min_norm", min_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def normalize_to_unit_group_norm(
    groups: Tree,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    min_norm: Any = 0.0,
) -> Transform:
    return transform(
        _scopes.each_group(groups),
        _rules.unit(),
        _checks.threshold("min_norm", min_norm),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def normalize_to_unit_global_rms(
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    min_norm: Any = 0.0,
) -> Transform:
    return transform(
        _scopes.whole_tree(),
        _rules.unit(rms=True),
        _checks.threshold("min_norm", min_norm),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def normalize_to_unit_leaf_rms(
    stacked_axis: Tree = None,
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    min_norm: Any = 0.0,
) -> Transform:
    return transform(
        _scopes.each_leaf(stacked_axis),
        _rules.unit(rms=True),
        _checks.threshold("min_norm", min_norm),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )
