"""Keras's and PyTorch's clipping, with their names and their arithmetic."""

import math
from typing import Any

import optax

from optax_unitnorm import _checks, _rules, _scopes
from optax_unitnorm._clip import clip_by_value
from optax_unitnorm._transform import transform
from optax_unitnorm._types import Nonfinite, Transform, Tree

# torch.nn.utils.clip_grad_norm_ adds this to every norm it divides by.
_TORCH_EPS = 1e-6


def clip_like_keras(
    clipnorm: Any = None,
    clipvalue: Any = None,
    global_clipnorm: Any = None,
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    """Clips as a Keras optimizer with the same argument does.

    `clipnorm` clips every leaf by its own norm: in Keras a leaf is a variable, and
    many tutorials take `clipnorm` for the global one. The global one is
    `global_clipnorm`.

    Args:
        clipnorm: the largest norm a leaf may have; `clip_by_leaf_norm`.
        clipvalue: the largest magnitude an element may have; `clip_by_value`.
        global_clipnorm: the largest norm the whole tree may have;
            `clip_by_global_norm`.
        mask: a tree (or prefix, or callable of the gradients) of bools; leaves at
            False are neither counted nor scaled.
        sharded_over: which mesh axes each leaf is split over. `clipvalue` measures
            nothing and does not look at it.
        nonfinite: what a NaN or inf makes of its block, "propagate" (NaN) or "zero".
            `clipvalue` has no blocks: it clips an inf and lets a NaN be.

    Returns:
        A transform of gradients of any shape and dtype, which both stay. Its state
        is a `NormState`, with `clipvalue` that of `clip_by_value`.

    Raises:
        ValueError: unless exactly one of the three is given; if it is negative or
            NaN; if `nonfinite` is not "propagate" with `clipvalue`.

    Guarantees:
        Keras's numbers to 4 eps of the leaf's dtype, but in the places that the
        guide for those who come from Keras lists. A threshold of 0 gives zeros
        where Keras takes it for None, and one of inf never binds where Keras gives
        NaN.

    Source:
        `keras.optimizers.Optimizer` of Keras 3.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
        >>> def clipped(tx):
        ...     updates, _ = tx.update(grads, tx.init(grads))
        ...     return [round(float(x), 4) for x in (*updates["w"], *updates["b"])]
        >>> clipped(oun.clip_like_keras(clipnorm=1.0))
        [0.6, 0.8, 1.0]
        >>> clipped(oun.clip_like_keras(global_clipnorm=1.0))
        [0.2308, 0.3077, 0.9231]
    """
    given = {
        "clipnorm": clipnorm,
        "clipvalue": clipvalue,
        "global_clipnorm": global_clipnorm,
    }
    if sum(value is not None for value in given.values()) != 1:
        got = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            "`clipnorm`, `clipvalue` and `global_clipnorm` must be None except for "
            f"one; got {got}."
        )
    if clipvalue is not None:
        if nonfinite != "propagate":
            raise ValueError(
                "`nonfinite` must be 'propagate' with `clipvalue`, which measures no "
                f"norm; got {nonfinite!r}."
            )
        clip = clip_by_value(_checks.threshold("clipvalue", clipvalue))
        return clip if mask is None else optax.masked(clip, mask)
    name = "clipnorm" if clipnorm is not None else "global_clipnorm"
    return transform(
        _scopes.each_leaf() if clipnorm is not None else _scopes.whole_tree(),
        _rules.clip(),
        _checks.threshold(name, given[name]),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def clip_like_torch(
    max_norm: Any,
    norm_type: Any = 2.0,
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    """Clips as `torch.nn.utils.clip_grad_norm_` does.

    The scale is `min(1, max_norm / (norm + 1e-6))`. Because of the 1e-6 the result
    is a little shorter than `max_norm`, and gradients whose norm is less than 1e-6
    under `max_norm` are shortened too; `clip_by_global_norm` does neither.

    Args:
        max_norm: the largest norm, a number, a scalar array or a schedule.
        norm_type: the order of the norm, static: a number >= 1, inf or "inf".
        mask: a tree (or prefix, or callable of the gradients) of bools; leaves at
            False are neither counted nor scaled.
        sharded_over: which mesh axes each leaf is split over.
        nonfinite: what a NaN or inf makes of the gradients, "propagate" (NaN) or
            "zero".

    Returns:
        A transform of gradients of any shape and dtype, which both stay. Its state
        is a `NormState`, whose `grad_norm` is what `clip_grad_norm_` returns.

    Raises:
        ValueError: if `max_norm` is negative or NaN, or `norm_type` below 1 or NaN.

    Guarantees:
        PyTorch's numbers to 4 eps of the leaf's dtype, but in the places that the
        guide for those who come from PyTorch lists. Where the scale is 1 the bits
        stay.

    Source:
        `torch.nn.utils.clip_grad_norm_` of PyTorch 2; Pascanu, Mikolov and Bengio,
        On the difficulty of training recurrent neural networks, 2013.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> tx = oun.clip_like_torch(5.0)
        >>> grads = jnp.array([3e-7, 4e-7]) * 1e7
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> float(state.grad_norm)
        5.0
        >>> bool(jnp.all(updates < grads))
        True
    """
    if isinstance(norm_type, str) and norm_type == "inf":
        norm_type = math.inf
    return transform(
        _scopes.whole_tree(),
        _rules.clip_with_eps(_TORCH_EPS),
        _checks.threshold("max_norm", max_norm),
        ord=_checks.number("norm_type", norm_type, low=1.0),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )
