"""Calls of other frameworks, as recorded, and the same calls written here.

`parse` reads a recorded line, `CALLS` says what a function of theirs is here,
`right` works the formula out in float64 numpy, and `DIFFERENCES` is the whole
list of places where our result is not theirs. Everything goes by the function
called and by its arguments, never by which record it is.
"""

import ast
import contextlib
import inspect
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import _helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

import optax_unitnorm as oun

RECORDS = pathlib.Path(__file__).parent / "data" / "peers.json"

# Two roundings of theirs (their scale, then the product) and two of ours.
ROUNDINGS = 4


class Outcome(NamedTuple):
    """What a call returned: leaves and norm, or an error."""

    leaves: list[Any] | None = None
    norm: Any = None
    error: str | None = None


def load(path: pathlib.Path = RECORDS) -> list[dict]:
    """The records, each with its inputs written out and its arguments named."""
    data = json.loads(path.read_text())
    for record in data["records"]:
        record.setdefault("inputs", data["sets"].get(record.get("set")))
        args, kwargs = parse(record["call"])
        bound = inspect.signature(CALLS[record["api"]]).bind(None, *args, **kwargs)
        named = bound.arguments | bound.arguments.get("thresholds", {})
        record["args"] = {
            name: value
            for name, value in named.items()
            if name not in ("grads", "thresholds")
        }
    return data["records"]


def parse(line: str) -> tuple[list, dict]:
    """The literal arguments of a recorded call, but for the gradients.

    The first argument (the gradients; the learning rate of SGD) is dropped.
    """
    source = re.split(r"\s*(?:#|;| sparse COO)", line)[0]
    node = ast.parse(source, mode="eval").body
    if isinstance(node, ast.ListComp):
        node = node.elt
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        node = node.func.value  # SGD(...) of SGD(...).apply(grads)
    kwargs = {}
    for keyword in node.keywords:
        value = _literal(keyword.value)
        kwargs |= value if keyword.arg is None else {keyword.arg: value}
    return [_literal(arg) for arg in node.args[1:]], kwargs


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name("inf" | "nan" as name):
            return float(name)
        case ast.Name():
            return None
        case ast.UnaryOp(ast.USub(), operand):
            return -_literal(operand)
        case ast.Call(_, [value]):
            return np.float32(_literal(value))  # tensor(13.0), tf.constant(13.0)
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            return {_literal(k): _literal(v) for k, v in zip(keys, values, strict=True)}
    raise ValueError(f"cannot read {ast.unparse(node)}")


def tensor(data: dict | float | None) -> np.ndarray | None:
    """A recorded tensor; of a sparse one, the stored values."""
    if data is None or isinstance(data, float):
        return data
    if "layout" in data:
        values = data["values"]
        if isinstance(values, dict):
            return tensor(values)
        return np.asarray(values, np.float32).reshape(len(values), -1)
    dtype, shape = jnp.dtype(data["dtype"]), data["shape"]
    if "fill" in data:
        return np.full(shape, float(data["fill"]), dtype)
    wide = [
        complex(float(x["re"]), float(x["im"])) if isinstance(x, dict) else float(x)
        for x in data["data"]
    ]
    return np.asarray(wide).reshape(shape).astype(dtype)


def theirs(record: dict) -> Outcome:
    """What they returned."""
    if record.get("error"):
        return Outcome(error=record["error"]["message"])
    outputs = record.get("outputs")
    leaves = None if outputs is None else [tensor(leaf) for leaf in outputs]
    return Outcome(leaves, tensor(record.get("norm")))


# --------------------------------------------------------- their call, our call


_TORCH_EPS = np.float32(1e-6)


def clip_grad_norm_(
    grads, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None
):
    if error_if_nonfinite:
        get_total_norm(grads, norm_type, error_if_nonfinite)
    tx = oun.clip_like_torch(max_norm, norm_type)
    updates, state = tx.update(grads, tx.init(grads))
    return updates, state.grad_norm


def get_total_norm(grads, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    order = float(norm_type)
    if error_if_nonfinite:
        oun.clip_grad_norm(grads, math.inf, ord=order, error_if_nonfinite=True)
    return None, oun.global_norm(grads, ord=order)


def clip_grads_with_norm_(grads, max_norm, total_norm, foreach=None):
    # Theirs adds 1e-6 to the norm it is given, too, and returns none.
    clipped, _ = oun.clip_grad_norm(grads, max_norm, norm=total_norm + _TORCH_EPS)
    return clipped, total_norm


def clip_grad_value_(grads, clip_value, foreach=None):
    return _updated(oun.clip_by_value(clip_value), grads), None


def tf_clip_by_global_norm(grads, clip_norm, use_norm=None):
    return oun.clip_grad_norm(grads, clip_norm, norm=use_norm)


def tf_global_norm(grads):
    return None, oun.global_norm(grads)


def tf_clip_by_norm(grads, clip_norm, axes=None):
    # Theirs are the axes summed over, ours is the one that is left.
    left = set(range(grads[0].ndim)) - set(axes) if axes else ()
    axis = min(left, default=None)
    return _updated(oun.clip_by_leaf_norm(clip_norm, stacked_axis=axis), grads), None


def tf_clip_by_average_norm(grads, clip_norm):
    def one(g):
        return None if g is None else oun.clip_grad_norm(g, clip_norm * g.size)[0]

    return [one(g) for g in grads], None


def tf_clip_by_value(grads, clip_value_min, clip_value_max):
    both = () if clip_value_min == -clip_value_max else (clip_value_min,)
    return _updated(oun.clip_by_value(clip_value_max, *both), grads), None


def keras_clip_gradients(grads, **thresholds):
    clipped = _updated(oun.clip_like_keras(**thresholds), grads)
    if "global_clipnorm" in thresholds:  # Keras makes sparse gradients dense here
        clipped = [g.todense() if isinstance(g, BCOO) else g for g in clipped]
    return clipped, None


def keras_apply(grads, **thresholds):
    # Variables start at zero and what a step took away from them is compared;
    # a variable without a gradient stays where it is.
    params = jax.tree.map(jnp.zeros_like, grads)
    tx = optax.chain(oun.clip_like_keras(**thresholds), optax.sgd(1.0))
    updates, _ = tx.update(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    return [jnp.zeros(2) if p is None else -p for p in params], None


def keras_stateless_apply(grads, **thresholds):
    return jax.jit(lambda grads: keras_apply(grads, **thresholds))(grads)


def keras_optimizer(grads, **thresholds):
    oun.clip_like_keras(**thresholds)
    return None, None


def keras_loss_scale(grads, **thresholds):
    tx = optax.chain(optax.scale(1 / 1024), oun.clip_like_keras(**thresholds))
    scaled = [jnp.asarray([3.0 * 1024, 4.0 * 1024])]
    return _updated(tx, scaled), None


def _updated(tx, grads):
    return tx.update(grads, tx.init(grads))[0]


CALLS: dict[str, Callable] = {
    "torch.nn.utils.clip_grad_norm_": clip_grad_norm_,
    "torch.nn.utils.get_total_norm": get_total_norm,
    "torch.nn.utils.clip_grads_with_norm_": clip_grads_with_norm_,
    "torch.nn.utils.clip_grad_value_": clip_grad_value_,
    "tf.clip_by_global_norm": tf_clip_by_global_norm,
    "tf.linalg.global_norm": tf_global_norm,
    "tf.clip_by_norm": tf_clip_by_norm,
    "tf.compat.v1.clip_by_average_norm": tf_clip_by_average_norm,
    "tf.clip_by_value": tf_clip_by_value,
    "keras.optimizers.SGD(...)._clip_gradients": keras_clip_gradients,
    "keras.optimizers.SGD.apply": keras_apply,
    "jax.jit(SGD.stateless_apply)": keras_stateless_apply,
    "keras.optimizers.SGD": keras_optimizer,
    "keras.optimizers.LossScaleOptimizer": keras_loss_scale,
}

_known: dict[tuple, Outcome] = {}


def ours(record: dict) -> Outcome:
    """What the same call returns here. Equal calls are made once."""
    call, wide = CALLS[record["api"]], _is_wide(record)
    key = (call, repr(record["args"]), json.dumps(record["inputs"]), wide)
    if key not in _known:
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            _known[key] = _outcome(call, _handed_in(record), record["args"])
    return _known[key]


def _outcome(call: Callable, inputs: list, args: dict) -> Outcome:
    try:
        leaves, norm = call(inputs, **args)
    except (ValueError, FloatingPointError, RuntimeError) as error:
        return Outcome(error=str(error))
    leaves = None if leaves is None else [_host(leaf) for leaf in leaves]
    return Outcome(leaves, None if norm is None else np.asarray(norm))


def _is_wide(record: dict) -> bool:
    # Keras on JAX was recorded as JAX starts, without float64.
    wide = any(leaf and leaf.get("dtype") == "float64" for leaf in record["inputs"])
    return wide and record["system"] != "keras-jax"


def _handed_in(record: dict) -> list:
    return [
        _sparse(data, value) if data and "layout" in data else _dense(value)
        for data, value in zip(record["inputs"], grads(record), strict=True)
    ]


def _dense(value: np.ndarray | None) -> jax.Array | None:
    return None if value is None else jnp.asarray(value)


def _sparse(data: dict, value: np.ndarray) -> BCOO:
    rows = jnp.asarray(data["indices"], jnp.int32)[:, None]
    size = data.get("size") or data["dense_shape"][0]
    return BCOO((jnp.asarray(value), rows), shape=(size, value.shape[1]))


def _host(leaf: Any) -> np.ndarray | None:
    if leaf is None:
        return None
    return np.asarray(leaf.data if isinstance(leaf, BCOO) else leaf)


# ----------------------------------------------------------- the formula itself


def right(record: dict) -> Outcome:
    """The call's formula in float64, from the numbers that went in."""
    wide = [None if x is None else helpers.wide(x) for x in grads(record)]
    args, kind, bound = record["args"], scope(record), threshold(record)
    norm = _norm(wide, norm_type(record))
    eps = 1e-6 if record["system"] == "torch" else 0.0
    if kind == "norm":
        return Outcome(norm=norm)
    given = args.get("total_norm", args.get("use_norm"))
    if given is not None:
        norm = float(given)
        eps = float(given + np.float32(eps)) - norm  # added in the norm's own dtype
    one = {
        "global": lambda x: _scaled(x, norm, bound, eps),
        "leaf": lambda x: _scaled(x, _norm([x]), bound, eps),
        "slice": lambda x: _scaled_slices(x, tuple(args["axes"]), bound),
        "average": lambda x: _scaled(x, _norm([x]), bound * x.size, eps),
        "value": lambda x: _clip_value(x, args.get("clip_value_min", -bound), bound),
    }[kind]
    # A variable whose gradient is missing stays at zero.
    missing = np.zeros(2) if "apply" in record["api"] else None
    leaves = [
        missing if x is None else _rounded(one(x), g.dtype)
        for x, g in zip(wide, grads(record), strict=True)
    ]
    return Outcome(leaves, norm if returns_norm(record) else None)


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The result in its own dtype, where what is too small for it is zero."""
    return x.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else x


def grads(record: dict) -> list[np.ndarray | None]:
    """The gradients that went in, in the dtypes that JAX held them in."""
    arrays = [tensor(leaf) for leaf in record["inputs"]]
    return arrays if _is_wide(record) else [_narrow(x) for x in arrays]


def _narrow(x: np.ndarray | None) -> np.ndarray | None:
    if x is None or x.dtype != np.float64:
        return x
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def norm_type(record: dict) -> float:
    """The order of the norm in this call."""
    return float(record["args"].get("norm_type", 2.0))


def returns_norm(record: dict) -> bool:
    """Whether this call of theirs returns the norm beside the gradients."""
    return scope(record) in ("global", "norm") and record["system"] in ("torch", "tf")


def scope(record: dict) -> str:
    """Who shares a norm in this call; "norm" where nothing is scaled."""
    api, args = record["api"], record["args"]
    if "total_norm" in api or api == "tf.linalg.global_norm":
        return "norm"
    if "value" in api or "clipvalue" in args:
        return "value"
    if "average" in api:
        return "average"
    if args.get("axes"):
        return "slice"
    return "leaf" if api == "tf.clip_by_norm" or "clipnorm" in args else "global"


def threshold(record: dict) -> float:
    """The bound that this call clips to; inf where it has none."""
    names = (
        *("max_norm", "clip_value", "clip_norm", "clip_value_max"),
        *("clipnorm", "clipvalue", "global_clipnorm"),
    )
    return next((record["args"][n] for n in names if n in record["args"]), math.inf)


def _norm(leaves: list, order: float = 2.0) -> float:
    return helpers.norm([x for x in leaves if x is not None], order)


def _scaled(x: np.ndarray, norm: float, bound: float, eps: float) -> np.ndarray:
    if not np.isfinite(norm):
        return np.full_like(x, np.nan)
    return x if norm + eps <= bound else x * (bound / (norm + eps))


def _scaled_slices(x: np.ndarray, axes: tuple[int, ...], bound: float) -> np.ndarray:
    norm = np.sqrt(np.sum(np.abs(x) ** 2, axis=axes, keepdims=True))
    return x * np.where(norm > bound, bound / np.maximum(norm, bound), 1)


def _clip_value(x: np.ndarray, low: float, high: float) -> np.ndarray:
    if np.iscomplexobj(x):
        with np.errstate(invalid="ignore"):  # inf / inf, where nothing is above
            scale = high / np.maximum(np.abs(x), high)
        return x * np.where(np.abs(x) > high, scale, 1)
    return np.clip(x, low, high)


# ------------------------------------------------------------------- comparison


def mismatch(one: Outcome, two: Outcome, *, signed: bool = True) -> str | None:
    """Why `one` is not `two`, to `ROUNDINGS` eps of the coarser dtype, or None."""
    if (one.error is None) != (two.error is None):
        return f"error {one.error!r} against {two.error!r}"
    if (one.leaves is None) != (two.leaves is None):
        return "leaves against none"
    if (one.norm is None) != (two.norm is None):
        return f"norm {one.norm} against {two.norm}"
    if one.norm is not None and not _close(one.norm, two.norm, signed=False):
        return f"norm {one.norm} against {two.norm}"
    if len(one.leaves or ()) != len(two.leaves or ()):
        return "not as many leaves"
    for a, b in zip(one.leaves or (), two.leaves or (), strict=True):
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            return f"{a!r} against {b!r}"
        if a is not None and not _close(a, b, signed=signed):
            return f"{a!r} against {b!r}"
    return None


def _close(a: Any, b: Any, *, signed: bool) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    eps = max(_eps(a.dtype), _eps(b.dtype))
    a, b = (x.astype(np.result_type(x, float)) for x in (a, b))
    if not signed:
        # A norm below float32's smallest normal number counts as zero.
        tiny = float(np.finfo(np.float32).tiny)
        a, b = (np.where(np.abs(x) < tiny, 0.0, x) for x in (a, b))
    elif not np.iscomplexobj(a) and np.any(
        (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))
    ):
        return False
    return np.allclose(a, b, rtol=ROUNDINGS * eps, atol=0.0, equal_nan=True)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def same_dtypes(one: Outcome, two: Outcome) -> bool:
    """Whether every leaf has the dtype of its counterpart."""
    return _dtypes(one) == _dtypes(two)


def _dtypes(outcome: Outcome) -> list:
    return [None if x is None else x.dtype for x in outcome.leaves or ()]
