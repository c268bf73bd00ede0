"""Rows of results, as a table and as JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Row:
    """One contestant of one contest.

    Attributes:
      contest: what was done.
      tree: on which gradients.
      dtype: of which dtype.
      name: by whom.
      seconds: the median.
      ratio: to the contest's base, of the medians in this run.
      ratio_cores: the same of the time that all cores spent; steadier where other
        programs run beside.
      temporaries: bytes.
      bandwidth: bytes a second that the least traffic amounts to.
      goal: the largest ratio that is good enough, or the largest temporaries.
    """

    contest: str
    tree: str
    dtype: str
    name: str
    seconds: float
    ratio: float
    ratio_cores: float | None = None
    temporaries: int | None = None
    bandwidth: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.ratio <= self.goal


HEADS = ("", "tree", "dtype", "who", "ms", "ratio", "cores", "temp", "GB/s", "goal")


def lines(rows: Sequence[Row]) -> list[str]:
    """A Markdown table."""
    body = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(HEADS, *body, strict=True)]
    rule = tuple("-" * width for width in widths)
    return [
        "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"
        for cells in [HEADS, rule, *body]
    ]


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    return (
        row.contest,
        row.tree,
        row.dtype,
        row.name,
        f"{row.seconds * 1e3:.2f}",
        f"{row.ratio:.2f}",
        "" if row.ratio_cores is None else f"{row.ratio_cores:.2f}",
        "" if row.temporaries is None else _bytes(row.temporaries),
        "" if row.bandwidth is None else f"{row.bandwidth / 1e9:.1f}",
        "" if row.goal is None else f"{row.goal:.2f} {verdict}",
    )


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def write(path: pathlib.Path, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine,
        "rows": [dataclasses.asdict(row) | {"met": row.met} for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
