"""Functions on trees: norms, and gradients scaled by them, outside any optimizer."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_unitnorm import _checks, _devices, _leaves, _measure, _rules, _scopes
from optax_unitnorm._transform import scale_tree
from optax_unitnorm._types import Nonfinite, Norms, Tree


def _subject(tree: Tree, scope: Any, mask: Tree, sharded_over: Any) -> Any:
    return _measure.subject(
        tree,
        scope,
        mask=_leaves.check_mask(mask),
        sharded_over=_devices.check_statement(sharded_over),
    )


def global_norm(
    tree: Tree, ord: Any = None, mask: Tree = None, sharded_over: Any = "auto"
) -> jax.Array:
    """The norm of all arrays of a tree together.

    For `ord` p it is `(sum |x|^p)^(1/p)` over every element that counts, and the
    largest magnitude for inf. It may be called anywhere: eagerly, under jit, in mapped
    regions. Options: `help(optax_unitnorm)`.

    Args:
        tree: any tree of arrays and numbers; those of a floating or complex dtype
            count.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are not counted.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.

    Returns:
        A float32 scalar; float64 where a leaf is float64 or complex128.

    Raises:
        TypeError, ValueError: for a wrong argument, or if `mask` or `sharded_over` does
            not fit the tree.

    Guarantees:
        - Right to 4 float32 eps, however the elements are cut into leaves (tests:
          test_fold.py::test_cuts, ::test_ten_million_bfloat16,
          ::test_many_equal_leaves).
        - At any magnitude: squares neither overflow nor vanish (tests:
          test_fold.py::test_orders_and_magnitudes, ::test_large_beside_small,
          ::test_every_power_of_two).
        - NaN gives NaN, else inf gives inf, for every order (tests:
          test_fold.py::test_non_finite).
        - Float64 leaves are summed in float64 (tests: test_fold.py::test_float64).
        - Nothing to count gives 0 (tests: test_tree.py::test_global_norm_of_nothing).
        - The derivative is g/n, and finite at zero (tests:
          test_tree.py::test_gradients_flow_through).
        - Split over devices, all is as on one (tests:
          test_devices_auto.py::test_functions_on_trees).

    References:
        Blue, A portable Fortran program to find the Euclidean norm of a vector, ACM
        TOMS 4(1), 1978, https://doi.org/10.1145/355769.355771 (three sums for three
        ranges).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> tree = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0], jnp.bfloat16)}
        >>> oun.global_norm(tree)
        Array(13., dtype=float32)
        >>> oun.global_norm(tree, ord=1)
        Array(19., dtype=float32)
    """
    what = _subject(tree, _scopes.whole_tree(), mask, sharded_over)
    return _measure.measure(what, _checks.order(ord))[0].norms.total


def leaf_norms(
    tree: Tree, ord: Any = None, mask: Tree = None, sharded_over: Any = "auto"
) -> dict[str, jax.Array]:
    """The norm of each array of a tree, by its path.

    To look at one tree with its shapes and shares, outside of jit, `describe` says
    more. Options: `help(optax_unitnorm)`.

    Args:
        tree: any tree of arrays and numbers; those of a floating or complex dtype
            count.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are left out.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.

    Returns:
        A flat dict from path, as in "layers/0/kernel", to a float32 scalar (float64
        where a leaf of the tree is float64).

    Raises:
        TypeError, ValueError: for a wrong argument, or if `mask` or `sharded_over` does
            not fit the tree.

    Guarantees:
        - One entry for each leaf that counts, in leaf order (tests:
          test_tree.py::test_leaf_norms).
        - Usable under jit (tests: test_tree.py::test_leaf_norms).
        - Split over devices, all is as on one (tests:
          test_devices_auto.py::test_functions_on_trees).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> tree = {"dense": {"w": jnp.array([3.0, 4.0]), "b": jnp.ones(4)}, "step": 7}
        >>> for path, norm in oun.leaf_norms(tree).items():
        ...     print(path, norm)
        dense/b 2.0
        dense/w 5.0
    """
    what = _subject(tree, _scopes.each_leaf(), mask, sharded_over)
    norms = _measure.measure(what, _checks.order(ord))[0].norms
    paths = _leaves.paths(tree)
    return {paths[i]: norms.block[j] for j, i in enumerate(what.leaves.at)}


def normalize_grad_norm(
    grads: Tree,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    min_norm: Any = 0.0,
) -> tuple[Tree, jax.Array]:
    """Scales gradients to a joint norm of 1, and returns the norm they had.

    The function behind `normalize_to_unit_global_norm`, for training loops without
    optax: `grads / max(n, min_norm)`, and n. Options: `help(optax_unitnorm)`.

    Args:
        grads: any tree of arrays and numbers; those of a floating or complex dtype
            count.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".
        min_norm: the norm is taken for at least this, >= 0: a floor, not an added eps;
            a number or a scalar array.

    Returns:
        The scaled gradients, and the norm they had before: a scalar, float32 or float64
        as in `global_norm`.

    Raises:
        TypeError, ValueError: for a wrong argument, or if `mask` or `sharded_over` does
            not fit the tree.

    Guarantees:
        - Zeros stay zeros (tests: test_tree.py::test_normalize_grad_norm).
        - Each leaf keeps its dtype; those that do not count pass as they are (tests:
          test_tree.py::test_normalize_grad_norm, test_leaves.py::test_not_counted,
          ::test_counted).
        - Running sums in half precision do not lose elements (tests:
          test_cases.py::test_running_sum_in_half_precision).
        - Split over devices, all is as on one (tests:
          test_devices_auto.py::test_functions_on_trees, ::test_derivatives_on_devices).

    References:
        Hazan, Levy and Shalev-Shwartz, Beyond convexity: stochastic quasi-convex
        optimization, 2015, https://arxiv.org/abs/1507.02030.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([3.0, 2.0]), "b": jnp.ones(3)}
        >>> unit, norm = oun.normalize_grad_norm(grads)
        >>> unit["w"], norm
        (Array([0.75, 0.5 ], dtype=float32), Array(4., dtype=float32))
    """
    min_norm = _checks.number("min_norm", min_norm)
    what = _subject(grads, _scopes.whole_tree(), mask, sharded_over)
    measured, plan = _measure.measure(what, _checks.order(ord))
    norms = measured.norms
    decision = _rules.unit()(norms, jnp.asarray(min_norm).astype(norms.block.dtype))
    return scale_tree(what, plan, norms, decision, nonfinite), norms.total


def clip_grad_norm(
    grads: Tree,
    max_norm: Any,
    norm: Any = None,
    error_if_nonfinite: bool = False,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
) -> tuple[Tree, jax.Array]:
    """Scales gradients down to a norm of `max_norm`, and returns the norm they had.

    The function behind `clip_by_global_norm`, for training loops without optax, with
    the arguments that users of PyTorch and TensorFlow know: `min(1, max_norm / n) *
    grads`, and n. Options: `help(optax_unitnorm)`.

    Args:
        grads: any tree of arrays and numbers; those of a floating or complex dtype
            count.
        max_norm: the largest norm that passes, >= 0: a number or a scalar array.
        norm: the norm, where it is known already (of a larger tree, say): it is used as
            it is, and nothing is measured.
        error_if_nonfinite: raise where the norm is NaN or inf, naming the leaves;
            outside of jit only.
        ord: the order of the norm: None (2), 1, inf or any p >= 1; static.
        mask: bools as a tree, a prefix of it or a callable of the gradients; leaves at
            False are neither counted nor scaled.
        sharded_over: the mesh axes that leaves are split over: "auto" (as the types
            say), None (whole on every device), names or PartitionSpecs.
        nonfinite: what a NaN or inf makes of all that shares its norm: "propagate"
            (NaN) or "zero".

    Returns:
        The scaled gradients, and the norm they had before (the one given, where it
        was): a scalar.

    Raises:
        TypeError, ValueError: for a wrong argument, or if `mask` or `sharded_over` does
            not fit the tree; a ValueError if `error_if_nonfinite` is True under jit.
        FloatingPointError: with `error_if_nonfinite`, if the norm is not finite.

    Guarantees:
        - What does not bind leaves the same bits (tests:
          test_tree.py::test_clip_grad_norm).
        - A known norm is not measured again, and serves at any magnitude (tests:
          test_tree.py::test_norm_that_is_known, ::test_known_norm_at_any_magnitude).
        - A known norm that is not finite is treated as a measured one (tests:
          test_tree.py::test_known_norm_that_is_not_finite).
        - The error names every bad leaf and no good one (tests:
          test_tree.py::test_error_names_the_leaves).
        - Under jit it says what to do instead (tests:
          test_tree.py::test_error_under_jit).
        - It can be differentiated (tests: test_tree.py::test_gradients_flow_through).
        - Split over devices, all is as on one, and a known norm sends nothing (tests:
          test_devices_auto.py::test_functions_on_trees,
          ::test_known_norm_needs_no_collective).

    References:
        Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural
        networks, 2013, https://arxiv.org/abs/1211.5063;
        `torch.nn.utils.clip_grad_norm_` and `tf.clip_by_global_norm` for the arguments
        (their arithmetic differs: see `clip_like_torch`).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_unitnorm as oun
        >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.0])}
        >>> clipped, norm = oun.clip_grad_norm(grads, 2.5)
        >>> clipped["w"], norm
        (Array([1.5, 2. ], dtype=float32), Array(5., dtype=float32))
    """
    max_norm = _checks.number("max_norm", max_norm)
    what = _subject(grads, _scopes.whole_tree(), mask, sharded_over)
    order = _checks.order(ord)
    if norm is None:
        measured, plan = _measure.measure(what, order)
        norms, norm = measured.norms, measured.norms.total
    else:
        plan = _measure.plan(what, order)
        # A measurement, not a threshold: NaN is for `nonfinite` to decide.
        known = norm if isinstance(norm, float) and norm != norm else None
        norm = jnp.asarray(_checks.number("norm", norm) if known is None else known)
        norms = _known(norm.astype(plan.dtype), plan)
    if _checks.boolean("error_if_nonfinite", error_if_nonfinite):
        _refuse_nonfinite(what, norm)
    decision = _rules.clip()(norms, jnp.asarray(max_norm).astype(norms.block.dtype))
    return scale_tree(what, plan, norms, decision, nonfinite), norm


def _known(norm: jax.Array, plan: _measure.Plan) -> Norms:
    """Norms from one that was handed in."""
    block = jnp.broadcast_to(norm, (plan.own,))
    return Norms(block=block, size=jnp.ones_like(block), reference=None, total=norm)


def _refuse_nonfinite(what: _measure.Subject, norm: jax.Array) -> None:
    if _leaves.is_traced(norm):
        raise ValueError(
            "`error_if_nonfinite` must be False under jit, where no error can be "
            'raised from a value; got True (use nonfinite="zero", or look at the '
            "returned norm outside of jit)."
        )
    if bool(jnp.isfinite(norm)):
        return
    paths = _leaves.paths(what.tree)
    rows = zip(what.leaves.at, what.leaves.arrays, strict=True)
    bad = [repr(paths[i]) for i, x in rows if not bool(jnp.all(jnp.isfinite(x)))]
    raise FloatingPointError(
        f"the norm of the gradients must be finite; got {norm} (non-finite leaves: "
        f"{', '.join(bad) or 'none, the norm itself overflows'})."
    )
