"""What TensorFlow, Keras and PyTorch returned, and what the same call returns here.

Every record either comes out equal to `ROUNDINGS` eps of its dtype, or falls under
one of `DIFFERENCES`, and then what comes out instead is asserted too. The break this
notices: any number of ours that moves, a difference that appears, or one that goes.
"""

import collections
import math
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import _helpers as helpers
import _parity as parity
import jax.numpy as jnp
import numpy as np
import pytest
from _parity import Outcome

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "coming_from.md"

REFUSED = Outcome(error=r"^`\w+` must (not )?be .*; got .*\.$")


class Difference(NamedTuple):
    """One place where we return something else, and what."""

    applies: Callable[[dict], bool]
    instead: Callable[[dict], Outcome]


def _values(record: dict) -> np.ndarray:
    leaves = [helpers.wide(x).ravel() for x in parity.grads(record) if x is not None]
    return np.concatenate([*leaves, np.zeros(0)])


def _dtypes(record: dict) -> set[np.dtype]:
    return {x.dtype for x in parity.grads(record) if x is not None}


def _kinds(record: dict) -> set[str]:
    return {dtype.kind for dtype in _dtypes(record)}


def _refused(record: dict) -> Outcome:
    return REFUSED


def _untouched(record: dict) -> Outcome:
    leaves = None if parity.scope(record) == "norm" else parity.grads(record)
    given = _given(record) or 0.0
    return Outcome(leaves, given if parity.returns_norm(record) else None)


def _unscaled_then_clipped(record: dict) -> Outcome:
    by_value = "clipvalue" in record["args"]
    return Outcome([np.float32([1.0, 1.0] if by_value else [0.6, 0.8])])


def _wrong(record: dict) -> bool:
    return parity.mismatch(parity.theirs(record), parity.right(record)) is not None


def _failed(record: dict) -> bool:
    return parity.theirs(record).error is not None


def _finite(record: dict) -> bool:
    return bool(np.all(np.isfinite(_values(record))))


def _refuses_threshold(record: dict) -> bool:
    bound = parity.threshold(record)
    return math.isnan(bound) or bound < 0 or (_given(record) or 0) < 0


def _given(record: dict) -> float | None:
    return record["args"].get("total_norm", record["args"].get("use_norm"))


def _refuses_order(record: dict) -> bool:
    return not parity.norm_type(record) >= 1


def _zero(record: dict) -> bool:
    zero = parity.threshold(record) == 0 and not _failed(record) and _wrong(record)
    return zero and ("keras" in record["system"] or _finite(record))


def _infinite_threshold(record: dict) -> bool:
    bound = parity.threshold(record)
    return bound == math.inf and _finite(record) and _holds_nan(record)


def _holds_nan(record: dict) -> bool:
    leaves = parity.theirs(record).leaves or ()
    return any(x is not None and np.isnan(helpers.wide(x)).any() for x in leaves)


def _plain_norm(record: dict) -> bool:
    return _failed(record) and type(record["args"].get("use_norm")) is float


def _integers(record: dict) -> bool:
    return "i" in _kinds(record)


def _complex(record: dict) -> bool:
    return "c" in _kinds(record) and _wrong(record)


def _sparse(record: dict) -> bool:
    return _failed(record) and any(x and "layout" in x for x in record["inputs"])


def _nothing_to_clip(record: dict) -> bool:
    missing = not record["inputs"] or None in record["inputs"]
    one_of_three = record["api"] != "keras.optimizers.SGD"
    return _failed(record) and missing and one_of_three and not _loss_scale(record)


def _mixed_dtypes(record: dict) -> bool:
    them = parity.theirs(record)
    promoted = bool(them.leaves) and not parity.same_dtypes(
        them, Outcome(parity.grads(record))
    )
    narrow = any(dtype.itemsize == 2 for dtype in _dtypes(record))
    return (len(_dtypes(record)) > 1 and promoted) or (narrow and _failed(record))


def _subnormal(record: dict) -> bool:
    values = np.abs(_values(record))
    small = 0 < values.max(initial=0) < helpers.TINY32
    # Beside a learning rate nothing subnormal is left of ours either.
    alone = "apply" not in record["api"]
    return small and alone and _all_zero(record) and _wrong(record)


def _all_zero(record: dict) -> bool:
    leaves = parity.theirs(record).leaves
    return leaves is not None and not any(np.any(x) for x in leaves if x is not None)


def _mixture(record: dict) -> bool:
    measured = parity.scope(record) not in ("value", "norm")
    returned = not _failed(record)
    finite = _finite(record) and math.isfinite(_given(record) or 0)
    return measured and returned and not finite and _wrong(record)


def _overflow(record: dict) -> bool:
    them = parity.theirs(record)
    infinite = them.norm is not None and np.isinf(helpers.wide(them.norm))
    lost = _failed(record) or _all_zero(record) or infinite or _holds_nan(record)
    largest = min(float(jnp.finfo(dtype).max) for dtype in _dtypes(record) or {float})
    return bool(lost and _log_powers(record) > math.log(largest) and _wrong(record))


def _underflow(record: dict) -> bool:
    smallest = max(float(jnp.finfo(dtype).tiny) for dtype in _dtypes(record) or {float})
    tiny = -math.inf < _log_powers(record) < math.log(smallest)
    return tiny and parity.theirs(record).norm is not None and _wrong(record)


def _log_powers(record: dict) -> float:
    """The logarithm of the sum that a norm is a root of, 0 where there is none."""
    order, values = parity.norm_type(record), _values(record)
    if not _finite(record) or not 1 <= order < math.inf:
        return 0.0
    norm = helpers.norm([values], order)
    return order * math.log(norm) if norm else -math.inf


def _through_float32(record: dict) -> bool:
    wide = np.dtype(np.float64) in _dtypes(record)
    return wide and _finite(record) and not _failed(record) and _wrong(record)


def _loss_scale(record: dict) -> bool:
    return record["api"] == "keras.optimizers.LossScaleOptimizer"


# In the order in which they are asked: the first that applies is the name.
DIFFERENCES: dict[str, Difference] = {
    "no loss scaling": Difference(_loss_scale, _unscaled_then_clipped),
    "refused threshold": Difference(_refuses_threshold, _refused),
    "refused order": Difference(_refuses_order, _refused),
    "zero is a threshold": Difference(_zero, parity.right),
    "infinite threshold": Difference(_infinite_threshold, parity.right),
    "norm as a number": Difference(_plain_norm, parity.right),
    "integers pass": Difference(_integers, _untouched),
    "complex numbers": Difference(_complex, parity.right),
    "sparse gradients": Difference(_sparse, parity.right),
    "nothing to clip": Difference(_nothing_to_clip, parity.right),
    "mixed dtypes": Difference(_mixed_dtypes, parity.right),
    "subnormal numbers": Difference(_subnormal, parity.right),
    "one outcome for a block": Difference(_mixture, parity.right),
    "norm overflows": Difference(_overflow, parity.right),
    "norm underflows": Difference(_underflow, parity.right),
    "float64 stays float64": Difference(_through_float32, parity.right),
}


def name(record: dict) -> str:
    """The difference a record falls under, or "equal"."""
    if _refuses_threshold(record) and _failed(record):
        return "equal"  # an error there and here
    applies = (n for n, d in DIFFERENCES.items() if d.applies(record))
    return next(applies, "equal")


def complaint(record: dict) -> str | None:
    """What is wrong with our side of a record, or None."""
    got, them, named = parity.ours(record), parity.theirs(record), name(record)
    signed = "apply" not in record["api"]  # there, -(0 - x) was compared
    apart = parity.mismatch(got, them, signed=signed)
    if named == "equal":
        if apart or parity.same_dtypes(got, them):
            return apart
        return "dtypes differ"
    want = DIFFERENCES[named].instead(record)
    if apart is None and parity.same_dtypes(got, them):
        return f"{named!r} is no difference any more"
    if want.error is not None:
        said = got.error is not None and re.search(want.error, got.error)
        return None if said else f"{named}: expected a refusal, got {got}"
    return parity.mismatch(got, want, signed=signed) and (
        f"{named}: {parity.mismatch(got, want, signed=signed)}"
    )


SYSTEMS = ("torch", "tf", "keras-tensorflow", "keras-jax", "keras-torch")

# How many records are equal, and how many fall under each name.
COUNTS: dict[str, dict[str, int]] = {
    "torch": {
        "equal": 88,
        "refused order": 17,
        "norm overflows": 11,
        "one outcome for a block": 5,
        "sparse gradients": 5,
        "integers pass": 4,
        "refused threshold": 2,
        "norm underflows": 2,
        "complex numbers": 1,
    },
    "tf": {
        "equal": 62,
        "norm overflows": 6,
        "refused threshold": 6,
        "infinite threshold": 3,
        "norm underflows": 2,
        "complex numbers": 2,
        "nothing to clip": 2,
        "one outcome for a block": 2,
        "subnormal numbers": 1,
        "norm as a number": 1,
        "mixed dtypes": 1,
        "integers pass": 1,
    },
    "keras-tensorflow": {
        "equal": 73,
        "norm overflows": 6,
        "one outcome for a block": 3,
        "integers pass": 3,
        "refused threshold": 3,
        "mixed dtypes": 2,
        "infinite threshold": 2,
        "complex numbers": 1,
        "nothing to clip": 1,
    },
    "keras-jax": {
        "equal": 69,
        "norm overflows": 8,
        "refused threshold": 3,
        "nothing to clip": 2,
        "subnormal numbers": 2,
        "mixed dtypes": 2,
        "no loss scaling": 2,
        "one outcome for a block": 1,
        "complex numbers": 1,
        "infinite threshold": 1,
    },
    "keras-torch": {
        "equal": 69,
        "norm overflows": 10,
        "refused threshold": 4,
        "nothing to clip": 3,
        "integers pass": 3,
        "one outcome for a block": 2,
        "complex numbers": 2,
        "zero is a threshold": 2,
        "no loss scaling": 2,
        "float64 stays float64": 1,
    },
}


@pytest.fixture(scope="module")
def records() -> list[dict]:
    """All of them, read once."""
    return parity.load()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_record_is_equal_or_named(records: list[dict], system: str) -> None:
    """Each record is equal, or differs as its name says."""
    mine = [r for r in records if r["system"] == system]
    wrong = {r["id"]: complaint(r) for r in mine}
    wrong = {key: why for key, why in wrong.items() if why}
    assert not wrong, "\n".join(f"{key}: {why}" for key, why in wrong.items())
    assert collections.Counter(map(name, mine)) == COUNTS[system]
