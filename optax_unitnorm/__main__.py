"""Says whether this installation is sound: `python -m optax_unitnorm`.

Prints versions and devices, then one line a check: agreement with float64 for each
dtype, the promises that hardware could break, sharded against unsharded results
where there are several devices, and the time of a step beside optax. The exit code
is 0 if every check holds and 1 otherwise; times are printed, never judged.
"""

import importlib.metadata
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_unitnorm as oun

EPS = float(np.finfo(np.float32).eps)
EPS64 = float(np.finfo(np.float64).eps)
NARROW = "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "complex64"
WIDE = "float64", "complex128"
# Squares of these leave the range of float32, though the norms do not.
EXTREMES = ("float32", 90), ("float32", -90), ("bfloat16", 90), ("bfloat16", -90)
SHAPES = {"w": (64, 33), "b": (64,), "s": ()}
SPECS = {"w": P("d"), "b": P("d"), "s": P()}
SHARE = 0.3  # of the norm, what gradients are clipped to
NORM_EPS = 4.0
ELEMENT_EPS = 6.0  # beside half a unit in the last place of the leaf's own dtype


Step: TypeAlias = Callable[[Any, Any], Any]


class Line(NamedTuple):
    """The outcome of one check; None is neither sound nor unsound."""

    name: str
    said: str
    ok: bool | None


class Unavailable(Exception):
    """The hardware has no such thing, which is no fault of the installation."""


def _draw(dtype: str, power: int = 0) -> dict[str, jax.Array]:
    """Gradients whose magnitudes lie between one and sixteen, times 2**power."""
    rng = np.random.default_rng(0)

    def real(shape: tuple[int, ...]) -> Any:
        size = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(0, 4, shape)
        return rng.choice([-1.0, 1.0], shape) * size * 2.0**power

    def leaf(shape: tuple[int, ...]) -> jax.Array:
        x = real(shape)
        if dtype.startswith("complex"):
            x = x + 1j * real(shape)
        return jnp.asarray(np.asarray(x).astype(jnp.dtype(dtype)))

    return {name: leaf(shape) for name, shape in SHAPES.items()}


def _refuse_unavailable(dtype: str) -> None:
    """Raises if the hardware cannot even add two numbers of this dtype."""
    try:
        one = jnp.asarray(np.ones(2, jnp.dtype(dtype)))
        (one + one).block_until_ready()
    except Exception as error:
        raise Unavailable(_first_line(error)) from error


def _exact(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _norm(tree: dict[str, Any]) -> float:
    return math.sqrt(sum(float(np.sum(np.abs(_exact(x)) ** 2)) for x in tree.values()))


def _off(got: Any, want: Any) -> float:
    """The largest error, relative to each element."""
    got, want = _exact(got), _exact(want)
    if not np.all(np.isfinite(got)):
        return math.inf
    return float(np.max(np.abs(got - want) / np.abs(want)))


def _clip_step() -> Step:
    """A compiled step whose threshold is an argument; one for all magnitudes."""

    def step(grads: Any, max_norm: Any) -> Any:
        tx = oun.clip_by_global_norm(max_norm)
        return tx.update(grads, tx.init(grads))

    return jax.jit(step)


def _agreement(step: Step, dtype: str, power: int = 0) -> tuple[str, bool]:
    """One clipped step against the same in float64."""
    _refuse_unavailable(dtype)
    grads = _draw(dtype, power)
    want = _norm(grads)
    max_norm = float(np.float32(SHARE * want))
    updates, state = step(grads, max_norm)
    eps = EPS64 if dtype in WIDE else EPS
    norm_off = _off(state.grad_norm, want) / eps
    off = max(_off(updates[k], max_norm / want * _exact(grads[k])) for k in grads) / eps
    allowed = ELEMENT_EPS + float(jnp.finfo(dtype).eps) / 2 / eps
    said = f"norm {norm_off:.1f} eps (of {NORM_EPS:g}), "
    said += f"elements {off:.4g} eps (of {allowed:.4g})"
    same = all(updates[k].dtype == grads[k].dtype for k in grads)
    return said, same and norm_off <= NORM_EPS and off <= allowed


def _in_x64(step: Step, dtype: str) -> tuple[str, bool]:
    with jax.enable_x64(True):
        return _agreement(step, dtype)


def _same_bits(got: Any, want: Any) -> bool:
    return np.asarray(got).tobytes() == np.asarray(want).tobytes()


def _not_binding(step: Step) -> tuple[str, bool]:
    grads = {**_draw("float32"), "b": jnp.full(SHAPES["b"], 1e-40, jnp.float32)}
    updates, _ = step(grads, 1e6)
    ok = all(_same_bits(updates[k], grads[k]) for k in grads)
    return "the same bits, subnormals included" if ok else "changes bits", ok


def _zero() -> tuple[str, bool]:
    grads = jax.tree.map(jnp.zeros_like, _draw("float32"))
    tx = oun.normalize_to_unit_global_norm()
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    ok = all(not np.any(x) for x in updates.values())
    return "zero" if ok else "not zero", ok


def _nonfinite(step: Step) -> tuple[str, bool]:
    grads = {**_draw("float32"), "s": jnp.asarray(jnp.inf)}
    zero = oun.clip_by_global_norm(1.0, nonfinite="zero")
    dropped, _ = jax.jit(zero.update)(grads, zero.init(grads))
    ok = all(np.all(np.isnan(x)) for x in step(grads, 1.0)[0].values())
    ok = ok and all(not np.any(x) for x in dropped.values())
    return "all NaN, or all zero as asked" if ok else "a mixture", ok


def _sharded(step: Step, kind: str, devices: list[Any]) -> tuple[str, bool]:
    """Leaves cut over all devices against the same leaves on one."""
    grads = _draw("float32")
    max_norm = SHARE * _norm(grads)
    want, alone = step(grads, max_norm)
    tx = oun.clip_by_global_norm(max_norm)
    pieces = len(devices)
    mesh = Mesh(np.asarray(devices), ("d",))
    if kind == "jit":
        placed = {
            k: jax.device_put(x, NamedSharding(mesh, SPECS[k]))
            for k, x in grads.items()
        }
        got, state = step(placed, max_norm)
    elif kind == "shard_map":
        mapped = jax.shard_map(
            tx.update, mesh=mesh, in_specs=(SPECS, P()), out_specs=(SPECS, P())
        )
        got, state = jax.jit(mapped)(grads, tx.init(grads))
    else:
        tx = oun.clip_by_global_norm(max_norm, sharded_over=SPECS)
        cut = {
            k: jnp.stack(jnp.split(x, pieces)) if k != "s" else jnp.stack([x] * pieces)
            for k, x in grads.items()
        }
        got, state = jax.pmap(lambda g: tx.update(g, tx.init(g)), "d", devices=devices)(
            cut
        )
        got = {k: x[0] if k == "s" else x.reshape(SHAPES[k]) for k, x in got.items()}
        state = jax.tree.map(lambda x: x[0], state)
    norm_off = _off(state.grad_norm, alone.grad_norm) / EPS
    off = max(_off(got[k], want[k]) for k in grads) / EPS
    allowed = 2 * NORM_EPS
    said = f"norm {norm_off:.1f} eps, elements {off:.1f} eps (of {allowed:g})"
    return said, norm_off <= allowed and off <= allowed


def _step_times() -> str:
    """A step of adam alone, after our clip, and after optax's."""
    params = {str(i): jnp.ones((1024, 1024)) for i in range(4)}
    grads = jax.tree.map(lambda x: 0.01 * x, params)
    chains = {
        "adam": optax.adam(1e-3),
        "ours": optax.chain(oun.clip_by_global_norm(1.0), optax.adam(1e-3)),
        "optax": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    }
    runs = {name: _Run(tx, grads, params) for name, tx in chains.items()}
    # In turns, so that whatever else the machine does slows all of them alike.
    for _ in range(12):
        for run in runs.values():
            run.step()
    ours, theirs, adam = (runs[name].median() for name in ("ours", "optax", "adam"))
    return (
        f"ours {1e3 * ours:.2f} ms, optax {1e3 * theirs:.2f} ms, ratio "
        f"{ours / theirs:.2f} (adam alone {1e3 * adam:.2f} ms)"
    )


class _Run:
    """One optimizer, stepped and timed."""

    def __init__(self, tx: Any, grads: Any, params: Any) -> None:
        self._grads = grads
        self._carry = jax.tree.map(jnp.copy, (params, tx.init(params)))
        self._times: list[float] = []

        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step, donate_argnums=0)
        self._carry = jax.block_until_ready(self._step(self._carry, grads))

    def step(self) -> None:
        begin = time.perf_counter()
        self._carry = jax.block_until_ready(self._step(self._carry, self._grads))
        self._times.append(time.perf_counter() - begin)

    def median(self) -> float:
        return statistics.median(self._times)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _checked(name: str, check: Callable[..., tuple[str, bool]], *args: Any) -> Line:
    try:
        return Line(name, *check(*args))
    except Unavailable as error:
        return Line(name, f"not on this hardware ({error})", None)
    except Exception as error:  # a report with a hole in it is worth more than none
        return Line(name, _first_line(error), False)


def _checks() -> Iterator[Line]:
    step = _clip_step()
    for dtype in NARROW:
        yield _checked(dtype, _agreement, step, dtype)
    for dtype in WIDE:
        yield _checked(dtype, _in_x64, step, dtype)
    for dtype, power in EXTREMES:
        yield _checked(f"{dtype} * 2**{power}", _agreement, step, dtype, power)
    yield _checked("clip does not bind", _not_binding, step)
    yield _checked("zero gradients", _zero)
    yield _checked("an infinite element", _nonfinite, step)
    # A power of two of them, so that every leaf can be cut evenly.
    devices = jax.local_devices()
    devices = devices[: 2 ** int(math.log2(min(len(devices), 64)))]
    for kind in ("jit", "shard_map", "pmap"):
        name = f"{kind}, {len(devices)} devices"
        if len(devices) == 1:
            yield Line(f"{kind}, sharded", "not checked: one device", None)
        else:
            yield _checked(name, _sharded, step, kind, devices)


def _versions() -> Iterator[str]:
    packages = ("optax-unitnorm", "jax", "jaxlib", "optax", "numpy")
    yield ", ".join(f"{name} {_version(name)}" for name in packages)
    yield f"Python {platform.python_version()} on {platform.platform()}"
    kinds = [device.device_kind for device in jax.devices()]
    counted = ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
    yield f"devices: {counted} ({jax.default_backend()}), {jax.process_count()} process"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed as a package)"


WORDS = {True: "ok", False: "FAILED", None: "-"}


def main() -> int:
    """Prints the report; the result is the exit code."""
    for text in _versions():
        print(text)
    print()
    lines: list[Line] = []
    for line in _checks():
        lines.append(line)
        print(f"{line.name:22}{WORDS[line.ok]:8}{line.said}", flush=True)
    print(f"{'step':22}{WORDS[None]:8}{_step_times()}")
    failed = sum(line.ok is False for line in lines)
    held = sum(line.ok is True for line in lines)
    print()
    print(
        f"NOT sound: {failed} checks failed" if failed else f"sound: {held} checks held"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
