"""Per-example clipping: `jax.vmap` of the clip, then the mean.

No single example moves the parameters further than the threshold allows.
"""

import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

MAX_NORM = 0.5
tx = optax.sgd(0.1)


def loss_fn(params, x, y):
    """The loss of one example."""
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    each = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0, 0))
    losses, grads = each(params, x, y)
    clipped, norms = jax.vmap(lambda g: oun.clip_grad_norm(g, MAX_NORM))(grads)
    mean = jax.tree.map(lambda g: g.mean(axis=0), clipped)
    updates, opt_state = tx.update(mean, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, losses.mean(), norms, mean


def start():
    first, second = jax.random.split(jax.random.key(1))
    params = {
        "in": jax.random.normal(first, (8, 32)) / 8**0.5,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(second, (32, 1)) / 32**0.5,
    }
    x = jax.random.normal(jax.random.key(0), (64, 8))
    # One label is badly wrong.
    return params, x, jnp.sin(x.sum(axis=1, keepdims=True)).at[0].set(1e4)


def main():
    params, x, y = start()
    opt_state = tx.init(params)
    for _ in range(100):
        params, opt_state, _, norms, mean = train_step(params, opt_state, x, y)
    print(f"norms of single examples: median {float(jnp.median(norms)):.2f}, ", end="")
    print(f"largest {float(norms.max()):.0f}; of the clipped mean ", end="")
    print(f"{float(oun.global_norm(mean)):.2f}")
    return norms, mean, params


if __name__ == "__main__":
    main()
