"""Runs recorded calls in the framework itself: `python _frameworks.py SYSTEM`.

Records come in as JSON on standard input, fresh ones go out on standard output; in
place of a record, a line of code is run as it stands and only its error comes back.
It runs in a process of its own, which needs the framework and numpy, not JAX:
Keras takes its backend from the environment at import, and a framework seldom lives
in the environment of another. Exit code 3 says that it is not installed.
"""

import importlib.util
import json
import os
import re
import sys
import warnings
from typing import Any

import numpy as np

NEEDS = {
    "torch": ("torch",),
    "tf": ("tensorflow",),
    "keras-tensorflow": ("keras", "tensorflow"),
    "keras-jax": ("keras", "jax"),
    "keras-torch": ("keras", "torch"),
}
NOT_INSTALLED = 3


def array(data: dict) -> np.ndarray:
    """A recorded tensor, in the widest dtype."""
    shape = data["shape"]
    if "fill" in data:
        return np.full(shape, float(data["fill"]))
    values = [
        complex(x["re"], x["im"]) if isinstance(x, dict) else float(x)
        for x in data["data"]
    ]
    return np.asarray(values).reshape(shape)


def record_of(values: np.ndarray, dtype: str) -> dict:
    """A tensor as it is recorded; not-finite numbers as strings."""
    values = np.asarray(values)
    flat = values.ravel()
    if flat.size > 16 and np.all(flat == flat[0]):
        return {"dtype": dtype, "shape": list(values.shape), "fill": _number(flat[0])}
    data = [_number(x) for x in flat]
    return {"dtype": dtype, "shape": list(values.shape), "data": data}


def _number(x: Any) -> Any:
    if np.iscomplexobj(x):
        return {"re": _number(x.real), "im": _number(x.imag)}
    return float(x) if np.isfinite(x) else str(float(x))


class Torch:
    """PyTorch: gradients are changed in place."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def tensor(self, data: dict) -> Any:
        torch = self.torch
        if data.get("layout") == "sparse_coo":
            rows = torch.tensor([data["indices"]])
            values = torch.tensor(data["values"])
            return torch.sparse_coo_tensor(rows, values, (data["size"],))
        dtype = getattr(torch, data["dtype"])
        return torch.tensor(array(data)).to(dtype)

    def record(self, tensor: Any) -> dict | None:
        if tensor is None:
            return None
        wide = self.torch.complex128 if tensor.is_complex() else self.torch.float64
        dtype = str(tensor.dtype).removeprefix("torch.")
        return record_of(tensor.detach().to(wide).numpy(), dtype)

    def run(self, record: dict) -> dict:
        torch = self.torch
        grads = [None if x is None else self.tensor(x) for x in record["inputs"]]
        if "coalesced=True" in record["call"]:
            grads = [grad.coalesce() for grad in grads]
        params = [torch.zeros(2) if g is None else torch.zeros_like(g) for g in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        names = vars(torch.nn.utils) | {"tensor": torch.tensor, "params": params}
        names |= {"grads": [g for g in grads if g is not None]}
        names |= {"p": params[0] if params else None, "inf": np.inf, "nan": np.nan}
        norm = eval(record["call"].split(" sparse COO")[0], names)
        if given := re.search(r"tensor\((.*?)\)", record["call"]):
            norm = torch.tensor(float(given[1]))  # it returns none: the one given
        fresh = {"norm": None if norm is None else self.record(norm)}
        if "get_total_norm" not in record["api"]:
            fresh["outputs"] = [self.record(param.grad) for param in params]
        return fresh

    def names(self) -> dict[str, Any]:
        """What a line of the guide may use."""
        torch = self.torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(4, 2)).sum()).backward()
        names = {"model": model, "optimizer": optimizer, "scaler": scaler}
        return vars(torch.nn.utils) | names | {"norm": torch.tensor(13.0)}


class TensorFlow:
    """TensorFlow's own functions."""

    def __init__(self) -> None:
        import tensorflow

        self.tf = tensorflow

    def tensor(self, data: dict) -> Any:
        tf = self.tf
        if data.get("layout") == "IndexedSlices":
            rows = np.asarray(data["values"], np.float32)[:, None]
            return tf.IndexedSlices(
                tf.constant(rows),
                tf.constant(data["indices"]),
                tf.constant(data["dense_shape"]),
            )
        wide = tf.constant(array(data))
        return tf.cast(wide, getattr(tf, data["dtype"]))

    def record(self, tensor: Any) -> dict | None:
        if tensor is None:
            return None
        if isinstance(tensor, self.tf.IndexedSlices):
            values = self.record(tensor.values)
            rows = tensor.indices.numpy().tolist()
            return {"layout": "IndexedSlices", "indices": rows, "values": values}
        wide = self.tf.complex128 if tensor.dtype.is_complex else self.tf.float64
        return record_of(self.tf.cast(tensor, wide).numpy(), tensor.dtype.name)

    def run(self, record: dict) -> dict:
        grads = [None if x is None else self.tensor(x) for x in record["inputs"]]
        names = {"tf": self.tf, "grads": grads, "inf": np.inf, "nan": np.nan}
        names |= {"IndexedSlices": grads[0] if grads else None}
        # A literal matrix was a float tensor.
        call = re.sub(r"\[\[.*?\]\]", "grads[0]", record["call"])
        result = eval(call, names)
        if record["api"] == "tf.linalg.global_norm":
            return {"norm": self.record(result)}
        norm = None
        if record["api"] == "tf.clip_by_global_norm":
            result, norm = result
        result = result if isinstance(result, list) else [result]
        outputs = [self.record(x) for x in result]
        return {"outputs": outputs, "norm": None if norm is None else self.record(norm)}

    def names(self) -> dict[str, Any]:
        """What a line of the guide may use."""
        grads = [self.tf.constant([[3.0, 4.0], [0.0, 0.0]]), self.tf.constant([12.0])]
        return {"tf": self.tf, "grads": grads, "norm": self.tf.constant(13.0)}


class Keras:
    """Keras on the backend it was imported with; that backend makes the tensors."""

    def __init__(self, backend: str) -> None:
        os.environ["KERAS_BACKEND"] = backend
        import keras

        self.keras = keras
        self.native = {"tensorflow": TensorFlow, "torch": Torch, "jax": Jax}[backend]()

    def run(self, record: dict) -> dict:
        keras, native = self.keras, self.native
        grads = [None if x is None else native.tensor(x) for x in record["inputs"]]
        names = {
            "SGD": keras.optimizers.SGD,
            "LossScaleOptimizer": keras.optimizers.LossScaleOptimizer,
            **{"inf": np.inf, "nan": np.nan},
        }
        line = record["call"].split(";")[0]
        constructor = re.split(r"\._clip_gradients|\.apply", line)[0]
        optimizer = eval(constructor, names)
        if "_clip_gradients" in record["api"]:
            return {
                "outputs": [native.record(x) for x in optimizer._clip_gradients(grads)]
            }
        if "apply" not in record["api"]:
            return {}
        variables = [
            keras.Variable(np.zeros(x["shape"] if x else 2, "float32"))
            for x in record["inputs"]
        ]
        if "stateless_apply" in record["api"]:
            import jax

            optimizer.build(variables)
            states = [v.value for v in optimizer.variables]
            step = jax.jit(optimizer.stateless_apply)
            after, _ = step(states, grads, [v.value for v in variables])
        else:
            optimizer.apply(grads, variables)
            after = [v.value for v in variables]
        return {"outputs": [native.record(-x) for x in after]}

    def names(self) -> dict[str, Any]:
        """What a line of the guide may use."""
        return {"SGD": self.keras.optimizers.SGD}


class Jax:
    """JAX arrays, for Keras on JAX."""

    def tensor(self, data: dict) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(array(data)).astype(data["dtype"])

    def record(self, tensor: Any) -> dict | None:
        if tensor is None:
            return None
        wide = np.complex128 if np.iscomplexobj(tensor) else np.float64
        return record_of(np.asarray(tensor).astype(wide), str(tensor.dtype))


def versions(system: str) -> str:
    """The installed versions behind a system."""
    modules = [importlib.import_module(name) for name in NEEDS[system]]
    return " / ".join(f"{m.__name__} {m.__version__}" for m in modules)


def main(system: str) -> int:
    """Answers every record on standard input."""
    if any(importlib.util.find_spec(name) is None for name in NEEDS[system]):
        return NOT_INSTALLED
    warnings.simplefilter("ignore")
    backend = system.removeprefix("keras-")
    framework = {"torch": Torch, "tf": TensorFlow}.get(system, lambda: Keras(backend))()
    answers = []
    for record in json.load(sys.stdin):
        try:
            if isinstance(record, str):
                exec(record, framework.names())
                answers.append({})
            else:
                answers.append(framework.run(record))
        except Exception as error:  # whatever they raise is their answer
            message = str(error).split("\n")[0][:120]
            answers.append(
                {"error": {"type": type(error).__name__, "message": message}}
            )
    json.dump({"versions": versions(system), "answers": answers}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
