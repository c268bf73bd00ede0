"""Equinox: unit norm per layer in the usual filtered training step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

# Updates of one length in every leaf; the schedule says which.
schedule = optax.cosine_decay_schedule(0.1, decay_steps=100)
tx = optax.chain(oun.normalize_to_unit_leaf_norm(), optax.sgd(schedule))


def loss_fn(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit
def train_step(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss


def main():
    x = jax.random.normal(jax.random.key(0), (64, 8))
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    model = eqx.nn.MLP(8, 1, width_size=32, depth=2, key=jax.random.key(1))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(100):
        model, opt_state, loss = train_step(model, opt_state, x, y)
        losses.append(float(loss))
    report = oun.metrics(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"last gradient norm {float(report['grad_norm']):.3f}")
    return losses, report


if __name__ == "__main__":
    main()
