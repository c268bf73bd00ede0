"""Times of contestants that take turns within one run."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass
class Contestant:
    """Something that can be done again and again.

    Attributes:
      call: does it, and waits until it is done.
      prepare: puts back what the call used up, not timed.
      temporaries: bytes that the compiled program needs beside its arguments.
      moved: bytes that it must read and write at the least.
    """

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    temporaries: int | None = None
    moved: int | None = None


@dataclasses.dataclass
class Times:
    """Seconds by the clock and of all cores, one entry a round."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cores: list[float] = dataclasses.field(default_factory=list)

    def median(self) -> float:
        return statistics.median(self.wall)

    def median_cores(self) -> float:
        return statistics.median(self.cores)


def once(call: Callable[[], object]) -> tuple[float, float]:
    wall, cores = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cores


def take_turns(
    contestants: Mapping[str, Contestant], rounds: int, repeats: int = 1
) -> dict[str, Times]:
    """Times each contestant once a round, so that all see the same machine."""
    times = {name: Times() for name in contestants}
    for turn in range(rounds + 2):
        for name, contestant in contestants.items():
            wall = cores = 0.0
            for _ in range(repeats):
                contestant.prepare()
                spent = once(contestant.call)
                wall, cores = wall + spent[0], cores + spent[1]
            if turn >= 2:  # the first two warm up
                times[name].wall.append(wall / repeats)
                times[name].cores.append(cores / repeats)
    return times


def compiled(fn: Any, *args: Any, **jit: Any) -> tuple[Any, int | None]:
    """A jitted function, and the bytes of temporaries that its program needs."""
    jitted = jax.jit(fn, **jit)
    analysis = jitted.lower(*args).compile().memory_analysis()
    return jitted, None if analysis is None else analysis.temp_size_in_bytes


def wait(result: Any) -> Any:
    return jax.block_until_ready(result)
