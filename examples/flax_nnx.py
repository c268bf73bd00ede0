"""Flax NNX: clipping inside `nnx.Optimizer`, and what it did."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import optax_unitnorm as oun


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main():
    x = jax.random.normal(jax.random.key(0), (64, 8))
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    model = Net(nnx.Rngs(0))
    tx = optax.chain(oun.clip_by_global_norm(1.0), optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, x, y)) for _ in range(100)]
    report = oun.metrics(optimizer.opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"clipped on {float(report['clipped_fraction']):.0%} of the steps")
    return losses, report


if __name__ == "__main__":
    main()
