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
    """Scales all gradients by one factor so that their joint norm is 1.

    Every element is multiplied by `1 / max(n, min_norm)`, with n the norm of the whole
    tree: only the direction of the gradient is left, and the learning rate alone sets
    the length of a step. For a length of c, chain it with `optax.scale(c)`; before or
    after momentum are two different methods. Options and common promises:
    `help(optax_unitnorm)`.

    Args:
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".
        min_norm: the norm is taken for at least this, >= 0: a floor below which
            gradients are not blown up, not an added eps; a number or a scalar array.

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients.

    Guarantees:
        - Zeros stay zeros, with a finite derivative (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - No eps: gradients of any magnitude come out as units (tests:
          test_contract.py::test_oracle,
          test_cases.py::test_small_gradients_still_become_units,
          ::test_squares_that_leave_float32).
        - A loss scale of a power of two leaves no trace, not in a bit (tests:
          test_contract.py::test_loss_scale).
        - Norms above `min_norm` are divided out exactly (tests:
          test_contract.py::test_min_norm).
        - The derivative is (I - u u^T)/n, u = g/n, in both modes (tests:
          test_cases.py::test_derivative_of_an_active_clip,
          test_contract.py::test_derivatives).
        - One bad element makes all NaN or all zero (tests:
          test_contract.py::test_nonfinite,
          test_cases.py::test_one_bad_element_is_never_a_mixture).
        - Each leaf keeps its dtype, in mixed trees too (tests:
          test_contract.py::test_structure_and_dtypes).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order,
          ::test_training_equals_one_device).

    References:
        Hazan, Levy and Shalev-Shwartz, Beyond convexity: stochastic quasi-convex
        optimization, 2015, https://arxiv.org/abs/1507.02030; Cutkosky and Mehta,
        Momentum improves normalized SGD, 2020, https://arxiv.org/abs/2002.03305.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([3.0, 2.0]), "b": jnp.ones(3)}  # norm 4
        >>> tx = oun.normalize_to_unit_global_norm()
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates["w"], updates["b"][0]
        (Array([0.75, 0.5 ], dtype=float32), Array(0.25, dtype=float32))
        >>> float(state.grad_norm)
        4.0
    """
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
    """Scales each leaf so that its own norm is 1.

    Each leaf is multiplied by `1 / max(n, min_norm)`, with n the norm of that leaf, or
    of each of its slices along `stacked_axis`. Every tensor then takes a step of the
    same length, however its gradient compares with the others'. Options and common
    promises: `help(optax_unitnorm)`.

    Args:
        stacked_axis: None, an axis, or a prefix tree of them as in_axes of vmap is:
            each slice along it counts as a leaf of its own (scanned layers).
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".
        min_norm: the norm is taken for at least this, >= 0: a floor below which
            gradients are not blown up, not an added eps; a number or a scalar array.

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if a leaf lacks its stacked axis; if a tree does not fit
            the gradients; if a leaf with slices is split over devices and no
            PartitionSpec says how.

    Guarantees:
        - Zeros stay zeros, with a finite derivative (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero,
          ::test_derivative_beside_a_zero_block).
        - No eps: gradients of any magnitude come out as units (tests:
          test_contract.py::test_oracle,
          test_cases.py::test_small_gradients_still_become_units,
          ::test_squares_that_leave_float32).
        - A loss scale of a power of two leaves no trace, not in a bit (tests:
          test_contract.py::test_loss_scale).
        - Norms above `min_norm` are divided out exactly (tests:
          test_contract.py::test_min_norm).
        - A slice is a leaf of its own (tests:
          test_transform.py::test_stacked_axis_in_the_middle,
          test_cases.py::test_scanned_layers_are_clipped_one_by_one).
        - Both modes of differentiation give the derivative of the formula (tests:
          test_contract.py::test_derivatives).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order,
          ::test_slices_of_split_leaves).

    References:
        Yu, Huang, Lin, Salakhutdinov and Carbonell, Block-normalized gradient method:
        an empirical study for training deep neural network, 2017,
        https://arxiv.org/abs/1707.04822.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([1.0, 1.0, 1.0, 1.0]), "b": jnp.array([0.25])}
        >>> tx = oun.normalize_to_unit_leaf_norm()
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["w"], updates["b"]
        (Array([0.5, 0.5, 0.5, 0.5], dtype=float32), Array([1.], dtype=float32))
    """
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
    """Scales each labelled group of leaves so that its joint norm is 1.

    Each leaf is multiplied by `1 / max(n, min_norm)`, with n the norm of all leaves
    that carry its label: between one norm for everything and one for each leaf. Options
    and common promises: `help(optax_unitnorm)`.

    Args:
        groups: hashable labels as a tree, a prefix of it or a callable of the
            gradients; leaves labelled None are neither counted nor scaled.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".
        min_norm: the norm is taken for at least this, >= 0: a floor below which
            gradients are not blown up, not an added eps; a number or a scalar array.

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        TypeError: at update, if a label is not hashable.
        ValueError: at update, if `groups`, `mask` or `sharded_over` does not fit the
            gradients.

    Guarantees:
        - Zeros stay zeros, with a finite derivative (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero,
          ::test_derivative_beside_a_zero_block).
        - No eps: gradients of any magnitude come out as units (tests:
          test_contract.py::test_oracle).
        - A loss scale of a power of two leaves no trace, not in a bit (tests:
          test_contract.py::test_loss_scale).
        - Norms above `min_norm` are divided out exactly (tests:
          test_contract.py::test_min_norm).
        - Groups do not see each other, and the label None leaves its leaves out (tests:
          test_transform.py::test_groups, ::test_group_of_none).
        - Both modes of differentiation give the derivative of the formula (tests:
          test_contract.py::test_derivatives).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order).

    References:
        Yu, Huang, Lin, Salakhutdinov and Carbonell, Block-normalized gradient method:
        an empirical study for training deep neural network, 2017,
        https://arxiv.org/abs/1707.04822.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"body": {"w": jnp.array([3.0, 2.0]), "b": jnp.ones(3)},
        ...          "head": jnp.array([8.0])}
        >>> tx = oun.normalize_to_unit_group_norm({"body": "a", "head": "b"})
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["body"]["w"], updates["head"]
        (Array([0.75, 0.5 ], dtype=float32), Array([1.], dtype=float32))
    """
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
    """Scales all gradients by one factor so that their root mean square is 1.

    Every element is multiplied by `1 / max(r, min_norm)`, with r = n / sqrt(size), the
    root mean square of all elements that count: as `normalize_to_unit_global_norm`, but
    the size of a typical element, and so the learning rate, does not depend on how many
    parameters there are. Options and common promises: `help(optax_unitnorm)`.

    Args:
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".
        min_norm: the root mean square is taken for at least this, >= 0: a floor below
            which gradients are not blown up, not an added eps; a number or a scalar
            array.

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if `mask` or `sharded_over` does not fit the gradients.

    Guarantees:
        - Zeros stay zeros, with a finite derivative (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero).
        - No eps: gradients of any magnitude come out with root mean square 1 (tests:
          test_contract.py::test_oracle,
          test_rules.py::test_rms_of_the_smallest_numbers).
        - A loss scale of a power of two leaves no trace, not in a bit (tests:
          test_contract.py::test_loss_scale).
        - Root mean squares above `min_norm` are divided out exactly (tests:
          test_contract.py::test_min_norm).
        - Empty leaves and leaves that do not count add nothing to the size (tests:
          test_cases.py::test_empty_leaf_beside_a_full_one,
          test_contract.py::test_leaves_that_do_not_count).
        - Both modes of differentiation give the derivative of the formula (tests:
          test_contract.py::test_derivatives).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order).

    References:
        Hazan, Levy and Shalev-Shwartz, Beyond convexity: stochastic quasi-convex
        optimization, 2015, https://arxiv.org/abs/1507.02030 (the same direction, in
        another unit).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([4.0, 0.0, 0.0]), "b": jnp.array([0.0])}
        >>> tx = oun.normalize_to_unit_global_rms()
        >>> tx.update(grads, tx.init(grads))[0]["w"]
        Array([2., 0., 0.], dtype=float32)
    """
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
    """Scales each leaf so that its own root mean square is 1.

    Each leaf is multiplied by `1 / max(r, min_norm)`, with r = n / sqrt(size), the root
    mean square of that leaf, or of each of its slices along `stacked_axis`: every
    tensor's typical element then moves by the learning rate, as with sign updates, but
    without losing the proportions within a tensor. Options and common promises:
    `help(optax_unitnorm)`.

    Args:
        stacked_axis: None, an axis, or a prefix tree of them as in_axes of vmap is:
            each slice along it counts as a leaf of its own (scanned layers).
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".
        min_norm: the root mean square is taken for at least this, >= 0: a floor below
            which gradients are not blown up, not an added eps; a number or a scalar
            array.

    Returns:
        A gradient transformation whose state is a `NormState`. Leaves of any shape and
        any floating or complex dtype keep both.

    Raises:
        TypeError, ValueError: for a wrong argument, when the transform is built.
        ValueError: at update, if a leaf lacks its stacked axis; if a tree does not fit
            the gradients; if a leaf with slices is split over devices and no
            PartitionSpec says how.

    Guarantees:
        - Zeros stay zeros, with a finite derivative (tests:
          test_contract.py::test_zero, ::test_derivative_at_zero,
          ::test_derivative_beside_a_zero_block).
        - No eps: gradients of any magnitude come out with root mean square 1 (tests:
          test_contract.py::test_oracle,
          test_rules.py::test_rms_of_the_smallest_numbers).
        - A loss scale of a power of two leaves no trace, not in a bit (tests:
          test_contract.py::test_loss_scale).
        - Root mean squares above `min_norm` are divided out exactly (tests:
          test_contract.py::test_min_norm).
        - A slice is a leaf of its own (tests:
          test_transform.py::test_stacked_axis_in_the_middle).
        - Both modes of differentiation give the derivative of the formula (tests:
          test_contract.py::test_derivatives).
        - Never a mixture of NaN and numbers in what shares a norm (tests:
          test_contract.py::test_nonfinite).
        - Split over devices, updates and state are those of one device (tests:
          test_devices_auto.py::test_every_transform_and_order,
          ::test_slices_of_split_leaves).

    References:
        Yu, Huang, Lin, Salakhutdinov and Carbonell, Block-normalized gradient method:
        an empirical study for training deep neural network, 2017,
        https://arxiv.org/abs/1707.04822 (per leaf, in another unit).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([2.0, -2.0, 2.0, -2.0]), "b": jnp.array([0.25])}
        >>> tx = oun.normalize_to_unit_leaf_rms()
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["w"], updates["b"]
        (Array([ 1., -1.,  1., -1.], dtype=float32), Array([1.], dtype=float32))
    """
    return transform(
        _scopes.each_leaf(stacked_axis),
        _rules.unit(rms=True),
        _checks.threshold("min_norm", min_norm),
        mask=mask,
        sharded_over=sharded_over,
        nonfinite=nonfinite,
    )
