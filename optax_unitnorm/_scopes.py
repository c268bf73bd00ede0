"""Who shares a norm: from the leaves that count to the blocks they belong to."""

from typing import Any

import jax
import numpy as np

from optax_unitnorm import _leaves
from optax_unitnorm._types import Scope, Share, Tree


def whole_tree() -> Scope:
    """One block."""

    def scope(tree: Tree, leaves: Any, shapes: "list[tuple[int, ...]]") -> list[Share]:
        return [Share(0)] * len(shapes)

    return scope


def each_leaf(stacked_axis: Tree = None) -> Scope:
    """A block a leaf, or one for each slice of it along a stacked axis."""
    for axis in _entries(stacked_axis):
        whole = isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)
        if axis is not None and not whole:
            raise TypeError(
                f"`stacked_axis` must be None, an int or a tree of them; got {axis!r}."
            )

    def scope(tree: Tree, leaves: Any, shapes: "list[tuple[int, ...]]") -> list[Share]:
        said = _leaves.spread("stacked_axis", stacked_axis, tree)
        shares: list[Share] = []
        for j, (i, shape) in enumerate(zip(leaves.at, shapes, strict=True)):
            axis = said[i]
            kept = () if axis is None else _axes("stacked_axis", axis, shape, tree, i)
            shares.append(Share(j, kept))
        return shares

    return scope


def each_group(groups: Tree) -> Scope:
    """A block a label; leaves labelled None are neither counted nor scaled."""

    def scope(tree: Tree, leaves: Any, shapes: "list[tuple[int, ...]]") -> list[Share]:
        labels = _leaves.spread("groups", groups, tree)
        for i, label in enumerate(labels):
            try:
                hash(label)
            except TypeError:
                where = _leaves.paths(tree)[i]
                raise TypeError(
                    f"`groups` must hold hashable labels; got {label!r} at {where!r}."
                ) from None
        return [Share(labels[i]) for i in leaves.at]

    return scope


def each_unit(axis: Tree = None) -> Scope:
    """A block a unit: what is left of a leaf when `axis` is summed over.

    With None the axes follow from the rank, as in optax.adaptive_grad_clip:
    vectors as a whole, the first axis of matrices and of stacks of them (rank
    3), all but the last of convolution kernels (rank 4 and 5).
    """

    def scope(tree: Tree, leaves: Any, shapes: "list[tuple[int, ...]]") -> list[Share]:
        said = _leaves.spread("axis", axis, tree, _is_axes)
        shares: list[Share] = []
        for j, (i, shape) in enumerate(zip(leaves.at, shapes, strict=True)):
            if said[i] is None:
                over = _unit_axes(shape, tree, i)
            else:
                over = _axes("axis", said[i], shape, tree, i)
            kept = tuple(d for d in range(len(shape)) if d not in over)
            shares.append(Share(j, kept))
        return shares

    return scope


def _unit_axes(shape: tuple[int, ...], tree: Tree, i: int) -> tuple[int, ...]:
    rank = len(shape)
    if sum(n != 1 for n in shape) <= 1:
        return tuple(range(rank))
    if rank > 5:
        raise ValueError(
            f"`axis` must be given for leaves of rank above 5; got shape {shape} "
            f"at {_leaves.paths(tree)[i]!r}."
        )
    return (0,) if rank <= 3 else tuple(range(rank - 1))


def _is_axes(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(a, int) for a in value)


def _entries(prefix: Tree) -> list[Any]:
    return [] if _leaves.is_function(prefix) else jax.tree.leaves(prefix)


def _axes(
    name: str, axis: Any, shape: tuple[int, ...], tree: Tree, i: int
) -> tuple[int, ...]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    rank = len(shape)
    for a in axes:
        if not isinstance(a, (int, np.integer)) or not -rank <= a < rank:
            raise ValueError(
                f"`{name}` must be an axis of every leaf it is given for; got {a!r} "
                f"at {_leaves.paths(tree)[i]!r}, which has rank {rank}."
            )
    return tuple(int(a) % rank for a in axes)
