"""Gradient accumulation: clip the mean of the micro-batches, not each of them.

Inside `optax.MultiSteps` the clip sees what is accumulated, once in four steps.
"""

import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

EVERY = 4
inner = optax.chain(oun.clip_by_global_norm(1.0), optax.adam(1e-2))
tx = optax.MultiSteps(inner, every_k_schedule=EVERY)


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
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


def main():
    params, x, y = start()
    opt_state = tx.init(params)
    losses = []
    for step in range(400):
        part = slice(step % EVERY, None, EVERY)
        params, opt_state, loss = train_step(params, opt_state, x[part], y[part])
        losses.append(float(loss))
    report = oun.metrics(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"last norm of an accumulated gradient {float(report['grad_norm']):.3f}")
    return losses, report, params


if __name__ == "__main__":
    main()
