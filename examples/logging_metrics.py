"""Logging: what `metrics` finds in the optimizer state, to TensorBoard.

Any writer does that takes a name, a number and a step.
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import optax
from tensorboardX import SummaryWriter

import optax_unitnorm as oun

EVERY = 10
tx = optax.chain(oun.clip_by_global_norm(0.5), optax.adam(1e-2))


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    report = {"loss": loss, **oun.metrics(opt_state, prefix="optimizer/")}
    return optax.apply_updates(params, updates), opt_state, report


def start():
    first, second = jax.random.split(jax.random.key(1))
    params = {
        "in": jax.random.normal(first, (8, 32)) / 8**0.5,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(second, (32, 1)) / 32**0.5,
    }
    x = jax.random.normal(jax.random.key(0), (64, 8))
    return params, x, jnp.sin(x.sum(axis=1, keepdims=True))


def main(directory):
    params, x, y = start()
    opt_state = tx.init(params)
    reports = []
    with SummaryWriter(directory) as writer:
        for step in range(100):
            params, opt_state, report = train_step(params, opt_state, x, y)
            if step % EVERY == 0:
                # The one place that waits for the device.
                reports.append({k: float(v) for k, v in report.items()})
                for name, value in reports[-1].items():
                    writer.add_scalar(name, value, step)
    print(f"wrote {', '.join(reports[-1])} to {directory}")
    return reports


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
