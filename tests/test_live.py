"""The records made again, by the frameworks themselves: `pytest -m live`.

Not part of the default run: it needs PyTorch, TensorFlow or Keras. Each lives where
`OUN_LIVE_PYTHON` says (an interpreter; several with `os.pathsep` between), or here.
The break this notices: a release of theirs that returns something else.
"""

import json
import os
import pathlib
import subprocess
import sys

import _parity as parity
import pytest
from _frameworks import NOT_INSTALLED
from test_guide import code, rows
from test_parity import SYSTEMS, complaint

pytestmark = pytest.mark.live

FRAMEWORKS = pathlib.Path(__file__).with_name("_frameworks.py")


def _interpreters() -> list[str]:
    return os.environ.get("OUN_LIVE_PYTHON", sys.executable).split(os.pathsep)


def _answers(system: str, asked: list) -> dict:
    for python in _interpreters():
        run = subprocess.run(
            [python, str(FRAMEWORKS), system],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=600,
        )
        if run.returncode == NOT_INSTALLED:
            continue
        assert run.returncode == 0, run.stderr
        # Frameworks greet on standard output too; the answer is the last line.
        return json.loads(run.stdout.splitlines()[-1])
    pytest.skip(f"{system} is not installed")


@pytest.mark.parametrize("system", SYSTEMS)
def test_framework_still_says_so(system: str) -> None:
    """The installed framework returns what was recorded, and we stand as we did."""
    records = [r for r in parity.load() if r["system"] == system]
    asked = [{k: r[k] for k in ("api", "call", "inputs")} for r in records]
    live = _answers(system, asked)
    wrong = {}
    for record, answer in zip(records, live["answers"], strict=True):
        fresh = {
            k: record[k] for k in ("id", "system", "api", "call", "inputs", "args")
        } | answer
        changed = parity.mismatch(parity.theirs(fresh), parity.theirs(record))
        wrong[record["id"]] = changed or complaint(fresh)
    wrong = {key: why for key, why in wrong.items() if why}
    assert not wrong, f"{live['versions']}\n" + "\n".join(
        f"{key}: {why}" for key, why in wrong.items()
    )


LINES = {
    "torch": [line for row in rows("PyTorch") for line in code(row[0])],
    "tf": [x for row in rows("TensorFlow") for x in code(row[0]) if "tf." in x],
    "keras-tensorflow": [
        x for row in rows("TensorFlow") for x in code(row[0]) if x.startswith("SGD")
    ],
}


@pytest.mark.parametrize("system", LINES)
def test_a_line_of_theirs_runs(system: str) -> None:
    """What the guide says that you wrote is what one writes."""
    lines = [line for line in LINES[system] if not line.startswith("@")]
    live = _answers(system, lines)
    errors = zip(lines, live["answers"], strict=True)
    assert lines and not {line: answer for line, answer in errors if answer}
