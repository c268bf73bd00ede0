"""The programs that are timed: a training step, an update alone, a norm."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.timing import Contestant, compiled, once, wait
from benchmarks.trees import Tree, size


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def step(tx: optax.GradientTransformation, grads: Tree, passes: int) -> Contestant:
    """A step of an optimizer on donated parameters and state.

    `passes`: how many times the bytes of the gradients it must move.
    """
    now = [jax.tree.map(jnp.ones_like, grads)]
    now.append(tx.init(now[0]))
    run, temporaries = compiled(step_of(tx), *now, grads, donate_argnums=(0, 1))

    def call() -> None:
        now[:] = wait(run(*now, grads))

    return Contestant(call, temporaries=temporaries, moved=passes * size(grads))


def update(
    tx: optax.GradientTransformationExtraArgs, grads: Tree, passes: int = 3
) -> Contestant:
    """A transform alone, on donated gradients: the same each time."""
    params = jax.tree.map(jnp.ones_like, grads)
    copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))
    state = tx.init(params)
    run, temporaries = compiled(tx.update, grads, state, params, donate_argnums=0)
    now: list[Any] = [None]

    def prepare() -> None:
        now[0] = wait(copy(grads))

    return Contestant(
        lambda: wait(run(now[0], state, params)),
        prepare,
        temporaries,
        passes * size(grads),
    )


def function(fn: Callable[[Any], Any], tree: Tree, passes: int = 1) -> Contestant:
    run, temporaries = compiled(fn, tree)
    return Contestant(
        lambda: wait(run(tree)), temporaries=temporaries, moved=passes * size(tree)
    )


def eager(tx: optax.GradientTransformationExtraArgs, grads: Tree) -> Contestant:
    """An update that is not jitted."""
    params = jax.tree.map(jnp.ones_like, grads)
    state = tx.init(params)
    return Contestant(lambda: wait(tx.update(grads, state, params)))


def compile_times(
    txs: dict[str, optax.GradientTransformation], grads: Any
) -> dict[str, tuple[float, float]]:
    """Seconds, by the clock and of all cores, to trace and compile each step."""
    times: dict[str, tuple[float, float]] = {}
    for name, tx in txs.items():
        jax.clear_caches()
        state = jax.eval_shape(tx.init, grads)
        lower = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower
        compiles = functools.partial(_compile, lower, grads, state)
        times[name] = once(compiles)
    return times


def _compile(lower: Any, grads: Any, state: Any) -> None:
    lower(grads, state, grads).compile()
