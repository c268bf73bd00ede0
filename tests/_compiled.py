"""Programs compiled for 4096 TPU v5p chips and 8 H100s that are not here.

    python tests/_compiled.py tpu gpu > table.md

needs the packages that `scripts/test-all` installs for its leg `aot`: libtpu,
jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12.
"""

import functools
import importlib.util
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(  # what libtpu would ask a TPU host for
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # nothing is held here that others could want
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

H100 = pathlib.Path(__file__).parent / "data" / "h100_sxm.txtpb"
KINDS = (P("data"), P(None, "model"), P("data", "model"), P())
SHAPES = {"tpu": (64, 64), "gpu": (2, 4)}
MODES = {  # how the step is mapped, and whether specs are said
    "shard_map": (AxisType.Auto, False),
    "explicit": (AxisType.Explicit, False),
    "auto, specs": (AxisType.Auto, True),
    "auto": (AxisType.Auto, False),
}
STEPS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adam": lambda **_: optax.adam(1e-3),
    "optax clip, adam": lambda **_: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(1e-3)
    ),
    "clip, adam": lambda **kw: optax.chain(
        oun.clip_by_global_norm(1.0, **kw), optax.adam(1e-3)
    ),
    "unit norm, adam": lambda **kw: optax.chain(
        oun.normalize_to_unit_global_norm(**kw), optax.adam(1e-3)
    ),
}


@functools.cache
def devices(target: str) -> Any:
    if target == "tpu":
        return topologies.get_topology_desc(
            platform="tpu", topology_name="v5p:16x16x16"
        ).devices
    nvcc = importlib.util.find_spec("nvidia.cuda_nvcc")
    if nvcc is not None and nvcc.submodule_search_locations:  # for ptxas
        home = pathlib.Path(next(iter(nvcc.submodule_search_locations)))
        os.environ["PATH"] += os.pathsep + str(home / "bin")
    return topologies.get_topology_desc(
        platform="cuda", topology="1x1x8", target_config=H100.read_text()
    ).devices


def mesh(target: str, kind: AxisType) -> Mesh:
    grid = np.array(devices(target)).reshape(SHAPES[target])
    return Mesh(grid, ("data", "model"), axis_types=(kind,) * 2)


class Case(NamedTuple):
    """One program: leaves of four kinds, each a square piece on every device."""

    target: str
    step: str
    mode: str
    leaves: int = 40
    dtype: str = "float32"
    side: int = 2048

    def leaf_bytes(self) -> int:
        return self.leaves * self.side**2 * jnp.dtype(self.dtype).itemsize


class Report(NamedTuple):
    """What the compiled program does.

    moved: bytes to and from the main memory of a device, in units of all leaves.
    accessed: the same as XLA's cost analysis counts it for TPUs, where copies into
    on-chip memory and reads from there count as well. temporary: bytes. calls: how
    many operations, such as kernels to be launched, the program consists of.
    """

    all_reduces: int
    all_gathers: int
    moved: float
    accessed: float
    temporary: int
    calls: int
    seconds: float


@functools.cache
def report(case: Case) -> Report:
    begin = time.monotonic()
    compiled = lowered(case).compile()
    text = compiled.as_text()
    moved = accessed = traffic(text)
    if case.target == "tpu":  # not supported for GPUs that are not here
        accessed = compiled.cost_analysis()["bytes accessed"]
    return Report(
        all_reduces=count(text, "all-reduce"),
        all_gathers=count(text, "all-gather"),
        moved=moved / case.leaf_bytes(),
        accessed=accessed / case.leaf_bytes(),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        calls=sum(op not in _FREE for _, _, op, _ in operations(text)),
        seconds=time.monotonic() - begin,
    )


def lowered(case: Case) -> Any:
    """The step with donated parameters and state, which come back in their place."""
    kind, said = MODES[case.mode]
    grid = mesh(case.target, kind)
    specs = [KINDS[i % 4] for i in range(case.leaves)]
    tx = STEPS[case.step](**({"sharded_over": specs} if said else {}))

    def shape(spec: P) -> tuple[int, ...]:
        parts = [*spec, None, None][:2]
        return tuple(case.side * (grid.shape[a] if a else 1) for a in parts)

    leaves = [jax.ShapeDtypeStruct(shape(s), case.dtype) for s in specs]
    state = jax.eval_shape(tx.init, leaves)
    states = optax.tree.map_params(
        tx, lambda _, s: s, state, specs, transform_non_params=lambda _: P()
    )

    def place(tree: Any, layout: Any) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(grid, s)
            ),
            tree,
            layout,
        )

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = place(leaves, specs), place(state, states), place(leaves, specs)
    if case.mode == "shard_map":
        step = jax.shard_map(
            step, mesh=grid, in_specs=(specs, states, specs), out_specs=(specs, states)
        )
    shardings = jax.tree.map(
        lambda s: NamedSharding(grid, s),
        (specs, states),
        is_leaf=lambda s: isinstance(s, P),
    )
    with jax.set_mesh(grid):
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings).lower(
            *args
        )


def count(text: str, op: str) -> int:
    pattern = rf"^\s*(?:ROOT )?%?\S+ = .*? {op}(?:-start)?\("
    return len(re.findall(pattern, text, flags=re.M))


_BYTES = {
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "pred": 1,
    "u8": 1,
    "s8": 1,
}
_FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%\S+) = (.*?) ([\w-]+)\((.*?)\)(?:,|$)")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")


def operations(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, kind of result, operation and operands, over the entry computation."""
    start = text.index("\nENTRY")
    for line in text[start : text.index("\n}", start)].splitlines():
        found = _INSTRUCTION.match(line)
        if found is not None:
            name, kind, op, operands = found.groups()
            yield name, kind, op, operands


def traffic(text: str) -> int:
    """Bytes of all operands and results of the entry computation's operations.

    Arrays in memory space 1, the on-chip memory of a TPU, do not count.
    """
    sizes: dict[str, list[int]] = {}
    total = 0
    for name, kind, op, operands in operations(text):
        sizes[name] = [
            0
            if "S(1)" in layout
            else _BYTES.get(dtype, 4)
            * int(np.prod([int(n) for n in dims.split(",") if n]))
            for dtype, dims, layout in _ARRAY.findall(kind)
        ]
        if op == "copy-start":  # returns target, source and a token
            total += sum(sizes[name][:2])
        elif op not in _FREE:
            read = [sizes[o] for o in re.findall(r"%[\w.-]+", operands) if o in sizes]
            total += sum(map(sum, [sizes[name], *read]))
    return total


# ---------------------------------------------------------------------- table
SMALL = 128  # leaves of 64 KiB: what a kernel costs counts there, not its bytes


def cases() -> Iterator[Case]:
    for target in SHAPES:
        for dtype in ("float32", "bfloat16"):
            for leaves, side in ((4, 2048), (40, 2048), (300, SMALL)):
                sizes = (leaves, dtype, side)
                yield Case(target, "adam", "shard_map", *sizes)
                yield Case(target, "optax clip, adam", "explicit", *sizes)
                yield Case(target, "optax clip, adam", "auto", *sizes)
                for mode in MODES:
                    yield Case(target, "clip, adam", mode, *sizes)


HEAD = (
    "leaves",
    "dtype",
    "step",
    "mapped by",
    "all-reduces",
    "all-gathers",
    "moved",
    "accessed",
    "temporaries, KiB",
    "calls",
    "compiled in, s",
)


def main() -> None:
    for target in sys.argv[1:] or SHAPES:
        print(f"\n## {target}\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
        for case in cases():
            if case.target == target:
                print(row(case), flush=True)


def row(case: Case) -> str:
    r = report(case)
    cells = [
        *(case.leaves, case.dtype, case.step, case.mode),
        *(r.all_reduces, r.all_gathers, f"{r.moved:.3f}", f"{r.accessed:.3f}"),
        *(f"{r.temporary / 2**10:.1f}", r.calls, f"{r.seconds:.0f}"),
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
