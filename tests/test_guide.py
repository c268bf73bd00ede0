"""The guide for those who come from elsewhere: every line of ours in it is run.

The break this notices: an example, a one-liner or a claim that is not so any more.
"""

import doctest
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import _parity as parity
import jax
import numpy as np
import optax
import pytest
import test_parity

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "coming_from.md"


@functools.cache
def _text() -> str:
    return GUIDE.read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its two head lines."""
    section = re.split(r"^## ", _text(), flags=re.MULTILINE)
    body = next(s for s in section if s.startswith(heading))
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in lines[2:]]


def code(cell: str) -> list[str]:
    """The pieces of code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def _blocks() -> tuple[dict[str, Any], str]:
    """What the guide's code blocks define, run as doctests, and what went wrong."""
    names: dict[str, Any] = {}
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    blocks = re.findall(r"^```python\n(.*?)^```", _text(), re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        test = doctest.DocTestParser().get_doctest(
            block, names, f"block {number}", str(GUIDE), 0
        )
        with jax.numpy_rank_promotion("allow"):  # as in any user's program
            runner.run(test, out=said.append, clear_globs=False)
        names |= test.globs
    return names, "".join(said)


def test_the_blocks_run() -> None:
    """Every block gives the output that stands under it."""
    names, said = _blocks()
    assert not said, said
    assert {"train_step", "clipped", "bad", "same"} < set(names)


TABLES = ("TensorFlow and Keras", "PyTorch", "optax", "I have NaN gradients")


def _lines() -> Iterator[tuple[str, str]]:
    for table in TABLES:
        for row in rows(table):
            yield from ((table, line) for line in code(row[1]))


@pytest.mark.parametrize(("table", "line"), [*_lines()])
def test_a_line_of_ours_runs(table: str, line: str) -> None:
    """Each line in the middle column runs, and a transform in it takes a step."""
    _result(line)


@functools.cache
def _result(line: str) -> Any:
    """What a line gives; of a transform, the updates of one step."""
    names = dict(_blocks()[0])
    try:
        result = eval(line, names)
    except SyntaxError:  # an assignment
        return exec(line, names)
    if not isinstance(result, optax.GradientTransformation):
        return result
    grads, params = names["grads"], names["params"]
    return result.update(grads, result.init(params), params)[0]


def test_every_row_has_a_line() -> None:
    """No row of the four tables has an empty middle."""
    assert all(code(row[1]) for table in TABLES for row in rows(table))


@pytest.mark.parametrize(("theirs", "line"), [row[:2] for row in rows("optax")])
def test_optax_line_does_the_same(theirs: str, line: str) -> None:
    """In optax's table both columns run and agree."""
    one, two = (_result(code(cell)[0]) for cell in (theirs, line))
    if isinstance(one, tuple):  # per-example sums and counts
        (one, _), (two, _) = one, two
        one, two = jax.tree.leaves(one), [g.sum(0) for g in jax.tree.leaves(two)]
    eps = float(np.finfo(np.float32).eps)
    # normalize_by_update_norm adds 1e-6 to a norm of 13.
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=8 * eps)


def test_the_differences_are_all_there() -> None:
    """The list has every name once, with a record that falls under it."""
    records = {record["id"]: record for record in parity.load()}
    shown = {row[0]: code(row[3])[0] for row in rows("The differences")}
    assert set(shown) == set(test_parity.DIFFERENCES)
    assert {
        name: test_parity.name(records[record]) for name, record in shown.items()
    } == {name: name for name in shown}


def test_the_counts_are_those_of_the_records() -> None:
    """The two numbers in the text are those that the parity test asserts."""
    total = sum(sum(c.values()) for c in test_parity.COUNTS.values())
    equal = sum(c["equal"] for c in test_parity.COUNTS.values())
    said = re.search(r"(\d+) recorded calls: (\d+) are equal", _text())
    assert said and [int(n) for n in said.groups()] == [total, equal]
