"""Draws `docs/adaptive.png`: four learned thresholds over one recorded run.

A small network learns handwritten digits. Four batches arrive multiplied by 30, and
from step 250 on the loss is six times as large, as after a change of data or of its
weights. The norms of the gradients are recorded once; then every rule sees the very
same norms. Run it from the root of the project: `python docs/draw_adaptive.py`.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import optax_unitnorm as oun

STEPS, BATCH, WARMUP = 400, 32, 50
SPIKES = (10, 90, 150, 330)
REGIME = 250
SPIKE_FACTOR, REGIME_FACTOR = 30.0, 6.0
PICTURE = pathlib.Path(__file__).parent / "adaptive.png"


def record() -> dict[str, jax.Array]:
    """The norm of each leaf at each step, leaves as arrays of one element."""
    x, y = load_digits(return_X_y=True)
    x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": 0.2 * jax.random.normal(keys[0], (64, 32)),
        "output": 0.2 * jax.random.normal(keys[1], (32, 10)),
    }
    batches = jax.random.randint(keys[2], (STEPS, BATCH), 0, len(x))
    steps = jnp.arange(STEPS)
    scale = jnp.where(jnp.isin(steps, jnp.array(SPIKES)), SPIKE_FACTOR, 1.0)
    weight = jnp.where(steps >= REGIME, REGIME_FACTOR, 1.0)
    # What is recorded is not clipped; the step is, so that the run survives.
    tx = optax.chain(oun.clip_by_global_norm(1.0), optax.sgd(0.05))

    def loss(params: Any, x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        logits = jax.nn.relu(x @ params["hidden"]) @ params["output"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return weight * jnp.mean(losses)

    def step(carry: Any, now: Any) -> Any:
        params, state = carry
        batch, scale, weight = now
        grads = jax.grad(loss)(params, scale * x[batch], y[batch], weight)
        updates, state = tx.update(grads, state, params)
        norms = {k: n[None] for k, n in oun.leaf_norms(grads).items()}
        return (optax.apply_updates(params, updates), state), norms

    _, norms = lax.scan(step, (params, tx.init(params)), (batches, scale, weight))
    return norms


def follow(tx: optax.GradientTransformationExtraArgs, norms: Any) -> Any:
    """The state after each step over the recorded norms."""

    def step(state: Any, grads: Any) -> Any:
        _, state = tx.update(grads, state)
        return state, state

    first = jax.tree.map(lambda x: x[0], norms)
    return lax.scan(step, tx.init(first), norms)[1]


def skip(**options: Any) -> optax.GradientTransformationExtraArgs:
    return oun.skip_spikes(
        optax.identity(), sigmas=6.0, window=64, warmup=WARMUP, **options
    )


PANELS: dict[str, dict[str, optax.GradientTransformationExtraArgs]] = {
    "clip_by_global_norm_percentile": {
        "10 (AutoClip)": oun.clip_by_global_norm_percentile(10, window=100),
        "90": oun.clip_by_global_norm_percentile(90, window=100),
    },
    "clip_by_global_norm_zscore": {
        'observe="clipped"': oun.clip_by_global_norm_zscore(
            warmup=WARMUP, max_norm=20.0
        ),
        'observe="raw"': oun.clip_by_global_norm_zscore(
            warmup=WARMUP, max_norm=20.0, observe="raw"
        ),
    },
    "clip_by_leaf_norm_ema (one leaf)": {
        "as published": oun.clip_by_leaf_norm_ema(warmup=WARMUP),
        'ratio=2, initial="mean", max_norm=20': oun.clip_by_leaf_norm_ema(
            2.0, warmup=WARMUP, initial="mean", max_norm=20.0
        ),
    },
    "skip_spikes (crosses: skipped)": {
        'observe="accepted"': skip(),
        'observe="raw"': skip(observe="raw"),
        "max_consecutive=10": skip(max_consecutive=10),
    },
}


def draw(norms: dict[str, jax.Array]) -> Any:
    # No window is needed, and none may be there.
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True)
    steps = np.arange(STEPS)
    whole = np.sqrt(sum(np.asarray(x)[:, 0] ** 2 for x in norms.values()))
    for axis, (title, rules) in zip(axes.flat, PANELS.items(), strict=True):
        leaf = "leaf" in title
        seen = np.asarray(norms["hidden"])[:, 0] if leaf else whole
        axis.plot(steps, seen, ".", color="0.75", markersize=3)
        for i, (name, tx) in enumerate(rules.items()):
            states = follow(tx, norms)
            threshold = np.asarray(states.threshold)
            threshold = threshold[:, 0] if leaf else threshold
            threshold = np.where(np.isinf(threshold), np.nan, threshold)
            axis.plot(steps, threshold, color=f"C{i}", linewidth=1.2, label=name)
            if "skip" in title:
                skipped = np.diff(np.asarray(states.skipped), prepend=0) > 0
                height = 0.13 * 1.35**i
                axis.plot(
                    steps[skipped], np.full(skipped.sum(), height), f"xC{i}", ms=4
                )
        axis.set(title=title, yscale="log", ylim=(0.1, 1000))
        axis.title.set_fontsize(10)
        axis.legend(fontsize=8, loc="upper left")
    for axis in axes[1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("norm (dots), threshold")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    draw(record()).savefig(PICTURE, dpi=75, metadata={"Software": None})
