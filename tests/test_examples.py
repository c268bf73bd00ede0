"""Every script of examples/ does what it says, and the guide shows it as it is.

The break this notices: a script that no longer runs, or runs and trains otherwise
than the same training on one device with optax's own clip in float32.
"""

import functools
import importlib.util
import inspect
import pathlib
import re
import struct
from collections.abc import Iterator
from typing import Any

import _helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto import event_pb2

HOME = pathlib.Path(__file__).parents[1]
GUIDE = HOME / "docs" / "recipes.md"
# Run by tests of their own: a training demo, and a program for several processes.
ELSEWHERE = {"digits_demo.py", "multi_host.py"}
# Two float32 programs that sum in different orders drift apart: adam divides by
# small second moments and amplifies it, over a hundred steps to about 1e-4.
DRIFT = 2e-3


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """The tests' own settings are stricter than a user's."""
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def load(name: str) -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", HOME / "examples" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(
    loss_fn: Any, params: Any, *batch: Any, learning_rate: float = 1e-2
) -> tuple[list[float], Any]:
    """A hundred steps on one device, clipped to 1 by optax."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    start = params, tx.init(params)
    (params, _), losses = jax.jit(lambda c: jax.lax.scan(step, c, None, 100))(start)
    return losses.tolist(), params


def assert_same_training(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got[0][:5], want[0][:5], rtol=1e-4)
    for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(x, y, atol=DRIFT)


def test_flax_nnx() -> None:
    losses, report = load("flax_nnx").main()
    assert losses[-1] < 0.2 * losses[0]
    assert 0 < float(report["clipped_fraction"]) < 1


def test_equinox_mlp() -> None:
    losses, report = load("equinox_mlp").main()
    assert losses[-1] < 0.2 * losses[0]
    assert np.isfinite(report["grad_norm"])


@pytest.mark.parametrize("name", ["pmap_averaged", "pmap_split_state"])
def test_pmap(name: str) -> None:
    """Eight devices train as one does."""
    module = load(name)
    losses, report, params = module.main()
    for leaf in jax.tree.leaves(params):
        h.assert_same_bits(leaf[0], leaf[-1])
    one = jax.tree.map(lambda leaf: leaf[0], params)
    assert_same_training((losses, one), reference(module.loss_fn, *module.start()))
    assert report["grad_norm"].shape == ()


def test_fsdp_tensor_parallel() -> None:
    """Leaves split in four ways train as whole ones do."""
    module = load("fsdp_tensor_parallel")

    def whole_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["in"] + params["bias"])
        return jnp.mean((hidden @ params["out"] + params["last"] - y) ** 2)

    losses, _, params = module.main()
    assert_same_training((losses, params), reference(whole_loss, *module.start()))
    assert not params["in"].sharding.is_fully_replicated


def test_multi_steps() -> None:
    """Four quarters of a batch are the batch: the mean is clipped, once."""
    module = load("multi_steps")
    losses, report, params = module.main()
    want = reference(module.loss_fn, *module.start())
    means = np.mean(np.reshape(losses, (-1, module.EVERY)), axis=1)
    assert_same_training((means, params), want)
    assert len(losses) == 400 and float(report["grad_norm"]) > 0


def test_frozen_layers() -> None:
    """What is frozen neither moves nor counts."""
    module = load("frozen_layers")
    losses, _, params = module.main()
    start, x, y = module.start()
    h.assert_same_bits(params["body"], start["body"])
    assert losses[-1] < losses[0]
    params, state, _ = module.train_step(start, module.tx.init(start), x, y)
    grads = jax.grad(module.loss_fn)(start, x, y)
    assert h.tree_norm(grads["body"]) == 0  # the head starts at zero
    _, state, _ = module.train_step(params, module.tx.init(params), x, y)
    grads = jax.grad(module.loss_fn)(params, x, y)
    assert h.tree_norm(grads["body"]) > 1e-3
    norm = module.oun.metrics(state)["grad_norm"]
    # Two compilations of one gradient, so not to the last bit.
    assert float(norm) == pytest.approx(h.tree_norm(grads["head"]), rel=1e-5)


def test_per_example() -> None:
    """One wrong label of 64 does not count for more than a 64th of the threshold."""
    module = load("per_example")
    norms, mean, _ = module.main()
    assert float(norms[0]) > 100 * float(np.median(norms))
    assert h.tree_norm(mean) <= module.MAX_NORM * (1 + 8 * h.EPS32)
    params, x, y = module.start()
    each = jax.vmap(jax.grad(module.loss_fn), (None, 0, 0))(params, x, y)
    one = [jax.tree.map(lambda g, i=i: h.wide(g[i]), each) for i in range(len(x))]
    sizes = [h.tree_norm(tree) for tree in one]
    want = jax.tree.map(
        lambda *g: np.mean(
            [a * min(1, module.MAX_NORM / n) for a, n in zip(g, sizes, strict=True)],
            axis=0,
        ),
        *one,
    )
    got = module.train_step(params, module.tx.init(params), x, y)[-1]
    # The mean of 64 float32 numbers of either sign.
    h.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_loss_scaling() -> None:
    """The step that overflows is dropped, and the rest trains."""
    module = load("loss_scaling")
    losses, report, loss_scale = module.main()
    dropped = int(report["nonfinite_steps"])
    assert dropped >= 1 and float(loss_scale) == 2.0 ** (16 - dropped)
    assert losses[0] == losses[1] and losses[-1] < 0.5 * losses[0]


def test_scheduled_threshold() -> None:
    """The norm that is applied stays under the schedule, and reaches it."""
    module = load("scheduled_threshold")
    applied, report = module.main()
    limits = np.asarray([float(module.max_norm(step)) for step in range(100)])
    assert (applied <= limits * (1 + 8 * h.EPS32)).all()
    assert np.isclose(applied, limits, rtol=1e-5).sum() > 20
    assert 0 < float(report["clipped_fraction"]) < 1


def scalars(path: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """What an event file holds: records of length, checksum, event and checksum."""
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        for value in event.summary.value:
            pairs = found.setdefault(value.tag, [])
            pairs.append((event.step, value.simple_value))
        data = data[16 + length :]
    return found


def test_logging_metrics(tmp_path: pathlib.Path) -> None:
    """What was written is read back, under the names that `metrics` gives."""
    module = load("logging_metrics")
    reports = module.main(str(tmp_path))
    (file,) = tmp_path.iterdir()
    written = scalars(file)
    assert set(written) >= {"loss", "optimizer/grad_norm", "optimizer/grad_scale"}
    for name, pairs in written.items():
        assert [step for step, _ in pairs] == list(range(0, 100, module.EVERY))
        assert [value for _, value in pairs] == [r[name] for r in reports]


def test_nan_hunt() -> None:
    """The one bad step is found, its leaf is named, and nothing broke."""
    found, params = load("nan_hunt").main()
    assert found == {13: ["gate"]}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


# ------------------------------------------------------------------ the guide


def shown() -> dict[str, list[str]]:
    """The code blocks of the guide, by the script that their section names."""
    sections = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        (script,) = re.findall(r"\]\(\.\./examples/(\w+\.py)\)", section)
        found[script] = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    return found


def test_guide_shows_every_script_as_it_is() -> None:
    """No code in the guide that is not run here, and no script left out."""
    scripts = {path.name for path in (HOME / "examples").glob("*.py")} - ELSEWHERE
    assert set(shown()) == scripts
    for script, blocks in shown().items():
        text = (HOME / "examples" / script).read_text()
        assert blocks, script
        for block in blocks:
            assert block in text, f"{script} has no\n{block}"


def test_every_script_has_a_test() -> None:
    source = inspect.getsource(inspect.getmodule(load))
    for script in shown():
        assert f'"{script.removesuffix(".py")}"' in source, script
