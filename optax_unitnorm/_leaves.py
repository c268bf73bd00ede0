"""Which leaves count, and how trees said beside the gradients line up with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_unitnorm._types import Tree


def counts(leaf: Any) -> bool:
    """Whether a leaf carries a gradient: floating or complex, and not empty.

    Integer, bool, float0 and PRNG-key leaves do not, nor does any object that
    is not an array; they are handed through as they are.
    """
    if isinstance(leaf, (float, complex)):
        return True
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None or 0 in shape:
        return False
    try:
        return bool(jnp.issubdtype(dtype, jnp.inexact))
    except TypeError:  # another library's dtype
        return False


class Counted(NamedTuple):
    """A flattened tree and the leaves of it that count.

    leaves: every leaf as given. at: positions of those that count.
    arrays: those, as jax arrays. paths: of those, for error messages.
    """

    treedef: Any
    leaves: list[Any]
    at: list[int]
    arrays: list[jax.Array]

    def rebuild(self, arrays: "list[jax.Array]") -> Tree:
        """The tree again, with these in place of the leaves that count."""
        leaves = list(self.leaves)
        for i, array in zip(self.at, arrays, strict=True):
            leaves[i] = array
        return self.treedef.unflatten(leaves)

    def keep(self, flags: "list[bool]") -> "Counted":
        """The same tree, with fewer leaves that count."""
        kept = [j for j, flag in enumerate(flags) if flag]
        return self._replace(
            at=[self.at[j] for j in kept],
            arrays=[self.arrays[j] for j in kept],
        )


def count(tree: Tree, mask: Tree) -> Counted:
    """Flattens a tree and picks the leaves that count."""
    leaves, treedef = jax.tree.flatten(tree)
    flags = [counts(leaf) for leaf in leaves]
    if mask is not None:
        said = spread("mask", mask, tree)
        flags = [
            flag and _as_bool(word, tree, i)
            for i, (flag, word) in enumerate(zip(flags, said, strict=True))
        ]
    index = [i for i, flag in enumerate(flags) if flag]
    return Counted(treedef, leaves, index, [as_array(leaves[i]) for i in index])


def as_array(leaf: Any) -> Any:
    """A leaf as a jax array; a ShapeDtypeStruct stays, for init looks at no value."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def paths(tree: Tree) -> list[str]:
    """The path of every leaf, as it is written in error messages and tables."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [path_name(path) for path, _ in flat]


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_traced(value: Any) -> bool:
    """Whether a value is not known yet, because a function is being traced."""
    return isinstance(value, Tracer)


def is_function(value: object) -> bool:
    """A callable that is not itself a tree (an equinox module is both)."""
    return callable(value) and jax.tree_util.all_leaves([value])


def check_mask(mask: Tree) -> Tree:
    """Refuses a mask that is wrong whatever the gradients are."""
    if mask is not None and not is_function(mask):
        for where, leaf in zip(paths(mask), jax.tree.leaves(mask), strict=True):
            if is_traced(leaf) or not _boolish(leaf):
                raise TypeError(_mask_rule(leaf, f" at {where!r}" if where else ""))
    return mask


def _boolish(leaf: Any) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf.shape == () and leaf.dtype == bool
    return isinstance(leaf, (bool, np.bool_))


def _mask_rule(leaf: Any, where: str = "") -> str:
    return (
        "`mask` must be a tree, a prefix tree or a function of the gradients, of "
        "static bools (with optax.inject_hyperparams, name it in static_args); "
        f"got {leaf!r}{where}."
    )


def _as_bool(word: Any, tree: Tree, i: int) -> bool:
    if is_traced(word) or not _boolish(word):
        raise TypeError(_mask_rule(word, f" at {paths(tree)[i]!r}"))
    return bool(word)


def spread(
    name: str,
    prefix: Tree,
    tree: Tree,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """One entry of a prefix tree for each leaf of a tree.

    A function is called with the tree. Where the tree has no leaves (None, an
    optax.MaskedNode), whatever the prefix says there is ignored.
    """
    if is_function(prefix):
        prefix = prefix(tree)
    found: list[Any] = []
    _walk(name, prefix, tree, (), is_leaf, found)
    return found


def align(name: str, other: Tree, tree: Tree) -> list[Any]:
    """The leaf of another tree that stands where each leaf of a tree stands."""
    leaves, treedef = jax.tree.flatten(other)
    if treedef == jax.tree.structure(tree):
        return leaves
    found: list[Any] = []
    _walk(name, other, tree, (), lambda _: False, found)
    return found


def _is_jax_leaf(node: Any) -> bool:
    return jax.tree_util.all_leaves([node])


def _walk(
    name: str,
    prefix: Any,
    tree: Any,
    path: tuple[Any, ...],
    is_leaf: Callable[[Any], bool],
    found: list[Any],
) -> None:
    if _is_jax_leaf(tree):
        found.append(prefix)
        return
    size = len(jax.tree.leaves(tree))
    if size == 0:
        return
    if prefix is None or is_leaf(prefix) or _is_jax_leaf(prefix):
        found.extend([prefix] * size)
        return
    said, said_def = one_level(prefix)
    nodes, nodes_def = one_level(tree)
    if said_def != nodes_def:
        where = repr(path_name(path)) if path else "the root"
        raise ValueError(
            f"`{name}` must have the structure of the gradients, or be a prefix of "
            f"it; got {_describe(said)} at {where}, where the gradients have "
            f"{_describe(nodes)}."
        )
    for (key, node), (_, word) in zip(nodes, said, strict=True):
        _walk(name, word, node, path + key, is_leaf, found)


def one_level(node: Any) -> tuple[list[Any], Any]:
    """The children of a node with their keys, and its structure."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _describe(children: list[Any]) -> str:
    return "[" + ", ".join(path_name(key) for key, _ in children) + "]"
