"""A threshold that follows a schedule: loose at first, then tight.

The schedule runs on the transform's own step counter, which is in its state.
"""

import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

max_norm = optax.linear_schedule(init_value=0.3, end_value=0.05, transition_steps=100)
tx = optax.chain(oun.clip_by_global_norm(max_norm), optax.sgd(0.1))


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    report = oun.metrics(opt_state)
    return optax.apply_updates(params, updates), opt_state, loss, report


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
    applied = []
    for _ in range(100):
        params, opt_state, loss, report = train_step(params, opt_state, x, y)
        applied.append(float(report["grad_norm"] * report["grad_scale"]))
    print(f"norm after clipping {applied[0]:.2f} -> {applied[-1]:.2f}, loss {loss:.3f}")
    return applied, report


if __name__ == "__main__":
    main()
