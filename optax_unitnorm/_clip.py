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
    """Scales all gradients down where their joint norm exceeds `max_norm`.

    Every element is multiplied by `min(1, max_norm / n)`, with n the norm of the whole
    tree: the length of the gradient is bounded, its direction stays. Options and common
    promises: `help(optax_unitnorm)`.

    Args:
        max_norm: the largest norm that passes, >= 0: a number, a scalar array or an
            optax schedule, which counts this transform's steps.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients,
            or if `max_norm` is a schedule and the state not this transform's.

    Guarantees:
        - What does not bind leaves the same bits, subnormals included (tests:
          test_contract.py::test_not_binding,
          test_cases.py::test_norm_exactly_at_the_threshold).
        - Zeros stay zeros, with the derivative of the identity (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - A threshold of 0 gives zeros, one of inf never binds (tests:
          test_contract.py::test_zero_threshold, ::test_inf_threshold).
        - Each element is the exact product, rounded once to its dtype, at any magnitude
          (tests: test_contract.py::test_oracle, ::test_orders).
        - Where it binds the derivative is max_norm/n (I - u u^T), u = g/n (tests:
          test_cases.py::test_derivative_of_an_active_clip).
        - One bad element makes all NaN or all zero (tests:
          test_contract.py::test_nonfinite,
          test_cases.py::test_one_bad_element_is_never_a_mixture).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order,
          ::test_training_equals_one_device).

    References:
        Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural
        networks, 2013, https://arxiv.org/abs/1211.5063.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.0])}  # norm 5
        >>> tx = oun.clip_by_global_norm(2.5)
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates["w"]
        Array([1.5, 2. ], dtype=float32)
        >>> float(state.grad_norm), float(state.grad_scale), int(state.clipped)
        (5.0, 0.5, 1)
    """
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
    """Scales each leaf down where its own norm exceeds `max_norm`.

    Each leaf is multiplied by `min(1, max_norm / n)`, with n the norm of that leaf, or
    of each of its slices along `stacked_axis`. A leaf's direction stays, that of the
    whole gradient does not. This is what Keras calls `clipnorm`. Options and common
    promises: `help(optax_unitnorm)`.

    Args:
        max_norm: the largest norm that passes, >= 0: a number, a scalar array or an
            optax schedule, which counts this transform's steps.
        stacked_axis: None, an axis, or a prefix tree of them as in_axes of vmap is:
            each slice along it counts as a leaf of its own (scanned layers).
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if a leaf lacks its stacked axis; if a tree does not fit
            the gradients; if a leaf with slices is split over devices and no
            PartitionSpec says how; if a schedule's state is not this transform's.

    Guarantees:
        - What does not bind leaves the same bits, subnormals included (tests:
          test_contract.py::test_not_binding).
        - Zeros stay zeros, with the derivative of the identity (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - A threshold of 0 gives zeros, one of inf never binds (tests:
          test_contract.py::test_zero_threshold, ::test_inf_threshold).
        - A slice is clipped as a leaf of its own, whatever the others hold (tests:
          test_transform.py::test_stacked_axis, ::test_stacked_axis_in_the_middle,
          ::test_stacked_axis_with_a_bad_slice).
        - A step counts as clipped once, however many leaves were (tests:
          test_contract.py::test_clipped_counts_blocks_together).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order,
          ::test_slices_of_split_leaves).

    References:
        Keras, `clipnorm` of `keras.optimizers.Optimizer`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
        >>> tx = oun.clip_by_leaf_norm(2.5)
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["w"], updates["b"]
        (Array([1.5, 2. ], dtype=float32), Array([1.], dtype=float32))

        Two scanned layers in one array, each by its own norm:

        >>> layers = jnp.array([[3.0, 4.0], [0.5, 0.0]])
        >>> tx = oun.clip_by_leaf_norm(2.5, stacked_axis=0)
        >>> print(tx.update(layers, tx.init(layers))[0])
        [[1.5 2. ]
         [0.5 0. ]]
    """
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
    """Scales each labelled group down where its joint norm exceeds `max_norm`.

    Each leaf is multiplied by `min(1, max_norm / n)`, with n the norm of all leaves
    that carry its label, so that one wild tensor does not starve the rest. Options and
    common promises: `help(optax_unitnorm)`.

    Args:
        max_norm: the largest norm that passes, >= 0: a number, a scalar array or an
            optax schedule, which counts this transform's steps.
        groups: hashable labels as a tree, a prefix of it or a callable of the
            gradients; leaves labelled None are neither counted nor scaled.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        TypeError: at update, if a label is not hashable.
        ValueError: at update, if a tree does not fit the gradients, or if `max_norm` is
            a schedule and the state not this transform's.

    Guarantees:
        - What does not bind leaves the same bits, subnormals included (tests:
          test_contract.py::test_not_binding).
        - Zeros stay zeros, with the derivative of the identity (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - A threshold of 0 gives zeros, one of inf never binds (tests:
          test_contract.py::test_zero_threshold, ::test_inf_threshold).
        - Groups do not see each other (tests: test_transform.py::test_groups,
          test_cases.py::test_one_wild_tensor_does_not_starve_the_rest).
        - The label None leaves its leaves out (tests:
          test_transform.py::test_group_of_none).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order).

    References:
        Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural
        networks, 2013, https://arxiv.org/abs/1211.5063.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"body": {"w": jnp.array([3.0]), "b": jnp.array([4.0])},
        ...          "head": jnp.array([1.0])}
        >>> tx = oun.clip_by_group_norm(2.5, groups={"body": "a", "head": "b"})
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> print(updates["body"]["w"], updates["body"]["b"], updates["head"])
        [1.5] [2.] [1.]
    """
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
    """Scales all gradients down where their root mean square exceeds `max_rms`.

    Every element is multiplied by `min(1, max_rms / r)`, with r = n / sqrt(size), the
    root mean square of all elements that count. The threshold does not depend on how
    many parameters there are. Options and common promises: `help(optax_unitnorm)`.

    Args:
        max_rms: the largest root mean square that passes, >= 0: a number, a scalar
            array or an optax schedule, which counts this transform's steps.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients,
            or if `max_rms` is a schedule and the state not this transform's.

    Guarantees:
        - What does not bind leaves the same bits, subnormals included (tests:
          test_contract.py::test_not_binding).
        - Zeros stay zeros, with the derivative of the identity (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - A threshold of 0 gives zeros, one of inf never binds (tests:
          test_contract.py::test_zero_threshold, ::test_inf_threshold).
        - Empty leaves and leaves that do not count add nothing to the size (tests:
          test_contract.py::test_leaves_that_do_not_count).
        - Each element is the exact product, rounded once to its dtype, at any magnitude
          (tests: test_contract.py::test_oracle).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order).

    References:
        Shazeer and Stern, Adafactor: Adaptive learning rates with sublinear memory
        cost, 2018, https://arxiv.org/abs/1804.04235 (update clipping).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([5.0, 1.0, 1.0]), "b": jnp.array([3.0])}
        >>> tx = oun.clip_by_global_rms(1.5)
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates["w"]
        Array([2.5, 0.5, 0.5], dtype=float32)
        >>> float(state.grad_norm)  # the norm is recorded; the root mean square was 3
        6.0
    """
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
    """Scales each leaf down where its own root mean square exceeds `max_rms`.

    Each leaf is multiplied by `min(1, max_rms / r)`, with r = n / sqrt(size), the root
    mean square of that leaf, or of each of its slices along `stacked_axis`. Adafactor
    clips its updates so, at 1. Options and common promises: `help(optax_unitnorm)`.

    Args:
        max_rms: the largest root mean square that passes, >= 0: a number, a scalar
            array or an optax schedule, which counts this transform's steps.
        stacked_axis: None, an axis, or a prefix tree of them as in_axes of vmap is:
            each slice along it counts as a leaf of its own (scanned layers).
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if a leaf lacks its stacked axis; if a tree does not fit
            the gradients; if a leaf with slices is split over devices and no
            PartitionSpec says how; if a schedule's state is not this transform's.

    Guarantees:
        - What does not bind leaves the same bits, subnormals included (tests:
          test_contract.py::test_not_binding).
        - Zeros stay zeros, with the derivative of the identity (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - A threshold of 0 gives zeros, one of inf never binds (tests:
          test_contract.py::test_zero_threshold, ::test_inf_threshold).
        - A slice is clipped as a leaf of its own (tests:
          test_transform.py::test_stacked_axis_in_the_middle).
        - Published values come out (tests: test_rules.py::test_golden).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order,
          ::test_slices_of_split_leaves).

    References:
        Shazeer and Stern, Adafactor: Adaptive learning rates with sublinear memory
        cost, 2018, https://arxiv.org/abs/1804.04235 (update clipping).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([5.0, 1.0, 1.0, 3.0]), "b": jnp.array([1.0])}
        >>> tx = oun.clip_by_leaf_rms(1.5)
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["w"], updates["b"]
        (Array([2.5, 0.5, 0.5, 1.5], dtype=float32), Array([1.], dtype=float32))
    """
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
    """Scales all gradients so that their joint norm stays below `max_norm`, smoothly.

    Every element is multiplied by `max_norm / (max_norm + n)`, with n the norm of the
    whole tree: the new norm rises from n, for small n, towards `max_norm` and never
    reaches it. At n = `max_norm` it is half of that. Nothing is ever left as it was,
    and nothing counts as clipped. Options and common promises: `help(optax_unitnorm)`.

    Args:
        max_norm: the bound, >= 0: a number, a scalar array or an optax schedule, which
            counts this transform's steps.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients,
            or if `max_norm` is a schedule and the state not this transform's.

    Guarantees:
        - A bound of 0 gives zeros; with inf nothing changes (tests:
          test_contract.py::test_zero_threshold, ::test_inf_threshold).
        - Zeros stay zeros, with a finite derivative (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - Right up to the top of float32, where the sum is out of range (tests:
          test_rules.py::test_soft_clip_at_the_top_of_float32, ::test_one_number).
        - `clipped` stays 0 (tests:
          test_transform.py::test_normalisers_and_soft_clip_never_count_as_clipping).
        - Both modes of differentiation give the derivative of the formula (tests:
          test_contract.py::test_derivatives).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order).

    References:
        Zhang, He, Sra and Jadbabaie, Why gradient clipping accelerates training, 2019,
        https://arxiv.org/abs/1905.11881 (equal to clipping up to a factor of 2).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = jnp.array([3.0, 4.0])  # norm 5
        >>> tx = oun.soft_clip_by_global_norm(5.0)
        >>> tx.update(grads, tx.init(grads))[0]
        Array([1.5, 2. ], dtype=float32)
    """
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
    """Scales each unit of the gradients down where it is large beside its parameters.

    Each unit is multiplied by `min(1, ratio * max(m, eps) / n)`, with n the norm of the
    gradient's unit and m that of the parameter's: adaptive gradient clipping. With
    `axis` None the units follow from the rank, as in `optax.adaptive_grad_clip`: a
    scalar or vector is one unit, a matrix (and a stack of them, rank 3) has one for
    each column (norms over axis 0), a convolution kernel (rank 4 and 5) one for each
    output channel (norms over all axes but the last). The update needs `params`.
    Options and common promises: `help(optax_unitnorm)`.

    Args:
        ratio: the largest norm of a unit, as a share of its parameter's, >= 0: a
            number, a scalar array or an optax schedule, which counts this transform's
            steps.
        eps: parameters with a smaller norm count as this large, >= 0, so that those
            that start at zero can move; a number or a scalar array.
        axis: the axis or tuple of axes that a norm runs over, for all leaves, or a
            prefix tree of them; None infers it from the rank.
        ord: the order of both norms: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `params` is missing or does not fit; if a leaf lacks
            its axis, or has rank above 5 and none was given; if a leaf with several
            units is split over devices and no PartitionSpec says how; if a schedule's
            state is not this transform's.

    Guarantees:
        - What does not bind leaves the same bits, subnormals included (tests:
          test_contract.py::test_not_binding).
        - Zeros stay zeros, with the derivative of the identity (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - A threshold of 0 gives zeros, one of inf never binds (tests:
          test_contract.py::test_zero_threshold, ::test_inf_threshold).
        - The units by rank are those of `optax.adaptive_grad_clip` (tests:
          test_rules.py::test_param_norm_like_optax).
        - A zero parameter is held at eps (tests:
          test_rules.py::test_param_norm_of_nothing).
        - The derivative runs through both norms (tests:
          test_contract.py::test_derivatives).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device, and an error
          asks for the PartitionSpec where a unit may be split (tests:
          test_devices_auto.py::test_units_along_split_axes,
          ::test_parts_of_split_leaves_need_the_spec,
          test_compose.py::test_param_norm_on_a_mesh).

    References:
        Brock, De, Smith and Simonyan, High-performance large-scale image recognition
        without normalization, 2021, https://arxiv.org/abs/2102.06171.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> params = jnp.array([3.0, 4.0])  # norm 5
        >>> grads = jnp.array([6.0, 8.0])  # norm 10
        >>> tx = oun.clip_by_param_norm(0.5)
        >>> tx.update(grads, tx.init(params), params)[0]
        Array([1.5, 2. ], dtype=float32)
    """
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
    """Changes nothing, and records the norm of the gradients that pass.

    Put it anywhere in a chain to log a norm there, and read it with `metrics`. Options
    and common promises: `help(optax_unitnorm)`.

    Args:
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are not counted.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.

    Returns:
        A gradient transformation whose state is a `NormState`, with a scale of 1.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients.

    Guarantees:
        - The same bits come out, NaN, inf and subnormals included (tests:
          test_transform.py::test_record_norm_touches_nothing,
          test_contract.py::test_not_binding).
        - The norm is right to 4 float32 eps, for any order (tests:
          test_contract.py::test_norm_state, test_fold.py::test_orders_and_magnitudes).
        - Non-finite norms are counted (tests:
          test_transform.py::test_record_norm_touches_nothing).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_unitnorm as oun
        >>> tx = optax.chain(oun.record_norm(), optax.sgd(0.1))
        >>> grads = jnp.array([3.0, 4.0])
        >>> _, state = tx.update(grads, tx.init(grads))
        >>> float(oun.metrics(state)["grad_norm"])
        5.0
    """
    return transform(
        _scopes.whole_tree(),
        _rules.keep(),
        ord=ord,
        mask=mask,
        sharded_over=sharded_over,
        scales=False,
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
    """Multiplies the gradients by any function of their norm.

    Every element is multiplied by `fn(n)`, with n the norm of the whole tree, or of its
    leaf with `per="leaf"`. This is the general form of the other rules in one line;
    `fn` is never called with a norm of zero, whose gradients stay zero. Options and
    common promises: `help(optax_unitnorm)`.

    Args:
        fn: from a norm, a positive float32 scalar (float64 where a leaf is), to a
            scale, a scalar of any sign and size. It is traced under vmap, so it is made
            of jax.numpy functions; it must be differentiable if the update is.
        per: "global", one norm for the tree, or "leaf", one for each leaf.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `fn` does not return a scalar, or if `mask` or
            `sharded_over` does not fit the gradients.

    Guarantees:
        - Any scale is taken: 0, negative, above 1, of any dtype (tests:
          test_rules.py::test_scale_from_norm_of_any_value).
        - Zeros stay zeros, with a finite derivative, even for 1 / n (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - Leaves keep their dtype and are rounded once (tests:
          test_contract.py::test_oracle, ::test_structure_and_dtypes).
        - Both modes of differentiation give the derivative of the formula (tests:
          test_contract.py::test_derivatives).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order).

    References:
        Bu, Wang, Zha and Karypis, Automatic clipping: differentially private deep
        learning made easier and stronger, 2022, https://arxiv.org/abs/2206.07136 (its
        scale is `lambda n: c / (n + gamma)`).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([2.0])}  # norm 3
        >>> tx = oun.scale_from_norm(lambda n: 1 / (1 + n))
        >>> tx.update(grads, tx.init(grads))[0]["w"]
        Array([0.25, 0.5 ], dtype=float32)
    """
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
    """Brings each element between `min_value` and `max_value`.

    Real elements become `min(max(g, min_value), max_value)`; complex ones keep their
    phase and have their magnitude brought to at most `max_value`. No norm is measured,
    and the direction of the gradient changes: prefer `clip_by_global_norm` where that
    matters.

    Args:
        max_value: the largest value (or magnitude) that passes: a number, a scalar
            array or an optax schedule, which counts this transform's steps. It is >= 0
            where `min_value` is None.
        min_value: the smallest, likewise; None is `-max_value`. Real leaves only.

    Returns:
        A gradient transformation for leaves of any shape and any floating or complex
        dtype. Its state is `optax.EmptyState`, or a step counter where a bound is a
        schedule.

    Raises:
        TypeError: for an argument that is no number, when the transform is built.
        ValueError: if a bound is NaN, if `max_value` alone is negative, or if
            `min_value` exceeds it; at update, if a leaf is complex and `min_value`
            given, or if a bound is a schedule and the state not this transform's.

    Guarantees:
        - What lies between the bounds keeps its bits, subnormals and the sign of zero
          included (tests: test_contract.py::test_not_binding).
        - Inf meets its bound and NaN stays, each on its own (tests:
          test_rules.py::test_value_of_inf_and_nan).
        - Leaves keep their dtype; those that do not count pass (tests:
          test_contract.py::test_structure_and_dtypes, ::test_leaves_that_do_not_count).
        - Complex elements are clipped by magnitude, at any size (tests:
          test_rules.py::test_value_bounds, test_contract.py::test_oracle).
        - No state without a schedule (tests: test_rules.py::test_value_state).

    References:
        Mikolov, Statistical language models based on neural networks, PhD thesis, Brno
        University of Technology, 2012.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = jnp.array([-3.0, 0.5, 3.0])
        >>> tx = oun.clip_by_value(1.0)
        >>> tx.update(grads, tx.init(grads))[0]
        Array([-1. ,  0.5,  1. ], dtype=float32)
    """
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
            state = StepState(jnp.asarray(optax.safe_increment(state.steps)))
        leaves = _leaves.count(updates, None)
        for i, x in zip(leaves.at, leaves.arrays, strict=True):
            if low is not None and jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise ValueError(
                    "`min_value` must be None where a leaf is complex and clipped by "
                    f"magnitude; got {low!r} and a complex leaf at "
                    f"{_leaves.paths(updates)[i]!r}."
                )
        arrays = [_fold.clamped(x, *bounds) for x in leaves.arrays]
        return leaves.rebuild(arrays), state

    return optax.GradientTransformationExtraArgs(init, update)
