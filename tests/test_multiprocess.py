"""Two processes of two devices each, over the loopback network."""

import importlib.util
import pathlib
import subprocess
import sys
import types
from typing import Any

import _helpers as h
import _layouts as d
import jax
import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "examples" / "multi_host.py"


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("multi_host", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What each process ended with, in a file for each way to map a program."""
    where = tmp_path_factory.mktemp("hosts")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--local", "2", "--save", where],
        capture_output=True,
        text=True,
        timeout=240,
        env=d.process_env(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2, 4 devices") == 6, done.stdout
    return where


@pytest.fixture(scope="module")
def alone(example: types.ModuleType) -> Any:
    """One step on one device, from the whole batch."""
    params = example.init_params()
    state = example.optimizer().init(params)
    grads = jax.grad(example.loss)(params, *example.batch())
    return jax.jit(example.apply)(params, state, grads), h.tree_norm(grads)


@pytest.mark.parametrize("how", ["shard_map", "jit", "pmap"])
def test_step_over_two_processes(how: str, saved: pathlib.Path, alone: Any) -> None:
    (params, _), norm = alone
    assert norm > 0.2  # so that the clip to 0.1 binds
    ends = [dict(np.load(saved / f"{how}-{process}.npz")) for process in range(2)]
    h.assert_same_bits(ends[0], ends[1])
    d.assert_near(ends[0].pop("grad_norm"), np.float64(norm))
    d.assert_near(ends[0], params)
