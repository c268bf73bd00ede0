"""`python -m benchmarks [--quick] [--only steps,clips] [--multiprocess]`."""

import argparse
import datetime
import os
import pathlib
import platform
import re
from collections.abc import Iterator
from typing import Any

# One device, as a user's CPU has. Simulated ones, if a test run asked for them,
# would share the cores, and leaves could not be known to be whole.
os.environ["XLA_FLAGS"] = re.sub(
    r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
)
# torch's idle threads would spin on the cores while it is the others' turn.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax

from benchmarks import contests, multiprocess, table


def main() -> None:
    arguments = _parser().parse_args()
    quick = arguments.quick
    effort = contests.Effort(
        rounds=arguments.rounds or (5 if quick else 20),
        compiled_leaves=(30, 300) if quick else (30, 300, 1000, 5000),
        only_tree=arguments.tree,
        quick=quick,
    )
    facts = machine()
    rows: list[table.Row] = []
    for found in _results(arguments, effort):
        rows += found
        print("\n".join(table.lines(found)[2:]), flush=True)
        table.write(arguments.json, facts, rows)
    print("\n" + ", ".join(f"{k} {v}" for k, v in facts.items()) + "\n")
    print("\n".join(table.lines(rows)))


def _results(
    arguments: argparse.Namespace, effort: contests.Effort
) -> Iterator[list[table.Row]]:
    if arguments.multiprocess:
        yield multiprocess.run(effort.rounds)
        return
    for name in arguments.only or contests.CONTESTS:
        yield from contests.CONTESTS[name](effort)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, few leaves")
    parser.add_argument("--rounds", type=int, help="how often each takes its turn")
    parser.add_argument(
        "--only",
        type=lambda names: names.split(","),
        help="of " + ",".join(contests.CONTESTS),
    )
    parser.add_argument("--tree", help="only this tree", choices=contests.trees.TREES)
    parser.add_argument(
        "--multiprocess", action="store_true", help="the norm over two processes"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("build/benchmark.json")
    )
    return parser


if __name__ == "__main__":
    main()
