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

    `clipnorm` clips every leaf by its own norm (a leaf is a variable in Keras, and
    tutorials that call `clipnorm` global are wrong); `global_clipnorm` clips by the
    norm of the whole tree. Options and common promises: `help(optax_unitnorm)`.

    Args:
        clipnorm: the largest norm of a leaf, >= 0, as for `clip_by_leaf_norm`.
        clipvalue: the largest magnitude of an element, as for `clip_by_value`.
        global_clipnorm: the largest norm of all together, as for
            `clip_by_global_norm`.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs. `clipvalue`
            measures nothing and does not look at it.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero". `clipvalue` takes "propagate" only: it clips an inf and
            lets a NaN be.

    Returns:
        A gradient transformation whose state is a `NormState` (with `clipvalue`, that
        of `clip_by_value`). Leaves of any shape and any floating or complex dtype keep
        both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built; so
            unless exactly one of the three is given.

    Guarantees:
        - Keras's numbers to 4 eps of the leaf's dtype, but for the differences that
          docs/coming_from.md names: 0 is a threshold, inf never binds, NaN is refused,
          no norm overflows (tests:
          test_parity.py::test_every_record_is_equal_or_named).
        - One bad element makes all NaN or all zero, with `clipnorm` all of its leaf
          (tests: test_contract.py::test_nonfinite,
          test_parity.py::test_every_record_is_equal_or_named).

    References:
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
    norm_type: Any = None,
    *,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> Transform:
    """Clips as `torch.nn.utils.clip_grad_norm_` does.

    Every element is multiplied by `min(1, max_norm / (n + 1e-6))`, with n the norm of
    the whole tree. Because of the 1e-6 the result is a little shorter than `max_norm`,
    and gradients whose norm is less than 1e-6 below `max_norm` are shortened too;
    `clip_by_global_norm` does neither. Options and common promises:
    `help(optax_unitnorm)`.

    Args:
        max_norm: the largest norm that passes, >= 0: a number, a scalar array or an
            optax schedule, which counts this transform's steps.
        norm_type: the order of the norm: None (2, PyTorch's own default), a number
            >= 1, inf or "inf"; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all gradients: "propagate" (NaN) or
            "zero".

    Returns:
        A gradient transformation whose state is a `NormState`; its `grad_norm` is what
        `clip_grad_norm_` returns. Leaves of any shape and any floating or complex dtype
        keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients,
            or if `max_norm` is a schedule and the state not this transform's.

    Guarantees:
        - PyTorch's numbers to 4 eps of the leaf's dtype, but for the differences that
          docs/coming_from.md names: a norm of inf makes no mixture of zeros and NaN,
          NaN and orders below 1 are refused, no norm overflows (tests:
          test_parity.py::test_every_record_is_equal_or_named).
        - Where the scale is 1 the bits stay (tests:
          test_parity.py::test_every_record_is_equal_or_named).

    References:
        `torch.nn.utils.clip_grad_norm_` of PyTorch 2; Pascanu, Mikolov and Bengio, On
        the difficulty of training recurrent neural networks, 2013,
        https://arxiv.org/abs/1211.5063.

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
    # A default that is a number would reach us traced from optax.inject_hyperparams.
    return transform(
        _scopes.whole_tree(),
        _rules.clip_with_eps(_TORCH_EPS),
        _checks.threshold("max_norm", max_norm),
        ord=_order(norm_type),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )


def _order(norm_type: Any) -> Any:
    """PyTorch takes the word "inf" too."""
    if norm_type is None:
        return None
    if isinstance(norm_type, str) and norm_type == "inf":
        return math.inf
    return _checks.number("norm_type", norm_type, low=1.0)
