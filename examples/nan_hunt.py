"""A NaN hunt: notice the step, keep the parameters whole, and name the leaves.

`nonfinite="zero"` lets the run go on, the count in the state says when to look, and
`describe` says where.
"""

import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

tx = optax.chain(oun.clip_by_global_norm(1.0, nonfinite="zero"), optax.sgd(0.05))


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    # The fault to be found: the derivative of the square root at zero is infinite.
    gate = jnp.sqrt(jnp.abs(x) @ params["gate"])
    return jnp.mean((gate * (hidden @ params["out"]) - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    grads = jax.grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, oun.metrics(opt_state)


def start():
    first, second = jax.random.split(jax.random.key(1))
    params = {
        "in": jax.random.normal(first, (8, 32)) / 8**0.5,
        "bias": jnp.zeros(32),
        "gate": jnp.ones((8, 1)) / 8,
        "out": jax.random.normal(second, (32, 1)) / 32**0.5,
    }
    x = jax.random.normal(jax.random.key(0), (20, 64, 8))
    x = x.at[13, 5].set(0.0)  # an empty row in one of the batches
    return params, x, jnp.sin(x.sum(axis=-1, keepdims=True))


def main():
    params, x, y = start()
    opt_state = tx.init(params)
    seen, found = 0, {}
    for step in range(20):
        new_params, opt_state, report = train_step(params, opt_state, x[step], y[step])
        if int(report["nonfinite_steps"]) > seen:
            seen = int(report["nonfinite_steps"])
            table = oun.describe(jax.grad(loss_fn)(params, x[step], y[step]))
            found[step] = table.nonfinite
            print(f"step {step}: look at {table.nonfinite}\n{table}")
        params = new_params
    return found, params


if __name__ == "__main__":
    main()
