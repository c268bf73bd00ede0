"""The README keeps its word: its example runs, its names and tests exist."""

import inspect
import pathlib
import re

import pytest
from test_public import public_names

import optax_unitnorm as oun

TESTS = pathlib.Path(__file__).parent
README = (TESTS.parent / "README.md").read_text()


def section(heading: str) -> str:
    """The text under a heading of the second level."""
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def calls(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each call that stands first in a table's row."""
    cells = "".join(re.findall(r"^\| (`.*?) \|", text, flags=re.M))
    return re.findall(r"`(\w+)\((.*?)\)`", cells)


def test_first_example(capsys: pytest.CaptureFixture[str]) -> None:
    """What is pasted prints what the comment under it says."""
    code = re.search(r"```python\n(.*?)```", README, flags=re.S)
    assert code
    exec(code[1], {})
    assert code[1].splitlines()[-1] == f"# {capsys.readouterr().out.strip()}"


@pytest.mark.parametrize(("name", "arguments"), calls(section("Transforms")))
def test_table_of_transforms(name: str, arguments: str) -> None:
    """Each row is the signature as far as arguments go by position."""
    parameters = inspect.signature(getattr(oun, name)).parameters.values()
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    said = [argument.split("=") for argument in arguments.split(", ") if argument]
    assert [s[0] for s in said] == [p.name for p in by_position]
    defaults = [p.default for p in by_position if p.default is not p.empty]
    assert [eval(s[1]) for s in said if s[1:]] == defaults


def test_every_name_is_there() -> None:
    """Nothing public is missing, and nothing is named that is not there."""
    assert public_names() <= set(re.findall(r"\w+", README))
    assert set(re.findall(r"oun\.(\w+)", README)) <= public_names()


@pytest.mark.parametrize(
    "promise", sorted(set(re.findall(r"test_\w+\.py[\w:]*", README)))
)
def test_promises_name_tests_that_exist(promise: str) -> None:
    """A renamed or deleted test takes the promise it held with it."""
    file, _, test = promise.partition("::")
    assert f"def {test or 'test_'}" in (TESTS / file).read_text()
