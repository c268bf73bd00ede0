"""Loss scaling in float16: unscale first, then clip.

A clip before the unscaling would compare the threshold with a norm that is a
thousand times too large. `nonfinite="zero"` turns an overflowed step into no step,
and the norm in the state says that it happened.
"""

import jax
import jax.numpy as jnp
import optax

import optax_unitnorm as oun

tx = optax.chain(oun.clip_by_global_norm(1.0, nonfinite="zero"), optax.sgd(0.05))


def loss_fn(params, x, y):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jax.nn.relu(x.astype(jnp.float16) @ half["in"] + half["bias"])
    return jnp.mean((hidden @ half["out"] - y.astype(jnp.float16)) ** 2)


@jax.jit
def train_step(params, opt_state, loss_scale, x, y):
    def scaled_loss(params):
        return loss_fn(params, x, y) * loss_scale.astype(jnp.float16)

    grads = jax.grad(scaled_loss)(params)
    grads = jax.tree.map(lambda g: g / loss_scale, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    finite = jnp.isfinite(oun.metrics(opt_state)["grad_norm"])
    loss_scale = jnp.where(finite, loss_scale, loss_scale / 2)
    return optax.apply_updates(params, updates), opt_state, loss_scale


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
    loss_scale = jnp.float32(2.0**16)  # float16 ends at 65504: it overflows at once
    losses = []
    for _ in range(100):
        losses.append(float(loss_fn(params, x, y)))
        params, opt_state, loss_scale = train_step(params, opt_state, loss_scale, x, y)
    report = oun.metrics(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, loss scale {int(loss_scale)}")
    print(f"steps dropped: {int(report['nonfinite_steps'])}")
    return losses, report, loss_scale


if __name__ == "__main__":
    main()
