"""What is measured, against what, and which ratios are good enough."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

import optax_unitnorm as oun
from benchmarks import against, programs, transforms, trees
from benchmarks.table import Row
from benchmarks.timing import Contestant, take_turns
from benchmarks.transforms import CLIP

ADAM = 1e-3
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass
class Effort:
    """How long to measure."""

    rounds: int
    compiled_leaves: tuple[int, ...]
    only_tree: str | None = None
    quick: bool = False

    def trees(self) -> dict[str, Callable[[], trees.Shapes]]:
        chosen = self.only_tree
        return {k: v for k, v in trees.TREES.items() if chosen in (None, k)}


def contest(
    title: str,
    tree: str,
    dtype: str,
    contestants: dict[str, Contestant],
    goals: dict[str, float],
    rounds: int,
) -> list[Row]:
    """One row each; ratios are to the first."""
    repeats = 10 if tree == "300 x 1000" else 1
    times = take_turns(contestants, rounds, repeats)
    base = next(iter(times.values()))
    rows: list[Row] = []
    for name, contestant in contestants.items():
        seconds = times[name].median()
        moved = contestant.moved
        rows.append(
            Row(
                title,
                tree,
                dtype,
                name,
                seconds,
                ratio=seconds / base.median(),
                ratio_cores=times[name].median_cores() / base.median_cores()
                if on_cpu()
                else None,
                temporaries=contestant.temporaries,
                bandwidth=None if moved is None else moved / seconds,
                goal=goals.get(name),
            )
        )
    return rows


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def each_tree(effort: Effort) -> Iterator[tuple[str, str, trees.Tree]]:
    for name, shapes in effort.trees().items():
        for dtype in DTYPES:
            yield name, dtype, trees.fill(shapes(), dtype)


# ---------------------------------------------------------------- the contests
def steps(effort: Effort) -> Iterator[list[Row]]:
    """Adam alone, and after a clip: one more read of the gradients is 8 for 7."""
    adam = optax.adam(ADAM)
    for tree, dtype, grads in each_tree(effort):
        chains = {
            "clip": oun.clip_by_global_norm(CLIP),
            "unit norm": oun.normalize_to_unit_global_norm(),
            "optax clip": optax.clip_by_global_norm(CLIP),
        }
        contestants = {"adam alone": programs.step(adam, grads, 7)} | {
            f"{name} + adam": programs.step(optax.chain(tx, adam), grads, 8)
            for name, tx in chains.items()
        }
        limit = 1.2 if dtype == "float32" else 1.7
        limit = 1.5 if tree == "300 x 1000" else limit
        goals = {"clip + adam": limit, "unit norm + adam": limit}
        yield contest("step", tree, dtype, contestants, goals, effort.rounds)


def clips(effort: Effort) -> Iterator[list[Row]]:
    """The clip alone, gradients donated, against torch in place."""
    for tree, dtype, grads in each_tree(effort):
        contestants: dict[str, Contestant] = {}
        if against.has_torch() and on_cpu():
            contestants["torch clip"] = against.torch_clip(grads, CLIP)
        contestants["clip"] = programs.update(oun.clip_by_global_norm(CLIP), grads)
        contestants["optax clip"] = programs.update(
            optax.clip_by_global_norm(CLIP), grads
        )
        goals = {"clip": 1.1} if "torch clip" in contestants else {}
        if not on_cpu():
            contestants = device_copy(grads, passes=2) | contestants
            goals = {"clip": 1.5 / 0.9}  # three passes, a copy has two
        rows = contest("clip", tree, dtype, contestants, goals, effort.rounds)
        ours, theirs = (find(rows, name) for name in ("clip", "optax clip"))
        if dtype == "bfloat16" and tree != "300 x 1000":
            rows.append(
                dataclasses.replace(
                    ours,
                    name="clip / optax clip",
                    ratio=ours.seconds / theirs.seconds,
                    ratio_cores=None,
                    goal=0.2,
                )
            )
        yield rows


def norms(effort: Effort) -> Iterator[list[Row]]:
    """The norm alone, against as fast as memory can be read."""
    for tree, dtype, grads in each_tree(effort):
        contestants: dict[str, Contestant] = {}
        goals: dict[str, float] = {}
        if not on_cpu():
            contestants = device_copy(grads, passes=2)
            goals = {"global_norm": 0.5 / 0.9}  # one pass, a copy has two
        elif dtype == "float32":
            contestants["numpy dot, all cores"] = against.numpy_dot(grads)
            goals = {} if tree == "300 x 1000" else {"global_norm": 1 / 0.85}
        contestants["global_norm"] = programs.function(oun.global_norm, grads)
        contestants["optax global_norm"] = programs.function(optax.tree.norm, grads)
        yield contest("norm", tree, dtype, contestants, goals, effort.rounds)


def rules(effort: Effort) -> Iterator[list[Row]]:
    """Every transform alone: none slower than 1.3 times the global clip."""
    for tree, dtype, grads in each_tree(effort):
        if effort.quick and (tree, dtype) != ("24 x 1024x1024", "float32"):
            continue
        contestants = {
            name: programs.update(tx, grads) for name, tx in transforms.every().items()
        }
        base = "clip_by_global_norm"
        contestants = {base: contestants.pop(base)} | contestants
        goals = {name: 1.3 for name in contestants if name != base}
        yield contest("rule", tree, dtype, contestants, goals, effort.rounds)


def compiling(effort: Effort) -> Iterator[list[Row]]:
    """Tracing and compiling a step of many small leaves."""
    adam = optax.adam(ADAM)
    txs = {
        "adam alone": adam,
        "clip + adam": optax.chain(oun.clip_by_global_norm(CLIP), adam),
        "unit norm + adam": optax.chain(oun.normalize_to_unit_global_norm(), adam),
        "leaf clip + adam": optax.chain(oun.clip_by_leaf_norm(CLIP), adam),
        "optax clip + adam": optax.chain(optax.clip_by_global_norm(CLIP), adam),
    }
    programs.compile_times(txs, trees.abstract(trees.small(2), "float32"))
    for leaves in effort.compiled_leaves:
        chosen = {k: v for k, v in txs.items() if leaves <= 1000 or "leaf" not in k}
        grads = trees.abstract(trees.small(leaves), "float32")
        times = programs.compile_times(chosen, grads)
        base, base_cores = times["adam alone"]
        limits = {300: 2.0, 1000: times["optax clip + adam"][0] / base}
        yield [
            Row(
                "trace and compile",
                f"{leaves} x 1000",
                "float32",
                name,
                seconds,
                seconds / base,
                cores / base_cores,
                goal=limits.get(leaves) if name == "clip + adam" else None,
            )
            for name, (seconds, cores) in times.items()
        ]


def eagerly(effort: Effort) -> Iterator[list[Row]]:
    """Updates that are not jitted, on many small leaves."""
    grads = trees.fill(trees.small(), "float32")
    contestants = {
        "optax clip": programs.eager(optax.clip_by_global_norm(CLIP), grads),
        "clip": programs.eager(oun.clip_by_global_norm(CLIP), grads),
        "unit norm": programs.eager(oun.normalize_to_unit_global_norm(), grads),
        "leaf clip": programs.eager(oun.clip_by_leaf_norm(CLIP), grads),
    }
    yield contest("eager", "300 x 1000", "float32", contestants, {}, effort.rounds)


# On an accelerator too, a copy is as fast as memory goes.
def device_copy(tree: trees.Tree, passes: int) -> dict[str, Contestant]:
    copies = programs.function(_plus_zero, tree, passes)
    return {"device copy": copies}


def _plus_zero(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 0, tree)


def find(rows: list[Row], name: str) -> Row:
    return next(row for row in rows if row.name == name)


CONTESTS: dict[str, Callable[[Effort], Iterator[list[Row]]]] = {
    "steps": steps,
    "clips": clips,
    "norms": norms,
    "rules": rules,
    "compiling": compiling,
    "eager": eagerly,
}
