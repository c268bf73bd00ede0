"""Rules with memory: published values, float64 oracles, and what a bad step leaves."""

import doctest
import functools
import inspect
import json
import math
import pathlib
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _helpers as h
import _layouts as d
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

HERE = pathlib.Path(__file__).parent
DATA = json.loads((HERE / "data/methods.json").read_text())
Make = Callable[..., optax.GradientTransformationExtraArgs]

# One of each rule, warm after few steps.
RULES: dict[str, Make] = {
    "percentile": lambda **o: oun.clip_by_global_norm_percentile(50, window=5, **o),
    "zscore": lambda **o: oun.clip_by_global_norm_zscore(warmup=4, max_norm=40.0, **o),
    "leaf ema": lambda **o: oun.clip_by_leaf_norm_ema(
        warmup=4, max_norm=20.0, floor=0.01, **o
    ),
    "skip": lambda **o: oun.skip_spikes(
        optax.adam(0.1), sigmas=4.0, window=8, warmup=4, **o
    ),
}
each_rule = pytest.mark.parametrize("name", RULES)
# Where compiling is what costs: a vector a leaf and a wrapper; scalars when slow.
two_rules_first = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("leaf ema", "skip") else pytest.mark.slow)
        for n in RULES
    ],
)


def norms_of(seed: int, steps: int) -> np.ndarray:
    """Norms of a training run: a slow drift, noise, and a spike now and then."""
    rng = np.random.default_rng(seed)
    drift = np.linspace(4, 2, steps)
    spikes = np.where(rng.uniform(size=steps) < 0.08, 30.0, 1.0)
    return np.float32(drift * np.exp(0.2 * rng.normal(size=steps)) * spikes)


def split(norm: float, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Gradients of two leaves with this norm together, shared anew at each seed."""
    angle = 0.3 + 0.8 * np.random.default_rng(seed).uniform()
    w, b = math.cos(angle) * norm, math.sin(angle) * norm
    return {
        "b": np.array([0.8 * b, -0.6 * b], dtype),
        "w": np.array([[0.6 * w, 0.0], [0.0, 0.8 * w]], dtype),
    }


def sequence(norms: Sequence[float]) -> list[dict[str, np.ndarray]]:
    return [split(float(n), i) for i, n in enumerate(norms)]


def run(
    tx: optax.GradientTransformationExtraArgs, grads: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Updates and states, step by step; eager, since compiling costs many steps."""
    state = tx.init(grads[0])
    updates, states = [], []
    for g in grads:
        u, state = tx.update(g, state, g)
        updates.append(u)
        states.append(state)
    return updates, states


@functools.cache
def traced(name: str) -> tuple[Any, Any, list[Any], list[Any]]:
    """A rule, its compiled update, and a run over `SPIKES`."""
    tx = RULES[name]()
    update = jax.jit(tx.update)
    return tx, update, *run(tx._replace(update=update), sequence(SPIKES))


def near(got: Any, want: Any, tol: float = d.TRAIN_TOL) -> None:
    """Near each other, and infinite in the same places (not seen yet)."""

    def finite(x: Any, y: Any) -> Any:
        return np.where(np.isinf(x) & (np.asarray(x) == np.asarray(y)), 0, x)

    got, want = jax.tree.map(finite, got, want), jax.tree.map(finite, want, got)
    d.assert_near(got, want, tol)


def thresholds(states: Sequence[Any]) -> np.ndarray:
    return np.array([s.threshold for s in states], np.float64)


# ------------------------------------------------------------- published values


def call(name: str) -> optax.GradientTransformationExtraArgs | None:
    """What the cases' own table says is the call."""
    kw = DATA["cases"][name].get("kwargs", {})
    if name.startswith("autoclip"):
        return oun.clip_by_global_norm_percentile(
            kw["percentile"],
            window=kw["history"] or 1000,
            include_current=kw.get("include_current", True),
        )
    if name.startswith("zclip"):
        return oun.clip_by_global_norm_zscore(
            2.5,
            decay=0.97,
            warmup=4,
            max_norm=kw.get("max_norm", math.inf),
            mode=kw.get("option", "adaptive"),
            observe="none" if "skipupd" in name else "clipped",
        )
    if name.startswith("adagc"):
        return oun.clip_by_leaf_norm_ema(
            kw["lambda_rel"],
            decay=kw["beta"],
            warmup=kw["warmup"],
            max_norm=1.0,
            floor=kw.get("gamma_floor", 0.0),
        )
    if name.startswith("skip_spike"):
        return oun.skip_spikes(
            optax.identity(), sigmas=6, window=6, warmup=2, observe="raw"
        )
    return None


# The one case with an argument that we do not have.
CASES = [n for n, c in DATA["cases"].items() if "sequence" in c and "factor" not in n]
# These divide as we do; the others add 1e-6 to what they divide by.
EXACT = ("exact", "prev", "skip_spike", "zero_lock")


def arrays(tree: Any, dtype: Any) -> Any:
    return {k: np.asarray(v, dtype) for k, v in tree.items()}


@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, wide: bool) -> None:
    """Each published sequence, step by step: updates, and thresholds where given."""
    case = DATA["cases"][name]
    exact = any(word in name for word in EXACT)
    rtol = (1e-12 if wide else 2e-6) if exact else 1e-5
    # One leaf of one case has a norm of 0.05, where 1e-6 is more than 1e-5 of it.
    atol = 0 if exact else 2e-8
    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        tx = call(name)
        assert tx is not None
        grads = [arrays(g, dtype) for g in DATA["sequences"][case["sequence"]]]
        updates, states = run(tx, grads)
        for got, want in zip(updates, case["expected"], strict=True):
            h.assert_same_types(got, grads[0])
            h.assert_close(got, arrays(want, np.float64), rtol=rtol, atol=atol)
    for state, aux in zip(states, case["aux"], strict=True):
        if aux.get("threshold") is not None:
            top = 1.0 if "maxnorm" in name else math.inf
            want = min(float(aux["threshold"]), top)
            assert float(state.threshold) == pytest.approx(want, rel=max(rtol, 1e-6))


def test_every_sequence_has_its_call() -> None:
    assert len(CASES) == 16 and all(call(name) for name in CASES)


# ------------------------------------------------------------------ oracles


def global_scales(
    norms: np.ndarray, limit: Callable[[list[float], float], float]
) -> np.ndarray:
    seen: list[float] = []
    out = []
    for n in map(float, norms):
        c = limit(seen, n)
        out.append(min(1.0, c / n) if n else 1.0)
        seen.append(n)
    return np.array(out)


def scales_of(updates: Sequence[Any], norms: np.ndarray) -> np.ndarray:
    got = np.array([h.tree_norm(u) for u in updates])
    return np.where(norms > 0, got / np.where(norms > 0, norms, 1), 1)


# What is left of a chain of float32 steps, and norms that are sums themselves.
RUN_RTOL = 32 * h.EPS32


@pytest.mark.parametrize("include_current", [True, False])
@pytest.mark.parametrize(
    ("percentile", "window", "max_norm"),
    [(0, 7, None), (37.5, 7, 3.0), (95, 1, None), (100, 7, None)],
)
def test_percentile_oracle(
    percentile: float, window: int, max_norm: float | None, include_current: bool
) -> None:
    """numpy's percentile of the last norms, far beyond one turn of the ring."""
    norms = norms_of(1, 45)

    def limit(seen: list[float], n: float) -> float:
        used = ([*seen, n] if include_current else seen)[-window:]
        found = np.percentile(used, percentile) if used else math.inf
        return min(found, math.inf if max_norm is None else max_norm)

    tx = oun.clip_by_global_norm_percentile(
        percentile, window=window, include_current=include_current, max_norm=max_norm
    )
    updates, states = run(tx, sequence(norms))
    want = global_scales(norms, limit)
    np.testing.assert_allclose(scales_of(updates, norms), want, rtol=RUN_RTOL)
    limits = [limit(list(norms[:i]), n) for i, n in enumerate(norms)]
    np.testing.assert_allclose(thresholds(states), limits, rtol=RUN_RTOL)


def zscore_limits(
    norms: np.ndarray, z_threshold: float, warmup: int, mode: str, observe: str
) -> list[float | None]:
    """The limit of each step as the paper writes it, None where only max_norm is."""
    limits: list[float | None] = [None] * warmup
    mean, var = np.mean(norms[:warmup]), np.var(norms[:warmup])
    for n in norms[warmup:]:
        z = (n - mean) / (math.sqrt(var) + 1e-6)
        spike, to = z > z_threshold, mean
        if mode == "adaptive":
            to = mean + z_threshold**2 * math.sqrt(var) / z
        limits.append(to if spike else None)
        x = to if spike and observe == "clipped" else n
        if not (spike and observe == "none"):
            mean = 0.9 * mean + 0.1 * x
            var = 0.9 * var + 0.1 * (x - mean) ** 2
    return limits


@pytest.mark.parametrize("observe", ["clipped", "raw", "none"])
@pytest.mark.parametrize(
    ("mode", "size"), [("adaptive", 1.0), ("adaptive", 1e30), ("mean", 1e-4)]
)
def test_zscore_oracle(mode: str, observe: str, size: float) -> None:
    """The published recursion; its variance would leave float32's range at 1e30."""
    norms = np.float64(np.float32(norms_of(8, 40) * size))
    limits = zscore_limits(norms, 1.5, 6, mode, observe)
    assert sum(limit is not None for limit in limits) > 2
    tx = oun.clip_by_global_norm_zscore(
        1.5, decay=0.9, warmup=6, max_norm=1.2 * size * 4, mode=mode, observe=observe
    )
    updates, states = run(tx, sequence(norms))
    cap = 1.2 * size * 4
    for i, (n, limit) in enumerate(zip(norms, limits, strict=True)):
        top = cap if limit is None else min(limit, cap)
        assert h.tree_norm(updates[i]) == pytest.approx(min(n, top), rel=1e-4), i
        if limit is not None:
            assert float(states[i].threshold) == pytest.approx(top, rel=1e-4)
        else:  # the norm from which on it would have been a spike
            assert min(n, cap) <= float(states[i].threshold) * (1 + 1e-6)
            assert float(states[i].threshold) <= cap * (1 + h.EPS32)


@pytest.mark.parametrize("floor", [0.0, 1.0])
@pytest.mark.parametrize("initial", ["min", "mean"])
def test_leaf_ema_oracle(initial: str, floor: float) -> None:
    """The published recursion, leaf by leaf."""
    grads = sequence(norms_of(3, 40))
    gamma: dict[str, float] = {}
    first: dict[str, list[float]] = {"b": [], "w": []}
    tx = oun.clip_by_leaf_norm_ema(
        1.1, decay=0.9, warmup=5, max_norm=3.0, floor=floor, initial=initial
    )
    updates, states = run(tx, grads)
    for i, (g, u) in enumerate(zip(grads, updates, strict=True)):
        own = {k: h.norm([x]) for k, x in g.items()}
        if i < 5:
            share = min(1.0, 3.0 / h.tree_norm(g))
            clipped = {k: n * share for k, n in own.items()}
        else:
            limits = {k: 1.1 * max(gamma[k], floor) for k in own}
            clipped = {k: min(n, limits[k]) for k, n in own.items()}
            np.testing.assert_allclose(
                states[i].threshold, [limits["b"], limits["w"]], rtol=RUN_RTOL
            )
        for k in own:
            assert h.norm([u[k]]) == pytest.approx(clipped[k], rel=RUN_RTOL)
            if i < 5:
                first[k].append(clipped[k])
                gamma[k] = min(first[k]) if initial == "min" else np.mean(first[k])
            else:
                gamma[k] = 0.9 * gamma[k] + 0.1 * clipped[k]


@pytest.mark.parametrize("observe", ["accepted", "raw"])
@pytest.mark.parametrize("losses", [False, True], ids=["norm", "norm and loss"])
def test_skip_oracle(observe: str, losses: bool) -> None:
    """Mean + sigmas * sample deviation of the last ones, for norms and losses."""
    norms, values = norms_of(37, 60), norms_of(38, 60) - 5
    windows: list[list[float]] = [[], []] if losses else [[]]
    tx = oun.skip_spikes(
        optax.identity(),
        skip_norm=60.0,
        sigmas=2.0,
        window=10,
        warmup=4,
        observe=observe,
    )
    state, skipped = tx.init(split(1.0)), 0
    update = jax.jit(tx.update)
    for i, (n, value) in enumerate(zip(norms, values, strict=True)):
        g = split(float(n), i)
        extra = {"value": value} if losses else {}
        u, state = update(g, state, None, **extra)
        skip = bool(n >= 60)
        for x, seen in zip((n, value), windows, strict=False):
            if len(seen) >= 4:
                skip |= x > np.mean(seen[-10:]) + 2.0 * np.std(seen[-10:], ddof=1)
        skipped += skip
        h.assert_close(u, jax.tree.map(lambda x, s=skip: x * (not s), g), 0, 0)
        assert (int(state.skipped), float(state.norm.grad_scale)) == (skipped, not skip)
        if observe == "raw" or not skip:
            for x, seen in zip((n, value), windows, strict=False):
                seen.append(float(x))
    assert 4 < skipped < 20


# ------------------------------------------------------- what a bad step leaves

BASE = np.float32([3, 3.5, 2.5, 3, 3.2, 2.8, 3.1, 2.9, 3.3, 2.7, 3, 3.1, 2.9, 3])


def without(states: Any, at: int) -> Any:
    return [s for i, s in enumerate(states) if i != at]


def memory_of(state: Any) -> Any:
    """All that later steps depend on."""
    return (state.memory, getattr(state, "inner", None))


@each_rule
@pytest.mark.parametrize(
    ("at", "bad"),
    [(0, math.nan), (6, math.inf)]
    + [
        pytest.param(*p, marks=pytest.mark.slow)
        for p in [(2, -math.inf), (11, math.nan)]
    ],
)
def test_one_nan_changes_nothing_after_it(name: str, at: int, bad: float) -> None:
    """Before, in and after the warm-up: the run goes on as if it had not been."""
    clean = sequence(BASE)
    spoilt = dict(clean[at], b=np.float32([1.0, bad]))
    tx = RULES[name]()
    updates, states = run(tx, clean)
    dirty, dirty_states = run(tx, [*clean[:at], spoilt, *clean[at:]])
    h.assert_same_bits(without(dirty, at), updates)
    for got, want in zip(without(dirty_states, at), states, strict=True):
        h.assert_same_bits(memory_of(got), memory_of(want))
        h.assert_same_bits(got.threshold, want.threshold)
    final = dirty_states[-1].norm
    assert (int(final.nonfinite), int(final.steps)) == (1, len(BASE) + 1)
    assert not np.any(np.isnan(dirty_states[at].threshold))
    if name == "skip":
        h.assert_close(dirty[at], jax.tree.map(np.zeros_like, clean[0]), 0, 0)
    else:
        assert np.isnan(dirty[at]["b"]).all()
        assert name == "leaf ema" or np.isnan(dirty[at]["w"]).all()


@each_rule
def test_norm_beyond_float32(name: str) -> None:
    """Finite gradients whose norm is not: as a NaN, and no history takes it in."""
    huge = {"b": np.full(2, 3e38, np.float32), "w": np.full((2, 2), 3e38, np.float32)}
    grads = sequence(BASE)
    tx = RULES[name]()
    _, states = run(tx, grads)
    _, spoilt = run(tx, [*grads[:7], huge, *grads[7:]])
    h.assert_same_bits(memory_of(spoilt[-1]), memory_of(states[-1]))
    assert int(spoilt[-1].norm.nonfinite) == 1


def test_leaf_ema_zeroes_the_bad_leaf_and_holds_the_others() -> None:
    """In the warm-up a bad step has no global norm: each leaf is held to max_norm."""
    grads = {"b": np.float32([math.nan, 1]), "w": np.full((2, 2), 100, np.float32)}
    tx = oun.clip_by_leaf_norm_ema(max_norm=5.0, nonfinite="zero")
    updates, _ = run(tx, [grads])
    h.assert_close(updates[0]["b"], np.zeros(2), 0, 0)
    h.assert_norm(jnp.float32(h.norm([updates[0]["w"]])), 5.0)


SPIKES = BASE.copy()
SPIKES[[5, 9]] *= 50


@each_rule
def test_two_spikes(name: str) -> None:
    """50x spikes at steps 5 and 9 come out near the usual size, or not at all."""
    updates, states = run(RULES[name](), sequence(SPIKES))
    sizes = np.array([h.tree_norm(u) for u in updates])
    usual, bad = np.delete(np.arange(len(BASE)), [5, 9]), [5, 9]
    if name == "skip":
        assert (sizes[bad] == 0).all() and (sizes[usual] > 0).all()
        assert (int(states[-1].skipped), int(states[-1].skipped_in_a_row)) == (2, 0)
    elif name == "percentile":  # at most two of five are spikes: the median is none
        assert (sizes[bad] <= 3.5).all() and (sizes[usual] >= 2.5).all()
    else:
        assert (sizes[bad] <= 4.5).all() and (sizes[usual] >= 1.5).all()
    assert int(states[-1].norm.clipped) >= 2


REGIME = np.concatenate([BASE, 3 * BASE, 3 * BASE])


def test_regime_change_percentile() -> None:
    """A window later the threshold is that of the new regime."""
    tx = oun.clip_by_global_norm_percentile(50, window=6, include_current=False)
    _, states = run(tx, sequence(REGIME))
    found = thresholds(states)
    assert found[14] <= 3.5  # the first large norm is held to the old ones
    assert (found[20:] >= 7.5).all()


def test_regime_change_zscore() -> None:
    """What is clipped to the mean teaches little; raw norms teach at once."""
    ends = {}
    for observe in ("clipped", "raw", "none"):
        tx = oun.clip_by_global_norm_zscore(
            decay=0.8, warmup=4, max_norm=math.inf, observe=observe
        )
        updates, _ = run(tx, sequence(REGIME))
        ends[observe] = h.tree_norm(updates[-1]) / REGIME[-1]
    assert ends["raw"] == 1
    assert ends["clipped"] < 0.75 and ends["none"] < 0.5


def test_regime_change_leaf_ema() -> None:
    """The threshold rises by a few per cent a step, and gets there."""
    tx = oun.clip_by_leaf_norm_ema(1.1, decay=0.5, warmup=4, max_norm=10.0)
    updates, _ = run(tx, [split(float(n)) for n in REGIME])
    sizes = np.array([h.tree_norm(u) for u in updates]) / REGIME
    assert sizes[14] < 0.5 and sizes[-1] > 0.9


@pytest.mark.parametrize(
    ("observe", "max_consecutive"), [("accepted", None), ("raw", None), ("accepted", 3)]
)
def test_regime_change_skip(observe: str, max_consecutive: int | None) -> None:
    """Accepted norms alone lock training out for good; the other two let it go on."""
    tx = oun.skip_spikes(
        optax.identity(),
        sigmas=4.0,
        window=8,
        observe=observe,
        max_consecutive=max_consecutive,
    )
    _, states = run(tx, sequence(REGIME))
    skipped = np.diff([0, *[int(s.skipped) for s in states]])
    assert not skipped[:14].any() and skipped[14]
    if observe == "accepted" and max_consecutive is None:
        assert skipped[14:].all()
        assert int(states[-1].skipped_in_a_row) == 28
    else:
        assert not skipped[20:].any()
    if max_consecutive:
        assert skipped[14:18].tolist() == [1, 1, 1, 0]
        assert int(states[17].skipped_in_a_row) == 0


@each_rule
def test_run_of_zeros(name: str) -> None:
    """Zeros in, zeros out, no NaN anywhere, in the warm-up and after it."""
    for norms in (
        [0.0] * 12,
        [*BASE[:6], 0, 0, 0, 0, 0, 0, *BASE[:3]],
        [0.0] * 6 + [1.0] * 3,
    ):
        updates, states = run(RULES[name](), sequence(norms))
        for n, u, s in zip(norms, updates, states, strict=True):
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(u))
            assert not np.any(np.isnan(s.threshold))
            for x in jax.tree.leaves(s.memory):
                assert not np.isnan(x).any()
            if n == 0 and name != "skip":  # adam moves on a zero too
                h.assert_close(u, jax.tree.map(np.zeros_like, u), 0, 0)


def test_zeros_stay_with_who_observes_what_it_clips() -> None:
    """After a warm-up of zeros only zeros pass, unless raw norms are observed."""
    sizes = {}
    for observe in ("clipped", "raw", "none"):
        tx = oun.clip_by_global_norm_zscore(warmup=4, decay=0.5, observe=observe)
        updates, _ = run(tx, sequence([0.0] * 4 + [1.0] * 12))
        sizes[observe] = h.tree_norm(updates[-1])
    assert sizes["raw"] == pytest.approx(1.0)
    assert sizes["clipped"] == sizes["none"] == 0


@pytest.mark.parametrize("base", [1.1, 3.3e-20, 0.7e25])
def test_equal_norms_are_no_spikes(base: float) -> None:
    """The mean of equal numbers is that number: none of them exceeds it."""
    leaf = np.full(1, base, np.float32)
    tx = oun.skip_spikes(optax.identity(), sigmas=3.0, window=7)
    _, states = run(tx, [leaf] * 30 + [leaf * np.float32(1 + 1e-6)])
    assert int(states[-2].skipped) == 0
    assert int(states[-1].skipped) == 1


FIRST = np.concatenate([BASE[:1] * 50, BASE[1:]])


@each_rule
def test_first_step_a_spike(name: str) -> None:
    """It is in every history, and what comes after it is finite and moves on."""
    updates, states = run(RULES[name](), sequence(FIRST))
    sizes = np.array([h.tree_norm(u) for u in updates])
    assert np.isfinite(sizes).all() and (sizes[1:] > 0).all()
    if name == "percentile":  # gone after a window
        assert thresholds(states)[0] == pytest.approx(150)
        assert thresholds(states)[-1] < 3.5
    elif name == "zscore":  # only the fixed cap holds, and it stays in the mean
        assert sizes[0] == pytest.approx(40, rel=1e-5)
        assert float(states[5].memory.mean) > 30
    elif name == "leaf ema":
        assert sizes[0] == pytest.approx(20, rel=1e-5)
    else:  # skipping is blind before its warm-up
        assert int(states[-1].skipped) == 0


@each_rule
def test_a_cap_is_not_blind_in_the_warm_up(name: str) -> None:
    """What the guide recommends: a fixed limit beside the learned one."""
    make: Make = {
        "percentile": lambda: oun.clip_by_global_norm_percentile(70, max_norm=5.0),
        "zscore": lambda: oun.clip_by_global_norm_zscore(max_norm=5.0),
        "leaf ema": lambda: oun.clip_by_leaf_norm_ema(max_norm=5.0),
        "skip": lambda: oun.skip_spikes(optax.identity(), skip_norm=5.0, sigmas=6.0),
    }[name]
    updates, _ = run(make(), sequence(FIRST))
    size = h.tree_norm(updates[0])
    assert size == 0 if name == "skip" else size == pytest.approx(5, rel=1e-6)


# ------------------------------------------------------------------ leaf EMA


def lora(steps: int) -> list[dict[str, np.ndarray]]:
    """LoRA at its start: A has no gradient while B is zero."""
    a = [0.0, *[0.05] * (steps - 1)]
    return [
        {"A": np.float32([[0.6 * n, 0.8 * n]]), "B": np.float32([0.3, 0.4])} for n in a
    ]


@pytest.mark.parametrize("initial", ["min", "mean"])
def test_a_leaf_that_starts_at_zero(initial: str) -> None:
    """Without a floor it is frozen for ever; with one it comes back."""
    sizes = {}
    for floor in (0.0, 1e-3):
        tx = oun.clip_by_leaf_norm_ema(
            decay=0.5, warmup=1, floor=floor, initial=initial
        )
        updates, states = run(tx, lora(30))
        sizes[floor] = [h.norm([u["A"]]) for u in updates]
        if floor == 0:
            h.assert_same_bits(states[-1].memory.gamma[0], jnp.float32(0))
    assert sizes[0.0] == [0.0] * 30
    assert sizes[1e-3][1] == pytest.approx(1.05e-3)
    assert sizes[1e-3][-1] > 1.3e-3


def test_stacked_axis() -> None:
    """Each slice has a gamma of its own, as leaves would have."""
    leaves = [split(float(n), i) for i, n in enumerate(norms_of(6, 20))]
    stacked = [{"s": np.stack([g["w"], 3 * g["w"]], axis=1)} for g in leaves]
    apart = [{"s0": g["w"], "s1": 3 * g["w"]} for g in leaves]
    options = {"warmup": 4, "max_norm": 5.0}
    one, states = run(oun.clip_by_leaf_norm_ema(stacked_axis=1, **options), stacked)
    two, states_apart = run(oun.clip_by_leaf_norm_ema(**options), apart)
    for u, v in zip(one, two, strict=True):
        h.assert_close(u["s"], np.stack([v["s0"], v["s1"]], axis=1), RUN_RTOL)
    near(states, states_apart)


def test_state_of_other_leaves() -> None:
    tx = oun.clip_by_leaf_norm_ema()
    state = tx.init(split(1.0))
    with pytest.raises(ValueError, match=r"`state` must .*; got a state of 2 and .* 1"):
        tx.update({"w": np.ones(2, np.float32)}, state)


# ------------------------------------------------------------------ skipping


def test_skipped_step_leaves_everything() -> None:
    """Zeros for updates, and of a whole optimizer's state not a bit has moved."""
    inner = optax.chain(
        oun.clip_by_global_norm(1.0),
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        optax.adamw(0.1),
    )
    tx = oun.skip_spikes(inner, skip_norm=10.0)
    params = jax.tree.map(jnp.asarray, split(1.0))
    for update in (tx.update, jax.jit(tx.update)):
        state = tx.init(params)
        _, before = update(split(2.0), state, params)
        for bad in (split(20.0), split(math.nan), split(10.0000001)):
            updates, after = update(bad, before, params)
            h.assert_same_bits(updates, jax.tree.map(np.zeros_like, bad))
            h.assert_same_bits(after.inner, before.inner)
        moved, again = update(split(3.0), before, params)
        assert h.tree_norm(moved) > 0
        want, inner_after = jax.jit(inner.update)(split(3.0), before.inner, params)
        h.assert_close(moved, want)
        h.assert_close(again.inner[2], inner_after[2])


def test_counts() -> None:
    """All, in a row, and in the record: only spikes count as clipped."""
    tx = oun.skip_spikes(optax.identity(), skip_norm=5.0)
    _, states = run(tx, sequence([1, 9, math.nan, 9, 1, 9, 2]))
    assert [int(s.skipped) for s in states] == [0, 1, 2, 3, 3, 4, 4]
    assert [int(s.skipped_in_a_row) for s in states] == [0, 1, 2, 3, 0, 1, 0]
    assert [int(s.norm.clipped) for s in states] == [0, 1, 1, 2, 2, 3, 3]
    assert [int(s.norm.nonfinite) for s in states] == [0, 0, 1, 1, 1, 1, 1]
    assert [float(s.norm.grad_scale) for s in states] == [1, 0, 0, 0, 1, 0, 1]


def test_max_consecutive() -> None:
    """After so many skipped finite steps one passes; a NaN never does."""
    tx = oun.skip_spikes(optax.identity(), skip_norm=5.0, max_consecutive=2)
    norms = [9, 9, 9, 9, math.nan, 9, math.nan, 9, 9, 9, 1, 9]
    _, states = run(tx, sequence(norms))
    skipped = np.diff([0, *[int(s.skipped) for s in states]]).tolist()
    assert skipped == [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1]


def test_value() -> None:
    """A loss that is a spike or not finite skips; skip_norm is not for losses."""
    tx = oun.skip_spikes(optax.identity(), skip_norm=50.0, sigmas=3.0, window=4)
    update, state = jax.jit(tx.update), tx.init(split(1.0))
    seen = []
    for value in (100, 101, 100, 99, math.nan, 100, -math.inf, 150, 100, 90, math.inf):
        _, state = update(split(1.0), state, None, value=np.float32(value))
        seen.append(int(state.skipped_in_a_row) > 0)
    assert seen == [v in (4, 6, 7, 10) for v in range(11)]
    assert int(state.norm.clipped) == 4  # finite norms that were skipped
    _, after = update(split(1.0), state, None)
    h.assert_same_bits(after.memory.losses, state.memory.losses)
    with pytest.raises(ValueError, match=r"`value` must be a scalar; got shape \(2,\)"):
        tx.update(split(1.0), state, None, value=jnp.ones(2))


def test_extra_arguments_reach_the_inner_transform() -> None:
    """The loss too, and what only it knows; a plain inner transform is fine."""
    got: dict[str, Any] = {}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        got.update(extra, params=params)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = oun.skip_spikes(spy)
    g = split(1.0)
    tx.update(g, tx.init(g), g, value=1.0, sharded_over=None, other="x")
    assert got == {"value": 1.0, "sharded_over": None, "other": "x", "params": g}
    got.clear()
    tx.update(g, tx.init(g))
    assert got == {"params": None}
    line = oun.skip_spikes(
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    )

    def loss(p: Any) -> Any:
        return optax.tree.norm(p, squared=True)

    p = jax.tree.map(jnp.asarray, g)
    value, grad = jax.value_and_grad(loss)(p)
    extra = {"value": value, "grad": grad, "value_fn": loss}
    moved, _ = line.update(grad, line.init(p), p, **extra)
    assert loss(optax.apply_updates(p, moved)) < value


def test_inner_that_changes_types() -> None:
    """Updates of another dtype are zeros of it; other structures are refused."""
    wide = optax.stateless(
        lambda g, _: jax.tree.map(lambda x: x.astype(jnp.float32), g)
    )
    g = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = oun.skip_spikes(wide, skip_norm=1.0)
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(g, tx.init(g))
        h.assert_same_bits(updates, {"w": jnp.zeros(3, jnp.float32)})
    lists = oun.skip_spikes(optax.stateless(lambda g, _: jax.tree.leaves(g)))
    with pytest.raises(ValueError, match=r"`inner` must return updates of the struct"):
        lists.update(g, lists.init(g))
    grows = optax.GradientTransformation(
        lambda _: (), lambda g, s, p=None: (g, (jnp.ones(1), *s))
    )
    tx = oun.skip_spikes(grows, skip_norm=1.0)
    with pytest.raises(ValueError, match=r"`inner` must keep the structure"):
        jax.jit(tx.update)(g, tx.init(g))


def test_leaves_that_do_not_count_when_skipped() -> None:
    """They stay as they are, as everywhere."""
    g = {"w": jnp.ones(2), "n": 7, "k": jax.random.key(0), "none": None}
    tx = oun.skip_spikes(optax.identity(), skip_norm=1.0)
    updates, _ = tx.update(g, tx.init(g))
    assert updates["n"] == 7 and updates["none"] is None
    h.assert_same_bits(updates["k"], g["k"])
    h.assert_same_bits(updates["w"], jnp.zeros(2))


def test_inner_is_traced_once() -> None:
    traces = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        traces.append(1)
        return updates, state

    counted = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    tx = oun.skip_spikes(counted, skip_norm=5.0)
    run(tx._replace(update=jax.jit(tx.update)), sequence([1, 9, 1]))
    assert len(traces) == 1


WEIGHTS = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(8)}


def compiled_step(wrap: Callable[[Any], Any], donate: bool) -> Any:
    tx = wrap(optax.adam(1e-3))
    state = jax.eval_shape(tx.init, WEIGHTS)
    step = jax.jit(tx.update, donate_argnums=(0, 1) if donate else ())
    return step.lower(WEIGHTS, state, WEIGHTS).compile()


@pytest.mark.parametrize("donate", [False, True])
def test_memory_of_a_wrapped_optimizer(donate: bool) -> None:
    """Around an optimizer without collectives: apply_if_finite's memory."""
    ours = compiled_step(lambda tx: oun.skip_spikes(tx, sigmas=6.0), donate)
    theirs = compiled_step(lambda tx: optax.apply_if_finite(tx, 5), donate)
    size = [c.memory_analysis().temp_size_in_bytes for c in (ours, theirs)]
    assert size[0] <= size[1] + 4096 + 128 * len(WEIGHTS), size


def test_a_branch_where_nothing_is_sent() -> None:
    tx = oun.skip_spikes(optax.adam(0.1))
    g = split(1.0)
    jaxpr = jax.make_jaxpr(tx.update)(g, tx.init(g), g)
    branches = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert len(branches) == 1


# ------------------------------------------------------------------ devices

MESH_SPECS = {"b": P("i"), "w": P(None, "i")}


def stacked_grads() -> dict[str, jax.Array]:
    """Gradients of 12 steps for 8 devices: whole, the second axis is split."""
    norms = [*BASE[:5], 200.0, *BASE[5:9], math.nan, 3.0]
    rng = np.random.default_rng(0)
    b, w = rng.normal(size=(12, 16)), rng.normal(size=(12, 3, 8))
    size = np.sqrt((b**2).sum(1) + (w**2).sum((1, 2)))
    b, w = b / size[:, None], w / size[:, None, None]
    scale = np.where(np.isnan(norms), 1.0, norms)
    b, w = b * scale[:, None], w * scale[:, None, None]
    b[10, 5] = math.nan  # in the piece of one device
    b[5, :2] = 190.0  # and a spike in that of another
    return {"b": jnp.float32(b), "w": jnp.float32(w)}


def scanned(tx: optax.GradientTransformationExtraArgs, **extra: Any) -> Any:
    def whole_run(grads: Any) -> Any:
        def step(state: Any, g: Any) -> Any:
            updates, state = tx.update(g, state, g, **extra)
            return state, updates

        return lax.scan(step, tx.init(jax.tree.map(lambda x: x[0], grads)), grads)

    return whole_run


@functools.cache
def single(name: str) -> Any:
    return jax.jit(
        scanned(RULES[name](nonfinite="zero") if name != "skip" else RULES[name]())
    )(stacked_grads())


def on_mesh(name: str, check_vma: bool) -> Any:
    options: dict[str, Any] = {} if name == "skip" else {"nonfinite": "zero"}
    if not check_vma:
        options["sharded_over"] = "i"
    specs = {k: P(None, *s) for k, s in MESH_SPECS.items()}
    state = jax.eval_shape(RULES[name](**options).init, split(1.0))
    out = jax.tree.map(lambda _: P(), state)
    if name == "skip":
        adam, *rest = out.inner
        adam = adam._replace(mu=MESH_SPECS, nu=MESH_SPECS)
        out = out._replace(inner=(adam, *rest))
    return d.smap(
        scanned(RULES[name](**options)),
        d.mesh((8,), ("i",)),
        (specs,),
        (out, specs),
        check_vma=check_vma,
    )


def test_the_devices_would_disagree() -> None:
    """Each by itself would see a spike or a NaN that the others do not see."""
    b = np.asarray(stacked_grads()["b"]).reshape(12, 8, 2)
    own = np.linalg.norm(b, axis=2)
    assert (own[5] > 100).sum() == 1 and np.isnan(own[10]).sum() == 1


@two_rules_first
@pytest.mark.parametrize("check_vma", [True, False])
def test_two_devices_that_would_disagree(name: str, check_vma: bool) -> None:
    """Every device keeps the same history, and all take the step or none."""
    state, updates = on_mesh(name, check_vma)(stacked_grads())
    want_state, want = single(name)
    near(updates, want, 64 * h.EPS32)
    near(state, want_state, 64 * h.EPS32)
    shared = state._replace(inner=None) if name == "skip" else state
    d.assert_same_everywhere(shared)
    assert not np.isnan(np.asarray(updates["b"])).any()


@two_rules_first
def test_pmap(name: str) -> None:
    """As under shard_map: what is said in the step reaches the inner transform too."""
    grads = stacked_grads()
    parts = {
        "b": np.moveaxis(np.asarray(grads["b"]).reshape(12, 8, 2), 1, 0),
        "w": np.moveaxis(np.asarray(grads["w"]).reshape(12, 3, 8, 1), 2, 0),
    }
    tx = RULES[name](**({} if name == "skip" else {"nonfinite": "zero"}))
    run_all = jax.pmap(scanned(tx, sharded_over="i"), axis_name="i")
    state, updates = run_all(parts)
    _, want = single(name)
    got = np.moveaxis(np.asarray(updates["b"]), 0, 1).reshape(12, 16)
    near(got, want["b"], 64 * h.EPS32)
    for x in jax.tree.leaves(state._replace(inner=None) if name == "skip" else state):
        for other in np.asarray(x):
            assert other.tobytes() == np.asarray(x)[0].tobytes()
    assert oun.metrics(state)["nonfinite_steps"] == 1


@two_rules_first
def test_local_gradients(name: str) -> None:
    """Not averaged, and said so: each device its own norm, and one history."""

    def body(g: Any) -> Any:
        tx = RULES[name](sharded_over=None)
        state = tx.init(jax.tree.map(lambda x: x[0], g))
        updates, states = [], []
        for n in (1.0, 2.0, 1.5):
            u, state = tx.update(jax.tree.map(lambda x, n=n: x[0] * n, g), state)
            updates.append(u)
            states.append((state.norm, state.memory))
        return jax.tree.map(lambda x: x[None], updates), states[-1]

    step = d.smap(body, d.mesh((8,), ("i",)), (P("i"),), (P("i"), P()))
    grads = {"w": jnp.arange(1.0, 17.0).reshape(8, 2)}
    _, (norm, memory) = step(grads)
    d.assert_same_everywhere((norm, memory))
    h.assert_norm(norm.grad_norm, 1.5 * h.norm([np.asarray(grads["w"])[-1]]))


def programs(name: str) -> Iterator[tuple[str, Any, int]]:
    """Traced updates in mapped regions, and how many collectives each needs."""
    specs, mesh = MESH_SPECS, d.mesh((8,), ("i",))
    g = {"b": jnp.ones(16), "w": jnp.ones((3, 8))}
    for check_vma in (True, False):
        options = {} if check_vma else {"sharded_over": "i"}
        inner = {
            "clip": oun.clip_by_global_norm(1.0, **options),
            "adam": optax.adam(1.0),
        }
        kinds: dict[str, Any] = {name: RULES[name](**options)}
        if name == "skip":
            kinds |= {
                k: oun.skip_spikes(v, sigmas=3.0, **options) for k, v in inner.items()
            }
        for kind, tx in kinds.items():
            body = functools.partial(one_step, tx)
            mapped = jax.shard_map(
                body, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma
            )
            jaxpr = jax.make_jaxpr(mapped)(g)
            yield f"{kind} {check_vma}", jaxpr, 2 if kind == "clip" else 1


def one_step(tx: optax.GradientTransformationExtraArgs, g: Any) -> Any:
    return tx.update(g, tx.init(g), g)[0]


@each_rule
def test_one_collective_and_none_in_a_branch(name: str) -> None:
    """Around a transform with a collective of its own both are made, and selected."""
    for kind, jaxpr, count in programs(name):
        found = list(d.collectives(jaxpr.jaxpr))
        assert len(found) == count, (kind, found)
        for _, inside in found:
            assert not set(inside) & set(d.BRANCHES), (kind, inside)
        if "adam" in kind:
            assert "cond" in set(h.primitives(jaxpr.jaxpr))


def test_a_local_loss_costs_one_more_collective() -> None:
    """Where types show that it differs, the largest decides on all devices."""
    tx = oun.skip_spikes(optax.identity(), sigmas=3.0, window=4, warmup=2)

    def body(g: Any, losses: jax.Array) -> Any:
        state = tx.init(g)
        for i in range(6):
            _, state = tx.update(g, state, value=losses[i, 0])
        return state.skipped

    losses = jnp.ones((6, 8)).at[4, 3].set(50.0).at[5, 2].set(-jnp.inf)
    mapped = d.smap(body, d.mesh((8,), ("i",)), ({"b": P("i")}, P(None, "i")), P())
    skipped = mapped({"b": jnp.ones(16)}, losses)
    assert int(skipped) == 2
    d.assert_same_everywhere(skipped)


def test_a_nan_on_one_device_does_not_hang() -> None:
    """The wrapper around a collective is where optax.apply_if_finite would wait."""
    tx = oun.skip_spikes(
        optax.chain(oun.clip_by_global_norm(1.0, sharded_over="i"), optax.sgd(1.0)),
        sharded_over="i",
    )

    def body(g: Any) -> Any:
        return tx.update(g, tx.init(g))[0]

    step = d.smap(body, d.mesh((8,), ("i",)), (P("i"),), P("i"), check_vma=False)
    h.assert_same_bits(step(jnp.ones(16).at[3].set(jnp.nan)), jnp.zeros(16))
    assert h.tree_norm(step(jnp.ones(16))) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["leaf ema", "skip"])
def test_jit_over_a_mesh(name: str, kind: AxisType) -> None:
    """Sharded arrays under jit, with and without explicit axes."""
    options: dict[str, Any] = {} if name == "skip" else {"nonfinite": "zero"}
    tx = RULES[name](**options)
    mesh = d.mesh((8,), ("i",), kind)
    grads = d.put(
        stacked_grads(), mesh, {k: P(None, *s) for k, s in MESH_SPECS.items()}
    )
    with jax.set_mesh(mesh):
        first = jax.jit(lambda g: jax.tree.map(lambda x: x[0], g))(grads)
        state = tx.init(first)
        update = jax.jit(tx.update)
        for i in range(12):
            g = jax.jit(lambda g, i=i: jax.tree.map(lambda x: x[i], g))(grads)
            updates, state = update(g, state, g)
    want_state, want = single(name)
    near(updates, jax.tree.map(lambda x: x[-1], want), 64 * h.EPS32)
    near(state, want_state, 64 * h.EPS32)


def test_slices_of_a_split_leaf() -> None:
    """A gamma for each slice of the whole leaf, wherever the slices lie."""
    specs = {"s": P("i", None)}
    tx = oun.clip_by_leaf_norm_ema(
        warmup=2, max_norm=3.0, stacked_axis=0, sharded_over=specs
    )
    grads = {"s": h.draw(3, (6, 16, 4))}
    state, updates = d.smap(
        scanned(tx),
        d.mesh((8,), ("i",)),
        ({"s": P(None, "i")},),
        (P(), {"s": P(None, "i")}),
    )(grads)
    want_state, want = jax.jit(scanned(tx))(grads)
    assert state.memory.gamma.shape == (16,)
    near(updates, want)
    near(state, want_state)
    outside = tx.init({"s": grads["s"][0]})
    h.assert_same_types(outside, state)


# ---------------------------------------------------------------- transformations


@each_rule
def test_scan_equals_a_loop(name: str) -> None:
    """The same run, whether the loop is Python's or the compiler's, traced or not."""
    grads = sequence(SPIKES)
    tx, _, looped, states = traced(name)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    state, updates = jax.jit(scanned(tx))(stacked)
    one_by_one = [jax.tree.map(lambda x, i=i: x[i], updates) for i in range(len(grads))]
    near((one_by_one, state), (looped, states[-1]), 8 * h.EPS32)
    assert int(state.norm.steps) == len(grads)
    eager, states = run(tx, grads)
    near((eager, states[-1]), (looped, state), 8 * h.EPS32)


@two_rules_first
def test_vmap(name: str) -> None:
    """Each member of an ensemble has a history of its own."""
    tx = RULES[name]()
    runs = [sequence(BASE), sequence(SPIKES), sequence(2 * REGIME[7:21])]
    stacked = [
        jax.tree.map(lambda *x: jnp.stack(x), *step) for step in zip(*runs, strict=True)
    ]
    states = jax.vmap(tx.init)(stacked[0])
    update = jax.jit(jax.vmap(tx.update, axis_name="members"))
    for g in stacked:
        updates, states = update(g, states, g)
    for i, grads in enumerate(runs):
        want, alone = run(tx, grads)
        got = jax.tree.map(lambda x, i=i: x[i], (updates, states))
        near(got, (want[-1], alone[-1]), 16 * h.EPS32)


@each_rule
def test_donated(name: str) -> None:
    """Every field has a buffer of its own, and none is copied in vain."""
    grads = sequence(SPIKES)
    tx, _, want, states = traced(name)
    state = tx.init(jax.tree.map(jnp.asarray, grads[0]))
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers)
    step = jax.jit(tx.update, donate_argnums=(0, 1))
    for g in grads:
        updates, state = step(jax.tree.map(jnp.asarray, g), state)
    near((updates, state), (want[-1], states[-1]), 8 * h.EPS32)


@each_rule
def test_state_is_of_a_fixed_size(name: str) -> None:
    """Scalars and vectors of float32 and int32, the same types after any step."""
    tx, _, _, states = traced(name)
    first = tx.init(split(1.0))
    h.assert_same_types(states[-1], first)
    for x in jax.tree.leaves((first.memory, first.threshold)):
        assert x.ndim <= 1 and x.dtype in (jnp.float32, jnp.int32) and not x.weak_type


@two_rules_first
def test_float64(name: str) -> None:
    """Memory is as wide as a parameter was at init, whatever the gradients are."""
    mode = "standard" if name == "skip" else "strict"  # adam needs the first
    with jax.enable_x64(True), jax.numpy_dtype_promotion(mode):
        tx = RULES[name]()
        narrow, wide = split(3.0), split(3.0, dtype=np.float64)
        for held, given in ((wide, narrow), (narrow, wide)):
            state = tx.init(held)
            _, after = jax.jit(tx.update)(given, state)
            memory = (after.memory, after.threshold, after.norm.grad_norm)
            h.assert_same_types(
                memory, (state.memory, state.threshold, state.norm.grad_norm)
            )
            dtypes = {x.dtype for x in jax.tree.leaves(memory)}
            assert dtypes == {np.dtype(np.int32), held["w"].dtype}


def test_strict_promotion_around_a_skip() -> None:
    with jax.numpy_dtype_promotion("strict"):
        tx = oun.skip_spikes(optax.identity(), sigmas=3.0)
        g = jax.tree.map(lambda x: x.astype(jnp.bfloat16), split(1.0))
        jax.jit(tx.update)(g, tx.init(g), value=jnp.bfloat16(1.0))


@pytest.mark.parametrize(
    "tx",
    [
        oun.clip_by_global_norm_percentile(50, include_current=False),
        oun.clip_by_global_norm_percentile(20),
        oun.clip_by_global_norm_zscore(1.0, warmup=2, max_norm=math.inf),
    ],
    ids=["percentile", "percentile of the current", "zscore"],
)
def test_derivative_of_a_learned_threshold(tx: Any) -> None:
    """A constant: c / n (I - u u^T) where it binds, as for a fixed one."""
    _, states = run(tx, sequence([1, 1.2, 0.9]))
    g = jax.tree.map(jnp.asarray, split(5.0, 9))
    _, after = tx.update(g, states[-1])
    fixed = oun.clip_by_global_norm(after.threshold)
    got = jax.jacrev(lambda g: tx.update(g, states[-1])[0])(g)
    want = jax.jacrev(lambda g: fixed.update(g, None)[0])(g)
    assert float(after.norm.grad_scale) < 1
    h.assert_close(got, want, rtol=h.DERIVATIVE_RTOL, atol=h.DERIVATIVE_RTOL)


@each_rule
def test_derivative_through_a_run(name: str) -> None:
    """Finite in both modes, zeros and all: no square root of nothing."""
    grads = jax.tree.map(lambda *x: jnp.stack(x), *sequence([0.0] * 5 + [1, 2, 1]))
    make = (
        RULES[name]
        if name != "skip"
        else lambda: oun.skip_spikes(optax.sgd(1.0), sigmas=4.0)
    )

    def total(grads: Any) -> Any:
        return optax.tree.norm(scanned(make())(grads)[1], squared=True)

    slopes = jax.jit(jax.grad(total))(grads)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))


def test_derivative_in_the_warm_up_of_the_leaf_ema() -> None:
    """That of the global clip, which it then is."""
    g = jax.tree.map(jnp.asarray, split(7.0))
    tx, fixed = oun.clip_by_leaf_norm_ema(max_norm=2.0), oun.clip_by_global_norm(2.0)
    got = jax.jacfwd(lambda g: tx.update(g, tx.init(g))[0])(g)
    want = jax.jacfwd(lambda g: fixed.update(g, None)[0])(g)
    h.assert_close(got, want, rtol=h.DERIVATIVE_RTOL, atol=h.DERIVATIVE_RTOL)


# ------------------------------------------------------------------ options

MASK = {"b": False, "w": True}


@each_rule
def test_mask(name: str) -> None:
    """What is masked is not counted; it passes, unless a whole step is skipped."""
    loud = [dict(g, b=np.float32([1e6, math.nan])) for g in sequence(SPIKES)]
    quiet = [{"w": g["w"]} for g in sequence(SPIKES)]
    # adam turns a NaN that it is given into NaN for good: not what is shown here.
    make = (
        RULES[name]
        if name != "skip"
        else lambda **o: oun.skip_spikes(
            optax.identity(), sigmas=4.0, window=8, warmup=4, **o
        )
    )
    updates, states = run(make(mask=MASK), loud)
    want, states_quiet = run(make(), quiet)
    near([{"w": u["w"]} for u in updates], want)
    near(states[-1], states_quiet[-1])
    for u, g in zip(updates, loud, strict=True):
        if name != "skip" or h.tree_norm({"w": u["w"]}) > 0:
            h.assert_same_bits(u["b"], jnp.asarray(g["b"]))


def test_groups() -> None:
    """A history for each group, by optax.partition."""
    labels = {"b": "slow", "w": "fast"}
    tx = optax.partition(
        {
            "slow": oun.clip_by_global_norm_percentile(50, window=4),
            "fast": oun.clip_by_global_norm_percentile(90, window=4),
        },
        labels,
    )
    updates, states = run(tx, sequence(SPIKES))
    for key, percentile in (("b", 50), ("w", 90)):
        alone = oun.clip_by_global_norm_percentile(percentile, window=4)
        want, _ = run(alone, [{key: g[key]} for g in sequence(SPIKES)])
        near([{key: u[key]} for u in updates], want)
    found = oun.metrics(states[-1])
    assert sum(k.endswith("grad_threshold") for k in found) == 2


@pytest.mark.parametrize("ord", [1, 3, math.inf])
@each_rule
def test_orders(name: str, ord: float) -> None:
    """The memory is of whatever norm is measured."""
    _, states = run(RULES[name](ord=ord), sequence(BASE[:3]))
    h.assert_norm(states[-1].norm.grad_norm, h.tree_norm(sequence(BASE[:3])[-1], ord))


def test_recipes_take_any_order() -> None:
    updates, _ = run(
        oun.clip_by_global_norm_percentile(0, window=9, ord=1), sequence([1, 5, 5])
    )
    norms = [h.tree_norm(u, 1) for u in updates]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


SCHEDULED: list[tuple[Make, dict[str, Any], str, float]] = [
    (oun.clip_by_global_norm_percentile, {}, "percentile", 80.0),
    (oun.clip_by_global_norm_percentile, {"percentile": 50}, "max_norm", 2.0),
    (
        oun.clip_by_global_norm_zscore,
        {"warmup": 4, "max_norm": math.inf},
        "z_threshold",
        0.5,
    ),
    (oun.clip_by_global_norm_zscore, {"warmup": 2}, "max_norm", 2.0),
    (oun.clip_by_leaf_norm_ema, {"warmup": 2}, "ratio", 0.7),
    (oun.clip_by_leaf_norm_ema, {"warmup": 9}, "max_norm", 2.0),
    (oun.clip_by_leaf_norm_ema, {"warmup": 2}, "floor", 1.5),
    (oun.skip_spikes, {"inner": optax.identity()}, "skip_norm", 3.05),
    (oun.skip_spikes, {"inner": optax.identity(), "window": 4}, "sigmas", 0.5),
]


@pytest.mark.parametrize(
    ("make", "args", "name", "value"),
    SCHEDULED,
    ids=[f"{make.__name__}-{name}" for make, _, name, _ in SCHEDULED],
)
def test_schedules(make: Make, args: dict[str, Any], name: str, value: float) -> None:
    """Every threshold may be one: constant it changes nothing, and it is followed."""
    make = functools.partial(make, **args)
    grads = sequence(BASE[:10])
    fixed, _ = run(make(**{name: value}), grads)
    same, _ = run(make(**{name: lambda _: value}), grads)
    h.assert_same_bits(same, fixed)
    loose = {"percentile": 100.0, "floor": 0.0}.get(name, 100.0)
    jumps, _ = run(make(**{name: lambda n: jnp.where(n == 8, loose, value)}), grads)
    h.assert_same_bits(jumps[:8], fixed[:8])
    assert any(
        h.tree_norm(a) != h.tree_norm(b) for a, b in zip(jumps, fixed, strict=True)
    )


STATIC = {
    "window": (oun.clip_by_global_norm_percentile, {"percentile": 50.0}),
    "include_current": (oun.clip_by_global_norm_percentile, {"percentile": 50.0}),
    "warmup": (oun.clip_by_global_norm_zscore, {}),
    "mode": (oun.clip_by_global_norm_zscore, {}),
    "observe": (oun.clip_by_global_norm_zscore, {}),
    "initial": (oun.clip_by_leaf_norm_ema, {}),
    "max_consecutive": (oun.skip_spikes, {"inner": optax.identity()}),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_arguments(name: str) -> None:
    """A traced one is an error that says what to do."""
    make, args = STATIC[name]

    def build(x: Any) -> Any:
        inspect.unwrap(make)(**args, **{name: x})
        return x

    with pytest.raises(TypeError, match=rf"`{name}` must .*static_args"):
        jax.jit(build)(1)


@pytest.mark.parametrize(
    ("make", "static"),
    [
        (oun.clip_by_global_norm_percentile, ["window"]),
        (oun.clip_by_global_norm_zscore, ["warmup"]),
        (oun.clip_by_leaf_norm_ema, ["warmup"]),
        (oun.skip_spikes, ["window", "inner"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_inject_hyperparams(make: Make, static: list[str]) -> None:
    """Without static_args an error that names them; with them as if not injected."""
    make = inspect.unwrap(make)  # the types of these tests would refuse it first
    args = {"percentile": 20.0} if "percentile" in make.__name__ else {}
    args |= (
        {"inner": optax.identity(), "sigmas": 3.0} if "skip" in make.__name__ else {}
    )
    g = split(1.0)
    with pytest.raises(TypeError, match="static_args"):
        optax.inject_hyperparams(make)(**args).init(g)
    injected = optax.inject_hyperparams(make, static_args=static)(**args)
    updates, _ = run(injected, sequence(SPIKES))
    near(updates, run(make(**args), sequence(SPIKES))[0])


REFUSED: list[tuple[Make, dict[str, Any]]] = [
    *[
        (oun.clip_by_global_norm_percentile, {"percentile": v})
        for v in (-1, 101, math.nan)
    ],
    *[
        (oun.clip_by_global_norm_percentile, {"window": v, "percentile": 5})
        for v in (0, 2.5, True)
    ],
    (oun.clip_by_global_norm_percentile, {"max_norm": -1.0, "percentile": 5}),
    *[
        (oun.clip_by_global_norm_zscore, {"z_threshold": v})
        for v in (-1, math.nan, "x")
    ],
    *[(oun.clip_by_global_norm_zscore, {"decay": v}) for v in (-0.1, 1.1, "x")],
    *[(oun.clip_by_global_norm_zscore, {"max_norm": v}) for v in (-1, None)],
    *[
        (oun.clip_by_leaf_norm_ema, {k: -1})
        for k in ("ratio", "decay", "max_norm", "floor")
    ],
    (oun.clip_by_leaf_norm_ema, {"decay": 2.0}),
    *[
        (oun.skip_spikes, {k: -1, "inner": optax.identity()})
        for k in ("skip_norm", "sigmas")
    ],
    (oun.skip_spikes, {"window": 1, "inner": optax.identity()}),
    (oun.skip_spikes, {"warmup": 1, "inner": optax.identity()}),
    (oun.skip_spikes, {"warmup": 9, "window": 8, "inner": optax.identity()}),
    (oun.skip_spikes, {"max_consecutive": 0, "inner": optax.identity()}),
]


@pytest.mark.parametrize(
    ("make", "args"),
    REFUSED,
    # Without the wrapped transform, whose name holds an address.
    ids=[
        f"{m.__name__}-{ {k: v for k, v in a.items() if k != 'inner'} }"
        for m, a in REFUSED
    ],
)
def test_refused_arguments(make: Make, args: dict[str, Any]) -> None:
    """In the one sentence shape, when the transform is built."""
    name = next(iter(args))
    with pytest.raises((ValueError, TypeError), match=rf"`{name}` must .+; got .+\."):
        inspect.unwrap(make)(**args)


# `static` words and counts that types refuse before the sentence could, in tests.
@pytest.mark.parametrize(
    "name", ["clip_by_global_norm_zscore", "clip_by_leaf_norm_ema"]
)
def test_refused_warmup(name: str) -> None:
    with pytest.raises(ValueError, match=r"`warmup` must be >= 1; got 0\."):
        getattr(oun, name)(warmup=0)


@each_rule
def test_foreign_state(name: str) -> None:
    """A rule that remembers cannot do without its memory."""
    g = split(1.0)
    for foreign in (None, optax.EmptyState(), oun.clip_by_global_norm(1.0).init(g)):
        with pytest.raises(ValueError, match=r"`state` must be the state of this"):
            RULES[name]().update(g, foreign, g)


# --------------------------------------------------------- telemetry, checkpoints


def test_metrics() -> None:
    """The threshold in force: a scalar, a vector in leaf order, the outermost's."""
    grads = sequence(SPIKES)
    for name, shape in (
        ("percentile", ()),
        ("zscore", ()),
        ("leaf ema", (2,)),
        ("skip", ()),
    ):
        _, states = run(optax.chain(RULES[name](), optax.scale(1.0)), grads)
        found = oun.metrics(states[-1])
        assert set(found) == {
            "grad_norm",
            "grad_scale",
            "clipped_fraction",
            "nonfinite_steps",
            "grad_threshold",
        }
        assert found["grad_threshold"].shape == shape
        h.assert_same_bits(found["grad_threshold"], states[-1][0].threshold)
    nested = oun.skip_spikes(oun.clip_by_global_norm_zscore(), skip_norm=77.0)
    _, states = run(nested, grads)
    assert float(oun.metrics(states[-1])["grad_threshold"]) == 77.0
    assert int(oun.metrics(states[-1])["clipped_fraction"] * len(grads)) == 2


@each_rule
@pytest.mark.parametrize("how", ["pickle", "orbax"])
def test_a_restored_run_continues_bit_for_bit(
    name: str, how: str, tmp_path: pathlib.Path
) -> None:
    grads = sequence(SPIKES)
    tx, update, want, states = traced(name)
    saved = states[6]
    if how == "pickle":
        leaves = pickle.loads(
            pickle.dumps([np.asarray(x) for x in jax.tree.leaves(saved)])
        )
        restored = jax.tree.unflatten(jax.tree.structure(tx.init(grads[0])), leaves)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", saved)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", tx.init(grads[0]))
    state = restored
    for i in range(7, len(grads)):
        updates, state = update(grads[i], state, grads[i])
        h.assert_same_bits(updates, want[i])
    h.assert_same_bits(state, states[-1])


def operations(window: int) -> tuple[set[str], float]:
    """Primitives of an update, and the work that the compiler counts."""
    tx = oun.clip_by_global_norm_percentile(10, window=window)
    g = {"w": jnp.ones(4)}
    state = tx.init(g)
    names = set(h.primitives(jax.make_jaxpr(tx.update)(g, state).jaxpr))
    cost = jax.jit(tx.update).lower(g, state).compile().cost_analysis()
    return names, float(cost["flops"])


def test_percentile_cost() -> None:
    """A few operations for each norm in the window, and no sort, whose time is more."""
    names, small = operations(1000)
    _, large = operations(2000)
    assert "sort" not in names
    assert small < 40_000 and large < 2.2 * small


def test_the_page_runs() -> None:
    """Every block of the page on these rules gives what stands under it."""
    page = HERE.parent / "docs" / "adaptive.md"
    assert page.with_suffix(".png").exists()
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    text = "".join(blocks)
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not result.failed and result.attempted > 20, "".join(said)
