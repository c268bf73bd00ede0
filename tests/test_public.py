"""The public face: exactly these names, signatures and promises."""

import ast
import inspect
import pathlib
import re
import sys
import typing
from typing import Any

import optax
import pytest
from _transforms import find

import optax_unitnorm as oun

ROOT = pathlib.Path(oun.__file__).parent
COMMON = ("mask", "sharded_over", "nonfinite")
NORM = ("ord", *COMMON)

# Arguments that may be given by position, with their defaults, and options by name.
FACE: dict[str, tuple[str, tuple[str, ...]]] = {
    "normalize_to_unit_global_norm": ("", (*NORM, "min_norm")),
    "normalize_to_unit_leaf_norm": ("stacked_axis=None", (*NORM, "min_norm")),
    "normalize_to_unit_group_norm": ("groups", (*NORM, "min_norm")),
    "normalize_to_unit_global_rms": ("", (*COMMON, "min_norm")),
    "normalize_to_unit_leaf_rms": ("stacked_axis=None", (*COMMON, "min_norm")),
    "clip_by_global_norm": ("max_norm", NORM),
    "clip_by_leaf_norm": ("max_norm, stacked_axis=None", NORM),
    "clip_by_group_norm": ("max_norm, groups", NORM),
    "clip_by_global_rms": ("max_rms", COMMON),
    "clip_by_leaf_rms": ("max_rms, stacked_axis=None", COMMON),
    "clip_by_value": ("max_value, min_value=None", ()),
    "soft_clip_by_global_norm": ("max_norm", NORM),
    "clip_by_param_norm": ("ratio, eps=0.001, axis=None", NORM),
    "record_norm": ("", ("ord", "mask", "sharded_over")),
    "scale_from_norm": ("fn, per='global'", NORM),
    "global_norm": ("tree, ord=None, mask=None, sharded_over='auto'", ()),
}
# Names whose arguments their own tests hold; not all are there yet.
OTHERS = {
    "NormState",
    "leaf_norms",
    "normalize_grad_norm",
    "clip_grad_norm",
    "metrics",
    "describe",
}
PENDING = {
    "clip_by_global_norm_percentile",
    "clip_by_global_norm_zscore",
    "clip_by_leaf_norm_ema",
    "skip_spikes",
    "clip_like_keras",
    "clip_like_torch",
}
DEFAULTS: dict[str, Any] = {
    "ord": None,
    "mask": None,
    "sharded_over": "auto",
    "nonfinite": "propagate",
    "min_norm": 0.0,
}


def public_names() -> set[str]:
    return {
        name
        for name, member in vars(oun).items()
        if not name.startswith("_") and not inspect.ismodule(member)
    }


def test_exported_names() -> None:
    """Nothing is public by accident, and nothing is missing."""
    assert public_names() - PENDING == set(FACE) | OTHERS


def test_front_door() -> None:
    """The front door re-exports `X as X` and does nothing else."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    docstring, *body = tree.body
    assert isinstance(docstring, ast.Expr) and ast.get_docstring(tree)
    for node in body:
        if isinstance(node, ast.Assign):  # the version, and it alone
            assert [ast.unparse(t) for t in node.targets] == ["__version__"]
            continue
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        assert all(name.asname == name.name for name in node.names)


@pytest.mark.parametrize("name", FACE)
def test_signature(name: str) -> None:
    """Explicit arguments; common options by keyword only; no **kwargs."""
    parameters = inspect.signature(getattr(oun, name)).parameters.values()
    kinds = {p.kind for p in parameters}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    positional = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    wanted, named = FACE[name]
    assert ", ".join(positional) == wanted
    assert options == {option: DEFAULTS[option] for option in named}


@pytest.mark.parametrize("name", sorted(public_names()))
def test_annotations(name: str) -> None:
    """Every argument and result has a type."""
    member = getattr(oun, name)
    if inspect.isfunction(member):
        hints = typing.get_type_hints(member)
        arguments = set(inspect.signature(member).parameters)
        assert set(hints) == arguments | {"return"}


def test_transforms_take_extra_arguments() -> None:
    """Their type says what optax.chain and `sharded_over` at update rest on."""
    for name in find():
        result = typing.get_type_hints(getattr(oun, name))["return"]
        assert result is optax.GradientTransformationExtraArgs, name


def section(text: str, heading: str) -> str:
    """The indented part of a docstring below a heading."""
    found = re.search(rf"^{heading}:\n((?:[ \t]+\S.*\n?|\n)+)", text, flags=re.M)
    return found.group(1).strip() if found else ""


@pytest.mark.parametrize("name", sorted(public_names()))
def test_docstring(name: str) -> None:
    """Each says what it guarantees, and each transform shows a call that runs."""
    text = inspect.getdoc(getattr(oun, name)) or ""
    assert text.split("\n")[0].endswith("."), "one sentence first"
    if name in find():
        assert section(text, "Guarantees"), f"{name} promises nothing"
        assert ">>>" in text and f"{name}(" in text


def imports(path: pathlib.Path) -> set[str]:
    """The rooms that a room imports from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("optax_unitnorm").lstrip(".")
            names |= {module} if module else {alias.name for alias in node.names}
    return {name for name in names if (ROOT / f"{name}.py").exists()}


def test_imports_point_one_way() -> None:
    """No circles: rooms can be taken away one by one, those used by none left last."""
    rooms = {p.stem: imports(p) for p in ROOT.glob("*.py")}
    while rooms:
        bottom = {room for room, used in rooms.items() if not used}
        assert bottom, f"a circle among {rooms}"
        rooms = {r: used - bottom for r, used in rooms.items() if r not in bottom}


def test_rooms_keep_apart() -> None:
    """Scopes and rules meet only in the corridor; only one room knows of devices."""
    assert "_rules" not in imports(ROOT / "_scopes.py")
    assert "_scopes" not in imports(ROOT / "_rules.py")
    speaking = {p.name for p in ROOT.glob("*.py") if words(p) & COLLECTIVES}
    assert speaking <= {"_devices.py"}


COLLECTIVES = {"psum", "pmax", "pmin", "pmean", "all_gather", "axis_index", "ppermute"}


def words(path: pathlib.Path) -> set[str]:
    """Names that the code of a room uses, prose aside."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    return names | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def test_runtime_dependencies() -> None:
    """Nothing is imported but the standard library, jax, numpy and optax."""
    allowed = {"jax", "optax", "numpy", "optax_unitnorm"}
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = {(node.module or "").split(".")[0]}
            else:
                continue
            assert names <= allowed | set(sys.stdlib_module_names), (path.name, names)
