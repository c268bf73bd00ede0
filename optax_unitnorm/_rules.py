"""From norms to scales, without memory."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_unitnorm._types import Decision, Norms, Rule


def keep() -> Rule:
    """Scales nothing."""

    def rule(norms: Norms) -> Decision:
        one = jnp.ones_like(norms.block)
        return Decision(one, one, jnp.zeros(one.shape, bool), jnp.zeros((), bool))

    return rule


def unit(*, rms: bool = False) -> Rule:
    """1 / max(norm, floor); a norm of zero keeps its zeros."""

    def rule(norms: Norms, floor: jax.Array) -> Decision:
        # The root mean square is norm / sqrt(size): its size goes to the other
        # side, where it cannot underflow.
        factor = jnp.sqrt(norms.size) if rms else jnp.ones_like(norms.block)
        low = norms.block < floor * factor
        num = jnp.where(low, 1, factor)
        den = jnp.where(low, floor, norms.block)
        some = norms.block > 0
        return Decision(num, jnp.where(some, den, 1), some, jnp.zeros((), bool))

    return rule


def clip(*, rms: bool = False) -> Rule:
    """min(1, threshold / norm)."""

    def rule(norms: Norms, threshold: jax.Array) -> Decision:
        threshold = jnp.broadcast_to(threshold, norms.block.shape)
        if rms:
            threshold = threshold * jnp.sqrt(norms.size)
        return _clip(norms, threshold)

    return rule


def _clip(norms: Norms, threshold: jax.Array) -> Decision:
    binds = norms.block > threshold
    # Where nothing binds the quotient is not used, but its derivative is made.
    num, den = jnp.where(binds, threshold, 1), jnp.where(binds, norms.block, 1)
    return Decision(num, den, binds, jnp.any(binds))


def clip_to_reference() -> Rule:
    """min(1, ratio * max(norm of the parameters, eps) / norm)."""

    def rule(norms: Norms, ratio: jax.Array, eps: jax.Array) -> Decision:
        assert norms.reference is not None
        # An infinite ratio times the derivative of zero would be NaN.
        finite = ratio < jnp.inf
        limit = jnp.where(finite, ratio, 1) * jnp.maximum(norms.reference, eps)
        return _clip(norms, jnp.where(finite, limit, jnp.inf))

    return rule


def soft_clip() -> Rule:
    """threshold / (threshold + norm)."""

    def rule(norms: Norms, threshold: jax.Array) -> Decision:
        binds = (norms.block > 0) & (threshold < jnp.inf)
        num, rest = jnp.where(binds, threshold, 1), jnp.where(binds, norms.block, 1)
        # Halves, where the sum of two large numbers would not be finite.
        part = jnp.where(jnp.isinf(num + rest), 0.5, 1)
        num, rest = num * part, rest * part
        return Decision(num, num + rest, binds, jnp.zeros((), bool))

    return rule


def clip_with_eps(eps: float) -> Rule:
    """min(1, threshold / (norm + eps)): just below the threshold it binds too."""

    def rule(norms: Norms, threshold: jax.Array) -> Decision:
        den = norms.block + eps
        binds = den > threshold
        num = jnp.where(binds, threshold, den)
        return Decision(num, den, binds, jnp.any(binds))

    return rule


def from_function(fn: Any) -> Rule:
    """Any function from a norm to a scale; a norm of zero keeps its zeros."""

    def rule(norms: Norms) -> Decision:
        some = norms.block > 0
        # fn never sees zero: 1 / norm would make a NaN of its derivative.
        safe = jnp.where(some, norms.block, 1)
        scale = jnp.asarray(jax.vmap(fn)(safe)).astype(safe.dtype)
        if scale.shape != safe.shape:
            raise ValueError(
                "`fn` must return a scalar for a scalar norm; got shape "
                f"{scale.shape[1:]}."
            )
        num = jnp.where(some, scale, 1)
        one = jnp.ones_like(num)
        return Decision(num, one, num != 1, jnp.zeros((), bool))

    return rule
