"""Docstrings that keep their word: examples run, and guarantees name their tests."""

import ast
import doctest
import functools
import inspect
import pathlib
import re
from typing import Any

import jax
import pytest
from test_public import public_names, section

import optax_unitnorm as oun

TESTS = pathlib.Path(__file__).parent
PAGES = TESTS.parent / "docs"
ROOMS = pathlib.Path(oun.__file__).parent
DOCUMENTED: dict[str, Any] = {
    "optax_unitnorm": oun,
    **{name: getattr(oun, name) for name in sorted(public_names())},
}
every_name = pytest.mark.parametrize("name", DOCUMENTED)


def text_of(name: str) -> str:
    return inspect.getdoc(DOCUMENTED[name]) or ""


def promises(name: str) -> list[str]:
    """The items of a Guarantees section, each as one line of text."""
    items = re.split(r"^ *- ", section(text_of(name), "Guarantees"), flags=re.M)
    return [" ".join(item.split()) for item in items if item]


def named_tests(promise: str) -> list[tuple[str, str]]:
    """File and test of each name in "... (tests: test_a.py::test_x, ::test_y)."."""
    found = re.search(r"\(tests?: ([^()]+)\)\.$", promise)
    pairs: list[tuple[str, str]] = []
    for name in found.group(1).split(", ") if found else ():
        file, _, test = name.partition("::")
        pairs.append((file or pairs[-1][0], test))
    return pairs


@functools.cache
def functions_in(file: str) -> set[str]:
    path = TESTS / file
    tree = ast.parse(path.read_text() if path.exists() else "")
    nodes = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name for node in nodes if node.name.startswith("test_")}


def run_examples(name: str, text: str) -> None:
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert example.examples, "no example"
    said: list[str] = []
    with jax.numpy_rank_promotion("allow"):  # as in a reader's own program
        failed, _ = doctest.DocTestRunner().run(example, out=said.append)
    assert not failed, "".join(said)


@every_name
def test_example_runs(name: str) -> None:
    """What a reader copies is what a reader gets."""
    run_examples(name, text_of(name))


@every_name
def test_guarantees_name_tests_that_exist(name: str) -> None:
    """A renamed or deleted test takes the promise it held with it."""
    assert promises(name), "no guarantees"
    for promise in promises(name):
        assert named_tests(promise), f"names no test: {promise}"
        for file, test in named_tests(promise):
            assert test in functions_in(file), f"no {file}::{test}: {promise}"


@every_name
def test_sections(name: str) -> None:
    """One sentence first, and every argument has its line."""
    text = text_of(name)
    summary, _, rest = text.partition("\n")
    assert summary.endswith(".") and not rest.partition("\n")[0].strip()
    assert section(text, "Example"), "no Example section"
    member = DOCUMENTED[name]
    if inspect.isfunction(member):
        wanted = list(inspect.signature(member).parameters)
        said = re.findall(r"^ *(\w+): ", section(text, "Args"), flags=re.M)
        assert [w for w in said if w in wanted] == wanted
        assert section(text, "Returns")
    if inspect.isclass(member):
        said = re.findall(r"^ *(\w+): ", section(text, "Attributes"), flags=re.M)
        assert [w for w in said if w in member._fields] == list(member._fields)


def test_tour_names_everything() -> None:
    """`help(optax_unitnorm)` leaves nothing public out."""
    words = set(re.findall(r"\w+", text_of("optax_unitnorm")))
    assert public_names() <= words


# ------------------------------------------------------------------ pages


@pytest.mark.parametrize("page", ["concepts", "architecture"])
def test_page_runs(page: str) -> None:
    """The code of a page, its blocks one after the other."""
    text = (PAGES / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    run_examples(page, "\n".join(blocks))


def test_architecture_names_every_room() -> None:
    """No room without its line, no line without its room; tests likewise."""
    text = (PAGES / "architecture.md").read_text()
    rooms = text[text.index("## Rooms") : text.index("## Which room")]
    named = set(re.findall(r"^\| `(\w+\.py)`", rooms, flags=re.MULTILINE))
    assert named == {path.name for path in ROOMS.glob("*.py")}
    tests = text[text.index("## Tests") :]
    for pattern in re.findall(r"`([\w*]+\.py)`", tests):
        assert list(TESTS.glob(pattern)), pattern
