"""Shared words of the corridor: measure, decide, apply."""

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import optax

Tree: TypeAlias = Any  # any pytree; the leaf rules are those of _leaves
Threshold: TypeAlias = Any  # a number, a scalar array or a schedule
Nonfinite: TypeAlias = Literal["propagate", "zero"]
Schedule: TypeAlias = Callable[[Any], Any]


class Share(NamedTuple):
    """Which block a leaf belongs to, and which of its axes stay separate.

    Leaves that name the same block share one norm. A leaf with `kept` axes has
    a norm of its own for each position along them (a unit, or a slice).
    A block of None is neither counted nor scaled.
    """

    block: Hashable
    kept: tuple[int, ...] = ()


# From a tree, its counted leaves and their global shapes to a share each.
Scope: TypeAlias = Callable[[Tree, Any, list[tuple[int, ...]]], list[Share]]


class Norms(NamedTuple):
    """What was measured: one entry a block, in leaf order.

    block: norm of each block, shape (blocks,).
    size: number of elements of each block, shape (blocks,).
    reference: norm of each block's parameters, shape (blocks,), or None.
    total: norm of everything that counts, a scalar.
    """

    block: jax.Array
    size: jax.Array
    reference: jax.Array | None
    total: jax.Array


class Decision(NamedTuple):
    """What a rule makes of the norms; the scale of a block is num / den.

    num, den: shape (blocks,), finite wherever the norm is, den > 0.
    changes: shape (blocks,), False where the block keeps its bits.
    bound: a scalar bool, whether a threshold was in force on this step.
    """

    num: jax.Array
    den: jax.Array
    changes: jax.Array
    bound: jax.Array


# From norms and the thresholds of this step to scales.
Rule: TypeAlias = Callable[..., Decision]


class History(NamedTuple):
    """A threshold that follows the norms.

    init: from the number of blocks and a dtype to the memory before step one.
    step: from memory, norms and the step's fixed thresholds to the threshold
      now in force (a scalar, or one a block) and the memory after this step.
    """

    init: Callable[[int, Any], Any]
    step: Callable[..., tuple[jax.Array, Any]]


Transform: TypeAlias = optax.GradientTransformationExtraArgs
