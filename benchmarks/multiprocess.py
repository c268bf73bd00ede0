"""The norm of 200 leaves that are split over two processes.

`python -m benchmarks --multiprocess` starts this file twice.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.table import Row

GOAL = 0.1
LEAVES = 200
PROCESSES = 2


def run(rounds: int) -> list[Row]:
    """Starts both processes and reads the times that the first one prints."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.multiprocess", str(port), str(rounds)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE)
        for rank in range(PROCESSES)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a process failed; its message is above")
    times = json.loads(outputs[0].splitlines()[-1])
    base = times["optax global_norm"]
    return [
        Row(
            "norm over two processes",
            f"{LEAVES} x 64x64",
            "float32",
            name,
            seconds,
            seconds / base,
            goal=GOAL if name == "global_norm" else None,
        )
        for name, seconds in times.items()
    ]


def _measure(rounds: int) -> dict[str, float]:
    import jax
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import optax_unitnorm as oun
    from benchmarks import programs
    from benchmarks.timing import take_turns

    mesh = jax.make_mesh((PROCESSES,), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    values = np.full((64, 64), 0.01, np.float32)

    def make(index: Any) -> Any:
        return values[index]

    tree = {
        f"leaf{i:03d}": jax.make_array_from_callback(values.shape, split, make)
        for i in range(LEAVES)
    }
    with jax.set_mesh(mesh):
        contestants = {
            "optax global_norm": programs.function(optax.tree.norm, tree),
            "global_norm": programs.function(oun.global_norm, tree),
        }
        times = take_turns(contestants, rounds)
    return {name: statistics.median(t.wall) for name, t in times.items()}


def _main(port: str, rounds: str, rank: str) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, int(rank))
    print(json.dumps(_measure(int(rounds))))
    jax.distributed.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
