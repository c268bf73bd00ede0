"""The command that says whether an installation is sound, made to say so and not."""

import ast
import inspect
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_unitnorm as oun
from optax_unitnorm import __main__ as command


@pytest.fixture(scope="module")
def report() -> tuple[int, list[str]]:
    """Exit code and lines of a run on the eight devices of the tests."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *say, **_: said.append(" ".join(say)))
        code = command.main()
    return code, said


def test_sound(report: tuple[int, list[str]]) -> None:
    code, said = report
    assert code == 0, "\n".join(said)
    assert said[-1].startswith("sound: ")
    assert not any("FAILED" in line for line in said)


def test_says_what_a_bug_report_needs(report: tuple[int, list[str]]) -> None:
    _, said = report
    text = "\n".join(said)
    for version in (jax.__version__, optax.__version__, "Python 3."):
        assert version in text
    assert "8 x cpu" in text
    for dtype in (*command.NARROW, *command.WIDE):
        (line,) = (s for s in said if s.startswith(f"{dtype} ") and "*" not in s[:22])
        assert "eps" in line
    for kind in ("jit", "shard_map", "pmap"):
        assert any(s.startswith(f"{kind}, 8 devices") and "eps" in s for s in said)
    assert any(s.startswith("step ") and "ratio" in s for s in said)


def wrong(max_norm: Any, **kwargs: Any) -> Any:
    """Off by a part in ten thousand, in every update."""
    right = oun.clip_by_global_norm(max_norm, **kwargs)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = right.update(updates, state, params, **extra)
        off = jax.tree.map(lambda g: g * jnp.asarray(1.0001, g.dtype), updates)
        return off, state

    return optax.GradientTransformationExtraArgs(right.init, update)


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no such luck\nand more")


@pytest.mark.parametrize("break_it", [wrong, raising])
def test_not_sound(
    break_it: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong number, or an error, is said in its line and in the exit code."""
    fake = types.SimpleNamespace(**{**vars(oun), "clip_by_global_norm": break_it})
    monkeypatch.setattr(command, "oun", fake)
    monkeypatch.setattr(command, "NARROW", ("float32",))
    monkeypatch.setattr(command, "WIDE", ())
    monkeypatch.setattr(command, "EXTREMES", ())
    monkeypatch.setattr(command, "_sharded", lambda *args: ("not compared", True))
    monkeypatch.setattr(command, "_step_times", lambda: "not timed")
    assert command.main() == 1
    said = capsys.readouterr().out
    assert "\nNOT sound: " in said
    (line,) = (s for s in said.splitlines() if s.startswith("float32 "))
    assert "FAILED" in line
    if break_it is raising:
        assert "RuntimeError: no such luck" in line and "and more" not in said


def test_one_device() -> None:
    """On a single device, as a process of its own, nothing sharded is claimed."""
    code = (
        "import sys, optax_unitnorm.__main__ as m;"
        "m.NARROW, m.WIDE, m.EXTREMES = ('float32',), (), ();"
        "m._step_times = lambda: 'not timed';"
        "sys.exit(m.main())"
    )
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("not checked: one device") == 3
    assert not done.stderr


def test_imports_nothing_that_is_not_installed_with_it() -> None:
    tree = ast.parse(pathlib.Path(inspect.getfile(command)).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names - set(sys.stdlib_module_names) == {
        "jax",
        "numpy",
        "optax",
        "optax_unitnorm",
    }
