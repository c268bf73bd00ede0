"""Argument checks, in sentences of one shape.

"`name` must be rule; got value."

Only concrete Python and numpy values are judged. Traced values and jax arrays
pass (their shape and dtype are looked at, never their value), so that a
threshold may be an argument of a jitted function.
"""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _got(value: object) -> str:
    return f"got {value!r}."


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def threshold(name: str, value: Any, *, signed: bool = False) -> Any:
    """A number >= 0 (any number if signed), a scalar array or a schedule."""
    if callable(value):
        return value
    rule = f"`{name}` must be a number, a scalar array or a schedule; "
    if isinstance(value, (jax.Array, np.ndarray)):
        real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(
            value.dtype, jnp.integer
        )
        if value.ndim or not real:
            raise ValueError(
                rule + f"got an array of shape {value.shape}, dtype {value.dtype}."
            )
        if isinstance(value, jax.Array):
            return value
        value = value.item()
    elif not _is_number(value):
        raise TypeError(rule + _got(value))
    elif isinstance(value, np.generic):
        value = value.item()  # a float16 would be compared as a float16
    if math.isnan(value):
        raise ValueError(f"`{name}` must not be NaN; {_got(value)}")
    if not signed and value < 0:
        raise ValueError(f"`{name}` must be >= 0; {_got(value)}")
    return value


def number(name: str, value: Any, *, low: float = 0.0, high: float = math.inf) -> Any:
    """A number in [low, high] or a scalar array, not a schedule."""
    if callable(value):
        raise TypeError(f"`{name}` must be a number or a scalar array; {_got(value)}")
    value = threshold(name, value, signed=True)
    if not isinstance(value, jax.Array) and not low <= value <= high:
        rule = f">= {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"`{name}` must be {rule}; {_got(value)}")
    return value


def _refuse_traced(name: str, value: object) -> None:
    if isinstance(value, jax.Array):
        raise TypeError(
            f"`{name}` must be a static Python value (with optax.inject_hyperparams, "
            f"name it in static_args); {_got(value)}"
        )


def integer(name: str, value: Any, *, at_least: int) -> int:
    """A static integer."""
    _refuse_traced(name, value)
    if not isinstance(value, numbers.Integral) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be an integer; {_got(value)}")
    if value < at_least:
        raise ValueError(f"`{name}` must be >= {at_least}; {_got(value)}")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """A static bool."""
    _refuse_traced(name, value)
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False; {_got(value)}")
    return bool(value)


def choice(name: str, value: Any, options: tuple[str, ...]) -> Any:
    """One of a few words."""
    _refuse_traced(name, value)
    if not isinstance(value, str) or value not in options:
        words = " or ".join(repr(option) for option in options)
        raise ValueError(f"`{name}` must be {words}; {_got(value)}")
    return value


def order(value: Any, name: str = "ord") -> float:
    """The order of a norm: None is 2."""
    if value is None:
        return 2.0
    _refuse_traced(name, value)
    if not _is_number(value):
        raise TypeError(f"`{name}` must be None, inf or a number >= 1; {_got(value)}")
    if not value >= 1:
        raise ValueError(f"`{name}` must be >= 1; {_got(value)}")
    return float(value)
