"""Training on several hosts: one clipped step under shard_map, jit and pmap.

On a TPU pod, or under Slurm, start this once on every host:

    python multi_host.py

Elsewhere tell each process of the others:

    python multi_host.py --coordinator host0:1234 --processes 2 --process 0

To try it on one machine without any accelerator, with two processes of two
simulated devices each, which talk over the loopback network:

    python multi_host.py --local 2

Every process runs the same program on its own part of the batch. The norm that
clips is that of the gradients averaged over all devices of all hosts, it takes
one collective, and every host reports the same number.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

Tree = Any
BATCH, FEATURES, HIDDEN = 64, 16, 32


def optimizer() -> optax.GradientTransformationExtraArgs:
    return optax.chain(oun.clip_by_global_norm(0.1), optax.adam(1e-2))


def init_params() -> Tree:
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(0, FEATURES**-0.5, (FEATURES, HIDDEN)).astype(np.float32),
        "b1": np.zeros((1, HIDDEN), np.float32),
        "w2": rng.normal(0, HIDDEN**-0.5, (HIDDEN, 1)).astype(np.float32),
    }


def batch() -> tuple[np.ndarray, np.ndarray]:
    """The whole batch. A real input pipeline reads a process's own rows only."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def rows_of(process: int, processes: int) -> tuple[np.ndarray, np.ndarray]:
    rows = slice(process * BATCH // processes, (process + 1) * BATCH // processes)
    x, y = batch()
    return x[rows], y[rows]


def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def apply(params: Tree, state: Tree, grads: Tree, **extra: Any) -> tuple[Tree, Tree]:
    updates, state = optimizer().update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def under_shard_map(mesh: Mesh) -> Callable[..., tuple[Tree, Tree]]:
    """The parameters are whole, so their gradient arrives summed: average the loss."""

    def step(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Any:
        def mean_loss(params: Tree) -> jax.Array:
            return lax.pmean(loss(params, x, y), "data")

        return apply(params, state, jax.grad(mean_loss)(params))

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P()
    )
    return jax.jit(mapped)


def under_jit(mesh: Mesh) -> Callable[..., tuple[Tree, Tree]]:
    """One program for the whole batch; XLA splits it and averages."""

    def step(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Any:
        return apply(params, state, jax.grad(loss)(params, x, y))

    return jax.jit(step, out_shardings=NamedSharding(mesh, P()))


def under_pmap() -> Callable[..., tuple[Tree, Tree]]:
    """Nothing is tracked here: average, then say that the gradients are whole."""

    def step(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Any:
        grads = lax.pmean(jax.grad(loss)(params, x, y), "i")
        return apply(params, state, grads, sharded_over=None)

    return jax.pmap(step, axis_name="i")


def train() -> dict[str, tuple[Tree, Tree]]:
    """One step in each of the three ways, from the same parameters."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    params = init_params()
    state = jax.device_get(optimizer().init(params))
    local = rows_of(jax.process_index(), jax.process_count())

    split = NamedSharding(mesh, P("data"))
    x, y = (jax.make_array_from_process_local_data(split, part) for part in local)
    whole = multihost_utils.host_local_array_to_global_array((params, state), mesh, P())
    results = {
        "shard_map": under_shard_map(mesh)(*whole, x, y),
        "jit": under_jit(mesh)(*whole, x, y),
    }

    devices = jax.local_device_count()
    copies = jax.tree.map(lambda v: np.stack([v] * devices), (params, state))
    pieces = [part.reshape(devices, -1, part.shape[1]) for part in local]
    results["pmap"] = under_pmap()(*copies, *pieces)
    return results


def first_copy(value: jax.Array, how: str) -> np.ndarray:
    """What the first device of this process holds."""
    mine = np.asarray(value.addressable_shards[0].data)
    return mine[0] if how == "pmap" else mine


def spawn(processes: int, save: str | None) -> int:
    """This script once more for each process, on one machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, __file__, "--coordinator", address]
    command += ["--processes", str(processes)] + (["--save", save] if save else [])
    children = [
        subprocess.Popen([*command, "--process", str(i)], env=env)
        for i in range(processes)
    ]
    return max(abs(child.wait()) for child in children)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local", type=int, metavar="N", help="start N processes here")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, help="which of them this is")
    parser.add_argument("--save", help="directory for what each process ends with")
    args = parser.parse_args()
    if args.local:
        return spawn(args.local, args.save)

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    for how, (params, state) in train().items():
        norm = first_copy(state[0].grad_norm, how)
        print(
            f"process {jax.process_index()} of {jax.process_count()}, "
            f"{jax.device_count()} devices, {how}: gradient norm {norm:.6f}",
            flush=True,
        )
        if args.save:
            held = {k: first_copy(v, how) for k, v in params.items()}
            path = os.path.join(args.save, f"{how}-{jax.process_index()}.npz")
            np.savez(path, grad_norm=norm, **held)
    jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
