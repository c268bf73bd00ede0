"""Shard_map, FSDP and tensor parallel: every leaf is split in its own way.

Weights are cut over both axes of the mesh and gathered over "data" where they are
used. The types say which axes a leaf varies over, so nothing has to be said to the
clip: leaves split in different ways, and not at all, make one norm, in one
collective.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

tx = optax.chain(oun.clip_by_global_norm(1.0), optax.adam(1e-2))
specs = {
    "in": P("data", "model"),
    "bias": P("model"),
    "out": P("model", "data"),
    "last": P(),
}


def loss_fn(params, x, y):
    """The mean over all devices; its gradient is that of each device's pieces."""
    first = jax.lax.all_gather(params["in"], "data", axis=0, tiled=True)
    second = jax.lax.all_gather(params["out"], "data", axis=1, tiled=True)
    hidden = jax.nn.relu(x @ first + params["bias"])
    out = jax.lax.psum(hidden @ second, "model") + params["last"]
    return jax.lax.pmean(jnp.mean((out - y) ** 2), "data")


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def start():
    first, second = jax.random.split(jax.random.key(1))
    params = {
        "in": jax.random.normal(first, (8, 32)) / 8**0.5,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(second, (32, 4)) / 32**0.5,
        "last": jnp.zeros(4),
    }
    x = jax.random.normal(jax.random.key(0), (64, 8))
    return params, x, jnp.sin(x[:, :4] + x[:, 4:])


def state_specs(params):
    """Moments lie like their parameters, counters and records on every device."""
    state = jax.eval_shape(tx.init, params)
    return optax.tree.map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
    )


def main():
    model = 2 if jax.device_count() % 2 == 0 else 1
    mesh = jax.make_mesh((jax.device_count() // model, model), ("data", "model"))
    params, x, y = start()
    state_spec = state_specs(params)
    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(specs, state_spec, P("data"), P("data")),
            out_specs=(specs, state_spec, P()),
        )
    )

    def put(tree, tree_specs):
        return jax.device_put(
            tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree_specs)
        )

    opt_state = put(tx.init(params), state_spec)
    params, x, y = put(params, specs), put(x, P("data")), put(y, P("data"))
    losses = []
    for _ in range(100):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(float(loss))
    report = oun.metrics(opt_state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} on a mesh of {dict(mesh.shape)}")
    print(f"last gradient norm {float(report['grad_norm']):.3f}")
    return losses, report, params


if __name__ == "__main__":
    main()
