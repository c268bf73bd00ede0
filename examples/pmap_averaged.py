"""Pmap, averaged gradients: every device holds all parameters.

Nothing inside pmap shows whether a leaf is whole or a piece, so it has to be said:
`sharded_over=None`, each leaf is whole. Average first, then clip.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

tx = optax.chain(oun.clip_by_global_norm(1.0, sharded_over=None), optax.adam(1e-2))


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@functools.partial(jax.pmap, axis_name="devices")
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    loss, grads = jax.lax.pmean((loss, grads), "devices")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def start():
    first, second = jax.random.split(jax.random.key(1))
    params = {
        "in": jax.random.normal(first, (8, 32)) / 8**0.5,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(second, (32, 1)) / 32**0.5,
    }
    x = jax.random.normal(jax.random.key(0), (64, 8))
    return params, x, jnp.sin(x.sum(axis=1, keepdims=True))


def on_every_device(tree):
    n = jax.local_device_count()
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * n), tree)


def main():
    params, x, y = start()
    n = jax.local_device_count()
    x, y = x.reshape(n, -1, 8), y.reshape(n, -1, 1)
    opt_state = on_every_device(tx.init(params))
    params = on_every_device(params)
    losses = []
    for _ in range(100):
        params, opt_state, loss = train_step(params, opt_state, x, y)
        losses.append(float(loss[0]))
    # Warns if the recorded norms differ between devices: not averaged.
    report = oun.metrics(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} on {n} devices")
    print(f"last gradient norm {float(report['grad_norm']):.3f}")
    return losses, report, params


if __name__ == "__main__":
    main()
