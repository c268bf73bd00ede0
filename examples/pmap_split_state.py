"""Pmap, split optimizer state: every device updates a piece of the parameters.

The gradients are summed and cut in one reduce-scatter; what a device then holds is
a piece of a larger array, and `sharded_over="devices"` says so.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import optax_unitnorm as oun

tx = optax.chain(oun.clip_by_global_norm(1.0, sharded_over="devices"), optax.adam(1e-2))


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def padded(flat):
    """As long as the next multiple of the number of devices; zeros add no norm."""
    return jnp.pad(flat, (0, -flat.size % jax.device_count()))


@functools.partial(jax.pmap, axis_name="devices")
def train_step(params, piece, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    flat, _ = ravel_pytree(grads)
    summed = jax.lax.psum_scatter(padded(flat), "devices", tiled=True)
    updates, opt_state = tx.update(summed / jax.device_count(), opt_state, piece)
    piece = optax.apply_updates(piece, updates)
    flat, unravel = ravel_pytree(params)
    gathered = jax.lax.all_gather(piece, "devices", tiled=True)
    params = unravel(gathered[: flat.size])
    return params, piece, opt_state, jax.lax.pmean(loss, "devices")


def start():
    first, second = jax.random.split(jax.random.key(1))
    params = {
        "in": jax.random.normal(first, (8, 32)) / 8**0.5,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(second, (32, 1)) / 32**0.5,
    }
    x = jax.random.normal(jax.random.key(0), (64, 8))
    return params, x, jnp.sin(x.sum(axis=1, keepdims=True))


def main():
    params, x, y = start()
    n = jax.device_count()
    x, y = x.reshape(n, -1, 8), y.reshape(n, -1, 1)
    pieces = padded(ravel_pytree(params)[0]).reshape(n, -1)
    opt_state = jax.pmap(tx.init)(pieces)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * n), params)
    losses = []
    for _ in range(100):
        params, pieces, opt_state, loss = train_step(params, pieces, opt_state, x, y)
        losses.append(float(loss[0]))
    report = oun.metrics(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} on {n} devices")
    print(f"last gradient norm {float(report['grad_norm']):.3f}")
    return losses, report, params


if __name__ == "__main__":
    main()
