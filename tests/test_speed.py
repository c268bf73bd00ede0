"""What the compiled program is made of: temporaries, passes, kernels. Never a clock.

Each bound fails for optax's own clip, or for the plain way to write the same, so that
it is known to see what it is there for.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_unitnorm as oun

ADAM = optax.adam(1e-3)
OPTAX = optax.clip_by_global_norm(1.0)
GLOBAL = {
    "clip": oun.clip_by_global_norm(1.0),
    "unit": oun.normalize_to_unit_global_norm(),
    "soft": oun.soft_clip_by_global_norm(1.0),
}
OURS = GLOBAL | {
    "leaf": oun.clip_by_leaf_norm(1.0),
    "group": oun.clip_by_group_norm(1.0, lambda g: {k: int(k[1:]) % 2 for k in g}),
    "zero": oun.clip_by_global_norm(1.0, nonfinite="zero"),
    "ord 1": oun.clip_by_global_norm(1.0, ord=1),
    "ord 3": oun.clip_by_global_norm(1.0, ord=3),
    "ord 2.5": oun.clip_by_global_norm(1.0, ord=2.5),
    "ord inf": oun.clip_by_global_norm(1.0, ord=float("inf")),
    "zscore": oun.clip_by_global_norm_zscore(),
}


SLOW = ("unit", "soft", "ord 2.5")  # as another, and seconds to compile


each_global = pytest.mark.parametrize(
    "name",
    ["clip", *(pytest.param(n, marks=pytest.mark.slow) for n in ("unit", "soft"))],
)


def allowed(leaves: int) -> int:
    """Bytes of temporaries: the promise of the package for float32."""
    return 4096 + 128 * leaves


def large(dtype: Any, leaves: int = 4) -> dict[str, jax.ShapeDtypeStruct]:
    """Two shapes, for a scale that is written out is written once a shape."""
    shapes = [(512, 256), (512, 288)]
    return {
        f"w{i}": jax.ShapeDtypeStruct(shapes[i % 2], jnp.dtype(dtype))
        for i in range(leaves)
    }


def small(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        f"w{i}": jax.ShapeDtypeStruct((1000,), jnp.dtype("float32"))
        for i in range(leaves)
    }


def size(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    # Donated buffers are handed out in the order of the arguments: as the results.
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled_step(tx: optax.GradientTransformation, grads: Any) -> Any:
    """A training step: its parameters and state are donated, its gradients not."""
    state = jax.eval_shape(tx.init, grads)
    run = jax.jit(step_of(tx), donate_argnums=(0, 1))
    return run.lower(grads, state, grads).compile()


def compiled_locally(tx: optax.GradientTransformation, grads: Any) -> Any:
    """The same where leaves are known to be whole: in a mapped region."""
    mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1])
    whole = PartitionSpec()
    step = jax.shard_map(step_of(tx), mesh=mesh, in_specs=(whole,) * 3, out_specs=whole)
    state = jax.eval_shape(tx.init, grads)
    return jax.jit(step, donate_argnums=(0, 1)).lower(grads, state, grads).compile()


def compiled_alone(tx: optax.GradientTransformationExtraArgs, grads: Any) -> Any:
    state = jax.eval_shape(tx.init, grads)
    run = jax.jit(tx.update, donate_argnums=0)
    return run.lower(grads, state, grads).compile()


def temporaries(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def bare(text: str) -> str:
    """HLO text without what does not change the code made of it."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return re.sub(r", backend_config=\{.*\}(?=\n)", "", text)


def entry(program: Any) -> list[str]:
    """The instructions of the entry computation, each a call or a pass over data."""
    text = bare(program.as_text())
    body = text[text.index("\nENTRY ") :]
    lines = re.findall(r"^ +(?:ROOT )?%\S+ = .*$", body, re.M)
    idle = r" (parameter|constant|tuple|get-tuple-element|bitcast)\("
    return [line for line in lines if not re.search(idle, line)]


def reads(program: Any, name: str) -> int:
    """How many instructions read an argument, the rare second pass aside."""
    text = bare(program.as_text())
    parameter = re.search(
        rf"(%{name}\S*) = \S+ parameter\(", text[text.index("ENTRY") :]
    )
    assert parameter, name
    return sum(
        bool(re.search(rf"{re.escape(parameter[1])}[,)]", x)) for x in entry(program)
    )


def kernels(program: Any) -> set[str]:
    """The distinct fused computations: XLA's CPU compiles each of these once."""
    found = re.findall(
        r"^%\S*computation\S* .*?^}", bare(program.as_text()), re.M | re.S
    )
    return {_renamed(text) for text in found}


def _renamed(text: str) -> str:
    names: dict[str, str] = {}
    return re.sub(
        r"%[\w.-]+|\b[\w-]+\.\d+(?=:)|\bparam_[\d.]+(?=:)",
        lambda m: names.setdefault(m[0].lstrip("%"), f"n{len(names)}"),
        text,
    )


# ---------------------------------------------------------------- temporaries
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in OURS],
)
def test_step_keeps_no_copy(name: str) -> None:
    """Nothing is written between the norm and adam.

    Fails if the scale divides, if a factor or an exponent is shared by the leaves of
    a second pass, or if a flag for NaN is summed from a mask that is written out.
    """
    grads = large("float32")
    program = compiled_step(optax.chain(OURS[name], ADAM), grads)
    assert temporaries(program) <= allowed(len(grads))


@pytest.mark.parametrize("name", ["clip", "leaf", "zero"])
def test_bfloat16_step_keeps_no_copy(name: str) -> None:
    """Fails if the leaf is read, rounded or selected in any other than integers."""
    grads = large("bfloat16")
    program = compiled_step(optax.chain(OURS[name], ADAM), grads)
    assert temporaries(program) <= allowed(len(grads))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clip_alone_keeps_no_copy(dtype: str) -> None:
    """Fails if the norm and the scaling share a float32 copy of the leaves."""
    grads = large(dtype)
    assert temporaries(compiled_alone(GLOBAL["clip"], grads)) <= allowed(len(grads))


def test_temporaries_are_seen() -> None:
    """The bound is one that optax's clip breaks, by all the gradients."""
    grads = large("float32")
    program = compiled_step(optax.chain(OPTAX, ADAM), grads)
    assert temporaries(program) >= size(grads)


# ---------------------------------------------------------------- passes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_global
def test_one_read_more_than_adam(name: str, dtype: str) -> None:
    """The norm reads each gradient once, and scaling it is part of adam's own reads.

    Fails if the range check reads again, or the scaled gradients are written out.
    """
    grads = large(dtype)
    alone = compiled_step(ADAM, grads)
    chained = compiled_step(optax.chain(GLOBAL[name], ADAM), grads)
    for leaf in grads:
        argument = f"grads__{leaf}__"
        assert reads(chained, argument) == reads(alone, argument) + 1


@pytest.mark.parametrize("name", [*GLOBAL, "leaf", "group"])
def test_clip_alone_reads_twice(name: str) -> None:
    """Once for the norm, once to scale."""
    grads = large("float32")
    program = compiled_alone(OURS[name], grads)
    for leaf in grads:
        assert reads(program, f"updates__{leaf}__") == 2


def test_second_pass_is_a_branch() -> None:
    """The range check costs nothing in the usual case: one branch, whatever the tree.

    Fails if the second pass is written as a select, or once for each leaf.
    """
    for name in ("clip", "leaf"):
        program = compiled_alone(OURS[name], large("float32"))
        assert sum(" conditional(" in line for line in entry(program)) == 1
    # Squares of float16 stay in float32's range: nothing to check.
    program = compiled_alone(GLOBAL["clip"], large("float16"))
    assert not any(" conditional(" in line for line in entry(program))


# ---------------------------------------------------------------- small leaves
@each_global
def test_small_leaves_keep_no_copy(name: str) -> None:
    """Fails if each leaf is reduced by itself or all are joined: both copy them."""
    grads = small(128)
    program = compiled_locally(optax.chain(GLOBAL[name], ADAM), grads)
    assert temporaries(program) <= allowed(len(grads))


@pytest.mark.slow
def test_small_leaves_apart_keep_no_copy() -> None:
    """With a scale of each leaf's own.

    Fails if sums of a leaf's own are kept in buffers of their own for the branch.
    """
    grads = small(200)
    program = compiled_locally(optax.chain(OURS["leaf"], ADAM), grads)
    assert temporaries(program) <= allowed(len(grads))


@each_global
def test_small_leaves_add_no_calls(name: str) -> None:
    """64 leaves more add the calls that adam adds, and one sum.

    Fails if small leaves are not added to each other first: optax adds three calls
    for the norm and one for the scaling of each.
    """

    def calls(tx: optax.GradientTransformation) -> int:
        few, many = (len(entry(compiled_locally(tx, small(n)))) for n in (64, 128))
        return many - few

    extra = calls(optax.chain(GLOBAL[name], ADAM)) - calls(ADAM)
    assert extra <= 4
    assert calls(optax.chain(OPTAX, ADAM)) - calls(ADAM) >= 2 * 64


def test_leaves_alike_compile_once() -> None:
    """More leaves of the same shape need no more distinct kernels.

    Fails if a leaf's place in a vector, or what its scale is made of, is compiled
    into the leaf's own loop: then 300 leaves take minutes to compile.
    """

    def distinct(leaves: int) -> int:
        return len(
            kernels(
                compiled_step(
                    optax.chain(GLOBAL["clip"], ADAM), large("float32", leaves)
                )
            )
        )

    # The sums of all leaves are added in a kernel or two of their own.
    assert distinct(12) <= distinct(6) + 2


def test_packing_gathers_nothing() -> None:
    """Small leaves that may be split are not added to each other under jit.

    Fails if packing does not ask whether leaves are local: pieces of differently
    split leaves would be brought together.
    """
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("i", None))
    grads = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if i % 2 else whole)
        for i, (name, x) in enumerate(small(6).items())
    }
    text = compiled_alone(GLOBAL["clip"], grads).as_text()
    assert "all-reduce" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


# ---------------------------------------------------------------- eager
def test_second_eager_update_compiles_nothing() -> None:
    """Fails if an eager update makes anew a function that JAX would then compile."""
    grads = {f"w{i}": jnp.full((7, i + 1), 0.5) for i in range(3)}
    seen: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for name in ("clip", "leaf"):
            tx = OURS[name]
            state = tx.init(grads)
            _, state = tx.update(grads, state)
            assert any("compile" in event for event in seen)
            _, state = tx.update(grads, state)
            seen.clear()
            _, state = tx.update(grads, state)
            assert not [event for event in seen if "compile" in event]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
