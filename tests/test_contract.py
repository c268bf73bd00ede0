"""Every public transform through every contract, each pair a test of its own."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import _helpers as h
import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _transforms import (
    FOUND,
    GRADS,
    PARAMS,
    ROWS,
    Row,
    binding,
    compiled,
    expected,
    find,
    having,
    loose,
    one_of_a_kind,
    record_in,
    run,
    taking,
)

import optax_unitnorm as oun

ORDERS = (1, 2, 2.5, 3, math.inf)
SIMPLE = ("all",) if h.MANY else ("float32",)
# How far a threshold lies from the norm that it is held against.
RATIOS = (2.0**-100, 1e-3, 0.5, 0.999, 1.0, 1.5, 2.0**100)


def every(rows: Sequence[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])


def test_every_transform_has_a_row() -> None:
    assert set(find()) <= {row.name for row in ROWS}


def near(row: Row, grads: Any, ratio: float) -> tuple[float, ...]:
    """Thresholds at `ratio` of the norm of everything, as float32 can hold them."""
    at = np.clip(ratio * h.tree_norm(grads), h.TINY32, h.MAX32)
    return (float(np.float32(at)),)[: len(row.thresholds)]


# ------------------------------------------------------------------ values


@every(FOUND)
@hypothesis.given(grads=h.trees(), ratio=st.sampled_from(RATIOS))
def test_oracle(row: Row, grads: Any, ratio: float) -> None:
    """Any tree, dtype and magnitude: the exact product, rounded once."""
    thresholds = near(row, grads, ratio)
    if h.MANY:
        arrays = tuple(map(np.float32, thresholds))
        updates, _ = compiled(row)(arrays, grads, grads)
    else:
        updates, _ = run(row, grads, thresholds)
    want, _ = expected(row, grads, thresholds, grads)
    h.assert_close(updates, want)
    h.assert_same_types(updates, grads)


@every(one_of_a_kind(taking("ord")))
@pytest.mark.parametrize("ord", ORDERS)
@hypothesis.given(grads=h.trees(SIMPLE), ratio=st.sampled_from((2.0**-100, 0.5, 1.5)))
def test_orders(row: Row, ord: float, grads: Any, ratio: float) -> None:
    thresholds = near(row, grads, ratio)
    updates, _ = run(row, grads, thresholds, ord=ord)
    h.assert_close(updates, expected(row, grads, thresholds, grads, ord=ord)[0])


@every(taking("min_norm"))
@hypothesis.given(grads=h.trees(SIMPLE), ratio=st.sampled_from(RATIOS))
def test_min_norm(row: Row, grads: Any, ratio: float) -> None:
    """A floor, not an added eps: norms above it are divided out exactly."""
    floor = float(np.float32(np.clip(ratio * h.tree_norm(grads), h.TINY32, h.MAX32)))
    want, _ = expected(row, grads, min_norm=floor)
    h.assert_close(run(row, grads, min_norm=floor)[0], want)


@every(FOUND)
def test_structure_and_dtypes(row: Row) -> None:
    """Structure and dtypes stay, whatever the type of the threshold."""
    values = binding(row)
    want, _ = expected(row, GRADS, values, PARAMS)
    results = [compiled(row)(tuple(map(np.float32, values)), GRADS, PARAMS)[0]]
    for typed in (float, np.float64, jnp.bfloat16, jnp.float16):
        tx = row.make(*map(typed, values))
        results.append(tx.update(GRADS, tx.init(PARAMS), PARAMS)[0])
    for updates in results:
        h.assert_same_types(updates, GRADS)
        assert not any(u.weak_type for u in jax.tree.leaves(updates))
        h.assert_close(updates, want)


@every(FOUND)
def test_zero(row: Row) -> None:
    """Zero in, zero out, bit for bit; a threshold of 0 gives zeros."""
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    for thresholds in (binding(row), loose(row), (0.0,)[: len(row.thresholds)]):
        h.assert_same_bits(run(row, zeros, thresholds, PARAMS)[0], zeros)
        h.assert_same_bits(run(row, zeros, thresholds, zeros)[0], zeros)


@every([row for row in having(kind=("clip", "scale")) if row.thresholds])
def test_zero_threshold(row: Row) -> None:
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    h.assert_close(run(row, GRADS, (0.0,), PARAMS)[0], zeros, rtol=0, atol=0)


def subnormals(tree: Any) -> Any:
    """The tree, with the smallest number of each dtype in place of one element."""

    def put(x: Any) -> Any:
        if not x.size:
            return x
        tiny = np.asarray(x).copy()
        tiny.reshape(-1)[0] = jnp.finfo(x.dtype).smallest_subnormal
        return jnp.asarray(tiny)

    return jax.tree.map(put, tree)


@every(having(kind=("clip", "keep", "value")))
def test_not_binding(row: Row) -> None:
    """The same bits, subnormals and the sign of zero included."""
    signed = jax.tree.map(lambda x: x * jnp.asarray(-0.0, x.dtype), GRADS)
    for grads in (GRADS, subnormals(GRADS), signed):
        updates, state = run(row, grads, loose(row), PARAMS)
        h.assert_same_bits(updates, grads)
        if (record := record_in(state)) is not None:
            assert (int(record.steps), int(record.clipped)) == (1, 0)


@every([row for row in FOUND if row.thresholds])
def test_inf_threshold(row: Row) -> None:
    """Never binds, in the soft clip neither, and has the identity's derivative."""
    grads = subnormals(GRADS)
    updates, _ = run(row, grads, (math.inf,), PARAMS)
    h.assert_same_bits(updates, grads)

    def total(w: jax.Array) -> jax.Array:
        tx, grads = row.make(math.inf), {"w": w}
        return tx.update(grads, row.start(tx, grads), grads)[0]["w"].sum()

    h.assert_same_bits(jax.grad(total)(GRADS["w"]), jnp.ones((3, 2)))


def spoilt(tree: Any, bad: float, path: str) -> Any:
    """The tree with one element of one leaf replaced."""

    def put(where: Any, x: Any) -> Any:
        if jax.tree_util.keystr(where, simple=True, separator="/") != path:
            return x
        return jnp.ravel(x).at[-1].set(bad).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(put, tree)


@every(taking("nonfinite"))
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_nonfinite(row: Row, nonfinite: str) -> None:
    """A whole block NaN or zero, never a mixture; other blocks as ever."""
    for path in ("b", "w"):
        for bad in (math.nan, math.inf, -math.inf):
            grads = spoilt(GRADS, bad, path)
            for thresholds in (loose(row), (math.inf,)):
                thresholds = thresholds[: len(row.thresholds)]
                updates, state = run(
                    row, grads, thresholds, PARAMS, nonfinite=nonfinite
                )
                want, _ = expected(row, grads, thresholds, PARAMS, nonfinite=nonfinite)
                h.assert_close(updates, want)
                record = record_in(state)
                assert (int(record.nonfinite), int(record.steps)) == (1, 1)
                assert not math.isfinite(record.grad_norm)


@every(taking("nonfinite", rms=False))
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_norm_beyond_float32(row: Row, nonfinite: str) -> None:
    """Finite elements whose norm float32 cannot hold count as not finite."""
    grads = {"w": jnp.full(4, 3e38), "v": jnp.full(4, 3e38)}
    thresholds = (1.0,)[: len(row.thresholds)]
    updates, state = run(row, grads, thresholds, grads, nonfinite=nonfinite)
    want, _ = expected(row, grads, thresholds, grads, nonfinite=nonfinite)
    h.assert_close(updates, want)
    assert int(record_in(state).nonfinite) == 1


@every(having(kind="normalise"))
def test_loss_scale(row: Row) -> None:
    """Normalising is blind to a power-of-two loss scale, bit for bit."""
    grads = {"w": h.draw(1, (7, 3), top=-6), "b": h.draw(2, (5,), top=-6)}
    want, _ = run(row, grads)
    for power in (-80, -15, 15, 100):
        scaled = jax.tree.map(lambda x, p=power: x * 2.0**p, grads)
        h.assert_same_bits(run(row, scaled)[0], want)


# ------------------------------------------------------------------ leaves


def zoo() -> dict[str, Any]:
    """Leaves that do not count, and a few that do."""
    return {
        "none": None,
        "masked": optax.MaskedNode(),
        "int": 7,
        "bool": True,
        "int32": jnp.arange(3),
        "uint8": np.arange(3, dtype=np.uint8),
        "bools": jnp.array([True, False]),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1), 2),
        "empty": jnp.zeros((0, 3)),
        "w": jnp.array([3.0, 4.0]),
        "numpy": np.array([6.0, -8.0], np.float32),
        "float": 12.5,
        "scalar": np.float32(2.5),
    }


@every(FOUND)
def test_leaves_that_do_not_count(row: Row) -> None:
    """They stay as they are, and no norm knows of them."""
    grads = zoo()
    thresholds = binding(row)
    tx = row.make(*thresholds)
    updates, _ = tx.update(grads, tx.init(grads), grads)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    for name, leaf in grads.items():
        if not jax.tree.leaves(leaf):
            continue
        if not h.counts(leaf):
            h.assert_same_bits(updates[name], leaf)
    counted = {k: v for k, v in grads.items() if jax.tree.leaves(v) and h.counts(v)}
    want, _ = expected(row, grads, thresholds, grads)
    for name in counted:
        assert jnp.result_type(updates[name]) == jnp.float32
        h.assert_close(jnp.asarray(updates[name]), want[name])


@every(FOUND)
@pytest.mark.parametrize(
    "tree", [{}, (), {"a": None}, {"a": jnp.zeros((0, 3))}, {"m": optax.MaskedNode()}]
)
def test_nothing_to_count(row: Row, tree: Any) -> None:
    tx = row.make(*binding(row))
    updates, state = tx.update(tree, tx.init(tree), tree)
    h.assert_same_types(updates, tree)
    if (record := record_in(state)) is not None:
        h.assert_same_bits(record.grad_norm, jnp.float32(0))


@every(FOUND)
def test_float64(row: Row) -> None:
    """Under x64 a float64 leaf is measured, scaled and recorded in float64."""
    with jax.enable_x64(True):
        grads = {
            "d": h.draw(1, (4, 3), "float64"),
            "z": h.draw(2, (3,), "complex128"),
            "f": h.draw(3, (5,), "float32"),
        }
        thresholds = (0.3,)[: len(row.thresholds)]
        tx = row.make(*thresholds)
        updates, state = tx.update(grads, tx.init(grads), grads)
        h.assert_same_types(updates, grads)
        h.assert_close(updates, expected(row, grads, thresholds, grads)[0])
        if (record := record_in(state)) is not None:
            assert record.grad_norm.dtype == jnp.float64
            h.assert_norm(record.grad_norm, h.tree_norm(grads))
            assert record.steps.dtype == jnp.int32
            single = record_in(tx.init({"f": grads["f"]}))
            assert single.grad_norm.dtype == jnp.float32


# ------------------------------------------------------------------ masks


@every(taking("mask"))
def test_mask(row: Row) -> None:
    """False leaves are neither counted nor scaled: a tree, a prefix, a callable."""
    tree = {"b": True, "c": False, "h": (True, None, True), "s": False, "w": True}
    prefix = {"b": True, "c": False, "h": True, "s": False, "w": True}
    thresholds = binding(row)
    grads = spoilt(GRADS, math.nan, "c")
    want, _ = expected(row, grads, thresholds, PARAMS, mask=tree)
    for mask in (tree, prefix, lambda g: prefix):
        tx = row.make(*thresholds, mask=mask)
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        h.assert_close(updates, want)
        for name in ("c", "s"):
            h.assert_same_bits(updates[name], grads[name])


@every(taking("mask"))
@pytest.mark.parametrize("callable_", [False, True], ids=["tree", "callable"])
def test_mask_that_does_not_match(row: Row, callable_: bool) -> None:
    """The error names the path where mask and gradients part."""
    grads = {"outer": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
    mask = {"outer": {"kernel": True}}
    tx = row.make(*binding(row), mask=(lambda g: mask) if callable_ else mask)
    with pytest.raises(ValueError, match=r"`mask`(.|\n)*outer"):
        tx.update(grads, tx.init(grads), grads)


# ------------------------------------------------------------------ derivatives


def slope(f: Callable[..., Any], point: tuple[Any, ...], along: tuple[Any, ...]) -> Any:
    """Central difference of a float64 function of trees."""
    step = 1e-6

    def at(sign: int) -> Any:
        return f(*jax.tree.map(lambda x, t: x + sign * step * t, point, along))

    return jax.tree.map(lambda a, b: (a - b) / (2 * step), at(1), at(-1))


def with_orders(*ords: float) -> pytest.MarkDecorator:
    """Every transform as it is; with other orders one by default, others are slow."""
    rows = [pytest.param(row, {}, id=row.name) for row in FOUND]
    for ord in ords:
        for row in one_of_a_kind(taking("ord")):
            marks = () if row.name == "clip_by_global_norm" else pytest.mark.slow
            name = f"{row.name}-{ord}"
            rows.append(pytest.param(row, {"ord": ord}, id=name, marks=marks))
    return pytest.mark.parametrize(("row", "options"), rows)


@with_orders(1, 3, math.inf)
def test_derivatives(row: Row, options: dict[str, Any]) -> None:
    """Forward and reverse mode give the derivative of the formula, in all inputs."""
    grads, params, tangent, cotangent = (
        {"w": h.draw(s, (3, 2)), "c": h.draw(s + 1, (3,), "complex64")}
        for s in (11, 21, 31, 41)
    )
    wide = jax.tree.map(h.wide, (grads, params, tangent))

    def exact(t: Any, g: Any, p: Any) -> Any:
        return expected(row, g, t, p, **options)[0]

    def update(t: Any, g: Any, p: Any) -> Any:
        tx = row.make(*t, **options)
        return tx.update(g, row.start(tx, p), p)[0]

    def both(primals: Any, tangents: Any) -> Any:
        _, forward = jax.jvp(update, primals, tangents)
        return forward, jax.vjp(jax.checkpoint(update), *primals)[1](cotangent)

    for thresholds in (binding(row), (1e6,)[: len(row.thresholds)]):
        shifts = tuple(0.1 * t for t in thresholds)
        want = slope(exact, (thresholds, *wide[:2]), (shifts, wide[2], wide[2]))
        forward, backward = both(
            (tuple(map(jnp.float32, thresholds)), grads, params),
            (tuple(map(jnp.float32, shifts)), tangent, tangent),
        )
        size = max(np.abs(w).max() for w in jax.tree.leaves(want))
        room = h.DERIVATIVE_RTOL * size
        h.assert_close(forward, want, rtol=h.DERIVATIVE_RTOL, atol=room)
        assert inner(backward, (shifts, tangent, tangent)) == pytest.approx(
            inner(cotangent, want), rel=h.DERIVATIVE_RTOL, abs=10 * room
        )


def inner(a: Any, b: Any) -> float:
    """The real part of the sum of products."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(sum(np.sum(h.wide(x) * h.wide(y)).real for x, y in pairs))


@with_orders(1, 2.5, math.inf)
def test_derivative_at_zero(row: Row, options: dict[str, Any]) -> None:
    """1 through what does not bind, finite through what normalises."""
    zero = {"w": jnp.zeros((2, 2))}
    ones = jax.tree.map(jnp.ones_like, zero)

    def update(g: Any) -> Any:
        tx = row.make(*(1.0,)[: len(row.thresholds)], **options)
        return tx.update(g, row.start(tx, ones), ones)[0]

    def both(point: Any) -> Any:
        _, forward = jax.jvp(update, (point,), (ones,))
        return forward, jax.vjp(update, point)[1](ones)[0]

    for derivative in both(zero):
        chex.assert_tree_all_finite(derivative)
        if row.kind in ("clip", "keep", "value"):
            h.assert_close(derivative, ones, rtol=0, atol=0)


@every(FOUND)
def test_derivative_beside_a_zero_block(row: Row) -> None:
    """A zero leaf spoils no other leaf's derivative."""
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}
    ones = jax.tree.map(jnp.ones_like, grads)

    def total(g: Any) -> jax.Array:
        tx = row.make(*(1.0,)[: len(row.thresholds)])
        return optax.tree.sum(tx.update(g, row.start(tx, ones), ones)[0])

    chex.assert_tree_all_finite(jax.grad(total)(grads))


# ------------------------------------------------------------------ transformations


@every(FOUND)
def test_vmap(row: Row) -> None:
    """Each member its own norm, whether the mapped axis has a name or not."""
    members = [{"w": h.draw(s, (3, 2), top=4 * s - 8)} for s in range(4)]
    stack = {"w": jnp.stack([m["w"] for m in members]).reshape(2, 2, 3, 2)}
    thresholds = (2.0,)[: len(row.thresholds)]
    tx = row.make(*thresholds)
    states = jax.vmap(jax.vmap(tx.init))(stack)
    update = jax.vmap(jax.vmap(tx.update), axis_name="batch")
    updates, states = update(stack, states, stack)
    for i, member in enumerate(members):
        at = divmod(i, 2)
        want, _ = expected(row, member, thresholds, member)
        h.assert_close(updates["w"][at], want["w"])
        if (record := record_in(states)) is not None:
            h.assert_norm(record.grad_norm[at], h.tree_norm(member))


@every(FOUND)
def test_scan_and_while(row: Row) -> None:
    """State and updates keep their types from step to step."""
    tx = row.make(*binding(row))
    first = tx.init(PARAMS)

    def step(carry: Any, _: None) -> Any:
        updates, state = tx.update(GRADS, carry[1], PARAMS)
        return (updates, state), None

    def steps(carry: Any) -> Any:
        return jax.lax.scan(step, carry, None, length=2)[0]

    @jax.jit
    def loop(carry: Any) -> Any:
        return jax.lax.while_loop(
            lambda c: c[1] < 4, lambda c: (steps(c[0]), c[1] + 2), (carry, 0)
        )[0]

    scanned, state = loop((GRADS, first))
    h.assert_same_types(state, first)
    if not row.memory:
        h.assert_close(scanned, expected(row, GRADS, binding(row), PARAMS)[0])
    if (record := record_in(state)) is not None:
        assert int(record.steps) == 4


@pytest.mark.parametrize("mode", [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))])
def test_second_derivatives(mode: Any) -> None:
    """Of a clip that binds: those of c x / |x|, worked out by hand at (3, 4)."""

    def total(x: jax.Array) -> jax.Array:
        return oun.clip_grad_norm(x, 2.0)[0].sum()

    found = mode(total)(jnp.array([3.0, 4.0]))
    x, n = np.array([3.0, 4.0]), 5.0
    outer = np.add.outer(x, x)
    wanted = 2 * (3 * np.outer(x, x) * x.sum() / n**5 - outer / n**3)
    wanted -= 2 * np.eye(2) * x.sum() / n**3
    h.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@every(FOUND)
def test_checkpoint(row: Row) -> None:
    """It can be computed again on the way back; `test_derivatives` has the values."""
    tx, grads = row.make(*binding(row)), {"w": GRADS["w"]}

    @jax.checkpoint
    def total(g: Any) -> jax.Array:
        return jnp.sum(tx.update(g, row.start(tx, g), g)[0]["w"] ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(total))(grads)
    names = set(h.primitives(jaxpr.jaxpr))
    assert names & {"checkpoint", "remat2"}  # its name in older and newer jax


@every(FOUND)
def test_donated(row: Row) -> None:
    """Every field has its own buffer, so gradients and state can be donated."""
    tx = row.make(*binding(row))
    grads, params = {"w": GRADS["w"]}, {"w": PARAMS["w"]}
    state = tx.init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers)
    step = jax.jit(tx.update, donate_argnums=(0, 1))
    for _ in range(2):
        given = jax.tree.map(jnp.copy, grads)
        updates, state = step(given, state, params)
        assert given["w"].is_deleted()
    if not row.memory:
        h.assert_close(updates, expected(row, grads, binding(row), params)[0])


@every(FOUND)
def test_eval_shape(row: Row) -> None:
    thresholds = tuple(np.float32(t) for t in binding(row))
    shapes = jax.eval_shape(compiled(row), thresholds, GRADS, PARAMS)
    arrays = compiled(row)(thresholds, GRADS, PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(arrays)
    for shape, array in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(arrays), strict=True
    ):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)


@every([row for row in FOUND if row.thresholds])
def test_one_compilation(row: Row) -> None:
    """A traced threshold: one trace for all its values, each with its own result."""
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def update(threshold: jax.Array, grads: Any) -> Any:
        tx = row.make(threshold)
        return tx.update(grads, row.start(tx, grads), grads)[0]

    grads = {"w": GRADS["w"]}
    for threshold in (0.0, 0.25, 2.0, math.inf):
        want, _ = expected(row, grads, (threshold,), grads)
        h.assert_close(update(jnp.float32(threshold), grads), want)


@every(FOUND)
def test_no_collective(row: Row) -> None:
    """On one device nothing is communicated, not even over a named vmap axis."""
    thresholds = tuple(np.float32(t) for t in binding(row))
    plain = jax.make_jaxpr(compiled(row))(thresholds, GRADS, PARAMS)
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), (GRADS, PARAMS))
    mapped = jax.make_jaxpr(
        jax.vmap(compiled(row), in_axes=(None, 0, 0), axis_name="batch")
    )(thresholds, *stack)
    for jaxpr in (plain, mapped):
        assert not set(h.primitives(jaxpr.jaxpr)) & set(h.COLLECTIVES)


@every(FOUND)
def test_strict_promotion(row: Row) -> None:
    """Nothing leans on implicit dtype promotion."""
    tx = row.make(*binding(row))
    state = tx.init(PARAMS_OF_REAL)
    with jax.numpy_dtype_promotion("strict"):  # tracing is what it is about
        updates, _ = jax.eval_shape(tx.update, REAL, state, PARAMS_OF_REAL)
    h.assert_same_types(updates, REAL)


@every(FOUND)
def test_extra_arguments(row: Row) -> None:
    """Unknown ones are ignored, as optax.chain requires."""
    tx = optax.chain(row.make(*binding(row)), optax.scale(1.0))
    state = tx.init(PARAMS)
    plain, _ = tx.update(GRADS, state, PARAMS)
    extra, _ = tx.update(GRADS, state, PARAMS, value=1.0, unknown="x")
    h.assert_same_bits(extra, plain)


@every(taking("sharded_over"))
def test_sharded_over_on_one_device(row: Row) -> None:
    """Outside a mapped region every form means the same."""
    want, _ = run(row, GRADS, binding(row), PARAMS)
    for axes in (None, "i", ("i", "j"), jax.sharding.PartitionSpec()):
        tx = row.make(*binding(row), sharded_over=axes)
        got, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        h.assert_same_bits(got, want)
    tx = row.make(*binding(row))
    got, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, sharded_over=None)
    h.assert_same_bits(got, want)


# ------------------------------------------------------------------ schedules


def scheduled(row: Row) -> list[tuple[Row, str]]:
    return [(row, name) for name in row.thresholds]


SCHEDULED = [pair for row in FOUND for pair in scheduled(row)]
each_threshold = pytest.mark.parametrize(
    ("row", "name"), SCHEDULED, ids=[f"{r.name}-{n}" for r, n in SCHEDULED]
)


def setting(row: Row, name: str, value: Any) -> dict[str, Any]:
    """Arguments with one threshold as wanted and the others out of the way."""
    if name == "min_value":
        return {"max_value": 1e6, "min_value": value}
    return {name: value, **row.args}


REAL = {"b": GRADS["b"], "w": GRADS["w"]}


def at_step(row: Row, name: str, value: float) -> Any:
    thresholds = (1e6, value) if name == "min_value" else (value,)
    return expected(row, REAL, thresholds, PARAMS_OF_REAL)[0]


PARAMS_OF_REAL = {"b": PARAMS["b"], "w": PARAMS["w"]}
TABLE = (0.25, 1e6, 0.5)


@each_threshold
def test_schedule(row: Row, name: str) -> None:
    """A schedule runs on the transform's own step counter, from 0."""
    sign = -1.0 if name == "min_value" else 1.0
    table = jnp.array(TABLE) * sign
    tx = row.factory(**setting(row, name, lambda count: table[count]))
    state = tx.init(PARAMS_OF_REAL)
    for value in TABLE:
        updates, state = tx.update(REAL, state, PARAMS_OF_REAL)
        h.assert_same_types(updates, REAL)
        h.assert_close(updates, at_step(row, name, sign * value))


@every([row for row in having(memory=False) if row.thresholds])
def test_schedule_needs_its_state(row: Row) -> None:
    tx = row.make(lambda count: 1.0)
    for foreign in (None, optax.EmptyState(), {"restored": jnp.ones(2)}):
        with pytest.raises((TypeError, ValueError), match="schedule"):
            tx.update(REAL, foreign, PARAMS_OF_REAL)


STATIC = ("groups", "fn", "inner", "window", "warmup")


@each_threshold
def test_inject_schedule(row: Row, name: str) -> None:
    """optax.inject_hyperparams drives the same threshold, in the leaf's dtype."""
    sign = -1.0 if name == "min_value" else 1.0
    table = jnp.array(TABLE) * sign
    static = [a for a in STATIC if row.takes(a)]
    factory = optax.inject_hyperparams(row.factory, static_args=static)
    tx = factory(**setting(row, name, lambda count: table[count]))
    state = tx.init(PARAMS_OF_REAL)
    for value in TABLE:
        rounded = float(jnp.bfloat16(sign * value))
        updates, state = tx.update(REAL, state, PARAMS_OF_REAL)
        h.assert_same_types(updates, REAL)
        h.assert_close(updates, at_step(row, name, rounded))


@every(FOUND)
def test_inject_hyperparams(row: Row) -> None:
    """Every argument that is a number may arrive traced, defaults included."""
    static = [a for a in STATIC if row.takes(a)]
    factory = optax.inject_hyperparams(row.factory, static_args=static)
    named = dict(zip(row.thresholds, binding(row), strict=False))
    tx = factory(**named, **row.args)
    updates, state = tx.update(REAL, tx.init(PARAMS_OF_REAL), PARAMS_OF_REAL)
    h.assert_close(updates, expected(row, REAL, binding(row), PARAMS_OF_REAL)[0])
    if row.norm_based:
        h.assert_norm(oun.metrics(state)["grad_norm"], h.tree_norm(REAL))


# ------------------------------------------------------------------ state


@every(having(memory=False))
def test_foreign_state(row: Row) -> None:
    """Any other state is handed back untouched, and the rule still applies."""
    tx = row.make(*binding(row))
    want, _ = expected(row, GRADS, binding(row), PARAMS)
    for foreign in (None, optax.EmptyState(), (), {"restored": jnp.ones(2)}, 3):
        updates, state = tx.update(GRADS, foreign, PARAMS)
        h.assert_close(updates, want)
        assert state is foreign


@every([row for row in having(memory=False) if row.norm_based])
def test_norm_state(row: Row) -> None:
    """The norm before scaling, the smallest scale, and what was counted."""
    tx = row.make(*binding(row))
    state = tx.init(PARAMS)
    assert isinstance(state, oun.NormState)
    assert state._fields == (
        "grad_norm",
        "grad_scale",
        "steps",
        "clipped",
        "nonfinite",
        "repeated",
    )
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    for grads in (spoilt(GRADS, math.nan, "w"), zeros, GRADS):
        _, state = tx.update(grads, state, PARAMS)
    for field, dtype in zip(state, [jnp.float32] * 2 + [jnp.int32] * 4, strict=True):
        assert (field.shape, field.dtype) == ((), dtype)
    _, scale = expected(row, GRADS, binding(row), PARAMS)
    h.assert_norm(state.grad_norm, h.tree_norm(GRADS))
    h.assert_close(state.grad_scale, 1.0 if row.kind == "keep" else scale)
    counts = [int(x) for x in state[2:]]
    assert counts == [3, row.kind == "clip", 1, 0]


@every(having(kind="clip", memory=False))
def test_clipped_counts_blocks_together(row: Row) -> None:
    """A step counts once, however many blocks were clipped, and never when none."""
    tx = row.make(1.0)
    grads = {"a": jnp.full(4, 0.1), "b": jnp.full(4, 10.0), "c": jnp.full(4, 20.0)}
    params = jax.tree.map(jnp.ones_like, grads)
    state = tx.init(params)
    small = jax.tree.map(lambda x: x * 1e-3, grads)
    for tree in (grads, grads, small):
        _, state = tx.update(tree, state, params)
    assert (int(state.clipped), int(state.steps)) == (2, 3)
    h.assert_same_bits(state.grad_scale, jnp.float32(1))


# ------------------------------------------------------------------ arguments


NEGATIVE = (-1.0, -1, -math.inf, np.float32(-0.5), np.array(-2.0))
NO_NUMBERS = (math.nan, np.float64("nan"), True, np.bool_(True), "1.0", 1j, [1.0])


def bad_values(row: Row, name: str) -> tuple[Any, ...]:
    """What is refused: a lower bound may be negative, and some may be left out."""
    if name == "min_value":
        return NO_NUMBERS
    left_out = inspect.signature(row.factory).parameters[name].default is None
    return (*NEGATIVE, *NO_NUMBERS, *([] if left_out else [None]))


@each_threshold
def test_bad_threshold(row: Row, name: str) -> None:
    for bad in bad_values(row, name):
        h.refused(lambda bad=bad: row.factory(**setting(row, name, bad)), name)


@each_threshold
def test_good_threshold(row: Row, name: str) -> None:
    """0, inf, integers and numpy numbers are fine; jax arrays are not looked at."""
    for good in (0, 1, 0.0, 1e5, np.float16(2), np.array(1.0), jnp.float32(-1)):
        row.factory(**setting(row, name, good))
    row.make(math.inf)


@every(taking("ord"))
def test_bad_ord(row: Row) -> None:
    for bad in (0.5, 0, -1, -math.inf, math.nan, True, "fro", np.float32(0.9)):
        h.refused(lambda bad=bad: row.make(*binding(row), ord=bad), "ord")


@every(taking("min_norm"))
def test_bad_min_norm(row: Row) -> None:
    for bad in (*NEGATIVE, *NO_NUMBERS, None):
        h.refused(lambda bad=bad: row.make(min_norm=bad), "min_norm")


@every(taking("nonfinite"))
def test_bad_nonfinite(row: Row) -> None:
    for bad in ("skip", "", None, True, 0):
        h.refused(lambda bad=bad: row.make(*binding(row), nonfinite=bad), "nonfinite")


@every(taking("stacked_axis"))
def test_bad_stacked_axis(row: Row) -> None:
    for bad in (0.5, "0", True):
        h.refused(
            lambda bad=bad: row.make(*binding(row), stacked_axis=bad), "stacked_axis"
        )


@every(taking("sharded_over"))
def test_bad_sharded_over(row: Row) -> None:
    for bad in (1, 0.5, True):
        h.refused(
            lambda bad=bad: row.make(*binding(row), sharded_over=bad), "sharded_over"
        )
