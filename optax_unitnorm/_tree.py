"""Functions on trees: norms, and gradients scaled by them, outside any optimizer."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_unitnorm import _checks, _leaves, _measure, _rules, _scopes
from optax_unitnorm._transform import scale_tree
from optax_unitnorm._types import Nonfinite, Norms, Tree


def _subject(tree: Tree, scope: Any, mask: Tree, sharded_over: Any) -> Any:
    return _measure.subject(
        tree,
        scope,
        mask=_leaves.check_mask(mask),
        sharded_over=_measure.check_statement(sharded_over),
    )


def global_norm(
    tree: Tree, ord: Any = None, mask: Tree = None, sharded_over: Any = "auto"
) -> jax.Array:
    what = _subject(tree, _scopes.whole_tree(), mask, sharded_over)
    return _measure.measure(what, _checks.order(ord))[0].norms.total


def leaf_norms(
    tree: Tree, ord: Any = None, mask: Tree = None, sharded_over: Any = "auto"
) -> dict[str, jax.Array]:
    what = _subject(tree, _scopes.each_leaf(), mask, sharded_over)
    norms = _measure.measure(what, _checks.order(ord))[0].norms
    paths = _leaves.paths(tree)
    return {paths[i]: norms.block[j] for j, i in enumerate(what.leaves.index)}


def normalize_grad_norm(
    grads: Tree,
    *,
    ord: Any = None,
    mask: Tree = None,
    sharded_over: Any = "auto",
    nonfinite: Nonfinite = "propagate",
    min_norm: Any = 0.0,
) -> tuple[Tree, jax.Array]:
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
    max_norm = _checks.number("max_norm", max_norm)
    what = _subject(grads, _scopes.whole_tree(), mask, sharded_over)
    order = _checks.order(ord)
    if norm is None:
        measured, plan = _measure.measure(what, order)
        norms, norm = measured.norms, measured.norms.total
    else:
        plan = _measure.plan(what, order)
        norm = jnp.asarray(_checks.number("norm", norm))
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
    if isinstance(norm, jax.core.Tracer):
        raise ValueError(
            "`error_if_nonfinite` must be False under jit, where no error can be "
            'raised from a value; got True (use nonfinite="zero", or look at the '
            "returned norm outside of jit)."
        )
    if bool(jnp.isfinite(norm)):
        return
    paths = _leaves.paths(what.tree)
    rows = zip(what.leaves.index, what.leaves.arrays, strict=True)
    bad = [repr(paths[i]) for i, x in rows if not bool(jnp.all(jnp.isfinite(x)))]
    raise FloatingPointError(
        f"the norm of the gradients must be finite; got {norm} (non-finite leaves: "
        f"{', '.join(bad) or 'none, the norm itself overflows'})."
    )
