"""Handwritten digits, 1 % of the batches corrupted: what clipping does about it.

A small classifier is trained with plain momentum SGD, three seeds a method. Now
and then a batch arrives multiplied by 100, as from a broken sensor or a missing
normalisation. Prints a table and writes one picture. Run it with `scripts/demo`.
"""

import argparse
import functools
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_unitnorm as oun

METHODS = {
    "no clipping": oun.record_norm(),
    "clip_by_global_norm(1.0)": oun.clip_by_global_norm(1.0),
    "normalize_to_unit_global_norm()": oun.normalize_to_unit_global_norm(),
    "normalize_to_unit_leaf_norm()": oun.normalize_to_unit_leaf_norm(),
}
SEEDS = 0, 1, 2
STEPS = 2000
CHUNK = 200
BATCH = 64
HIDDEN = 128
LEARNING_RATE = 0.03
SHARE_CORRUPTED = 0.01
FACTOR = 100.0
SMALLEST_DRAWN = 1e-8


class Data(NamedTuple):
    x: jax.Array
    y: jax.Array
    x_test: jax.Array
    y_test: jax.Array


class History(NamedTuple):
    """One value a step: how a run went."""

    accuracy: np.ndarray
    norm: np.ndarray
    corrupted: np.ndarray


class Result(NamedTuple):
    runs: list[History]
    clipped: float
    seconds: float


def load() -> Data:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])
    return Data(x[360:], y[360:], x[:360], y[:360])


def init_params(key):
    sizes = 64, HIDDEN, HIDDEN, 10
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {
            "w": jax.random.normal(k, (fan_in, fan_out)) * (2 / fan_in) ** 0.5,
            "b": jnp.zeros(fan_out),
        }
        for k, fan_in, fan_out in zip(keys, sizes, sizes[1:], strict=False)
    ]


def logits(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def draw(key, data: Data):
    """A batch, once in a hundred multiplied by a hundred."""
    pick, corrupt = jax.random.split(key)
    rows = jax.random.randint(pick, (BATCH,), 0, len(data.x))
    corrupted = jax.random.bernoulli(corrupt, SHARE_CORRUPTED)
    return data.x[rows] * jnp.where(corrupted, FACTOR, 1.0), data.y[rows], corrupted


def optimizer(transform, steps: int):
    learning_rate = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    return optax.chain(transform, optax.sgd(learning_rate, momentum=0.9))


def train_step(tx, data: Data, carry, key):
    params, state = carry
    x, y, corrupted = draw(key, data)
    grads = jax.grad(loss)(params, x, y)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    hits = logits(params, data.x_test).argmax(axis=-1) == data.y_test
    norm = oun.metrics(state)["grad_norm"]
    return (params, state), History(hits.mean(), norm, corrupted)


def train(chunk, tx, seed: int, steps: int, bar: tqdm) -> tuple[History, float]:
    """One run: its history, and the share of its steps that were clipped."""
    init_key, data_key = jax.random.split(jax.random.key(seed))
    params = init_params(init_key)
    carry, histories = (params, tx.init(params)), []
    for keys in jax.random.split(data_key, (steps // CHUNK, CHUNK)):
        carry, history = chunk(carry, keys)
        histories.append(jax.device_get(history))
        bar.update(CHUNK)
    clipped = oun.metrics(carry[1])["clipped_fraction"]
    return History(*map(np.concatenate, zip(*histories, strict=True))), float(clipped)


def train_all(transform, data: Data, steps: int, bar: tqdm) -> Result:
    begin = time.perf_counter()
    tx = optimizer(transform, steps)
    step = functools.partial(train_step, tx, data)
    chunk = jax.jit(functools.partial(jax.lax.scan, step))
    runs, clipped = zip(*(train(chunk, tx, s, steps, bar) for s in SEEDS), strict=True)
    return Result(list(runs), float(np.mean(clipped)), time.perf_counter() - begin)


def table(results: dict[str, Result]) -> str:
    """Final accuracy (mean, and each seed), steps clipped, largest norm, seconds."""
    line = "{:33}{:>8}  {:<19}{:>9}{:>14}{:>9}".format
    lines = [line("", "accuracy", "of each seed", "clipped", "largest norm", "seconds")]
    for name, result in results.items():
        finals = [run.accuracy[-1] for run in result.runs]
        largest = max(np.nanmax(run.norm) for run in result.runs)
        lines.append(
            line(
                name,
                f"{np.mean(finals):.3f}",
                " ".join(f"{final:.3f}" for final in finals),
                f"{result.clipped:.1%}" if result.clipped else "-",
                f"{largest:,.0f}",
                f"{result.seconds:.1f}",
            )
        )
    return "\n".join(lines)


def draw_accuracy(axes, runs: list[History]) -> None:
    every_seed = np.stack([run.accuracy for run in runs])
    steps = np.arange(every_seed.shape[1])
    low, high = every_seed.min(0), every_seed.max(0)
    axes.fill_between(steps, low, high, color="tab:blue", alpha=0.25, linewidth=0)
    axes.plot(steps, every_seed.mean(0), color="tab:blue")
    final = every_seed[:, -1].mean()
    axes.annotate(
        f"{final:.2f}",
        (steps[-1], final),
        (-4, -8 if final > 0.5 else 8),
        textcoords="offset points",
        ha="right",
        va="top" if final > 0.5 else "bottom",
        weight="bold",
        color="tab:blue",
    )


def draw_norms(axes, run: History) -> None:
    # A batch that is already classified with certainty has a gradient of (nearly)
    # zero; on a logarithmic axis it would stretch everything else flat.
    norm, bad = np.maximum(run.norm, SMALLEST_DRAWN), run.corrupted
    steps = np.arange(len(norm))
    axes.plot(steps[~bad], norm[~bad], ".", markersize=2, color="0.55")
    axes.plot(steps[bad], norm[bad], "o", markersize=4, color="tab:red")


def draw_picture(results: dict[str, Result], path: pathlib.Path) -> None:
    """A column a method: accuracy above, gradient norms below."""
    matplotlib.use("agg")  # a file is all that is wanted, whatever the machine has
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        2,
        len(results),
        figsize=(13, 6),
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    for (above, below), (name, result) in zip(grid.T, results.items(), strict=True):
        above.set_title(name, fontsize=10, family="monospace")
        draw_accuracy(above, result.runs)
        draw_norms(below, result.runs[0])
        below.set_xlabel("step")
    grid[0, 0].set(ylim=(0, 1), ylabel="accuracy on unseen digits")
    grid[1, 0].set(yscale="log", ylabel="gradient norm (0 drawn at 1e-8)")
    grid[1, 0].set_ylim(bottom=SMALLEST_DRAWN / 3)
    grid[1, 1].axhline(1.0, color="black", linewidth=1, linestyle="--")
    clean, bad = grid[1, 0].lines
    figure.legend(
        [clean, bad, grid[1, 1].lines[-1]],
        ["clean batch", f"corrupted batch (times {FACTOR:.0f})", "threshold"],
        loc="outside lower center",
        ncols=3,
        markerscale=2,
        frameon=False,
    )
    figure.suptitle(
        "Digits, momentum SGD, 1 % of batches corrupted"
        " (above: mean of 3 seeds, and their range; below: seed 0)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"in {CHUNK}s")
    parser.add_argument("--picture", type=pathlib.Path, default="build/digits_demo.png")
    options = parser.parse_args()
    data, total = load(), options.steps * len(METHODS) * len(SEEDS)
    results = {}
    with tqdm(total=total, unit=" steps", mininterval=0.5) as bar:
        for name, transform in METHODS.items():
            bar.set_description(name)
            results[name] = train_all(transform, data, options.steps, bar)
        bar.set_description("done")
    print(table(results))
    draw_picture(results, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
