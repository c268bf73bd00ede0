"""Frozen layers, said once: what is not trained does not count in the norm either.

`optax.partition` hands each transform only the leaves of its label, so the clip
needs no mask of its own.
"""

import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

labels = {"body": "frozen", "head": "trained"}
tx = optax.partition(
    {
        "trained": optax.chain(oun.clip_by_global_norm(1.0), optax.adam(1e-2)),
        "frozen": optax.set_to_zero(),
    },
    labels,
)


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["body"]["kernel"] + params["body"]["bias"])
    return jnp.mean((hidden @ params["head"]["kernel"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def start():
    kernel = jax.random.normal(jax.random.key(1), (8, 32)) / 8**0.5
    params = {
        "body": {"kernel": kernel, "bias": jnp.zeros(32)},
        "head": {"kernel": jnp.zeros((32, 1))},
    }
    x = jax.random.normal(jax.random.key(0), (64, 8))
    return params, x, jnp.sin(x.sum(axis=1, keepdims=True))


def main():
    params, x, y = start()
    opt_state = tx.init(params)
    losses = []
    for _ in range(100):
        params, opt_state, loss = train_step(params, opt_state, x, y)
        losses.append(float(loss))
    report = oun.metrics(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"last gradient norm of what is trained {float(report['grad_norm']):.3f}")
    return losses, report, params


if __name__ == "__main__":
    main()
