"""The optimised programs of 4096 TPU v5p chips and of 8 H100s, which are not here.

Needs libtpu, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12: `scripts/test-all aot`.
"""

import _compiled as c
import pytest

pytestmark = pytest.mark.aot

TARGETS = ("tpu", "gpu")
DTYPES = ("float32", "bfloat16")
ONE = ("shard_map", "explicit", "auto, specs")
OURS = ("clip, adam", "unit norm, adam")
SMALL = 128  # of this side leaves compile faster; what is sent does not depend on it

COUNTED = [
    *(c.Case(t, step, mode, 4) for t in TARGETS for step in OURS for mode in ONE),
    *(c.Case(t, OURS[0], mode, 4, "bfloat16") for t in TARGETS for mode in ONE),
    *(
        c.Case(t, OURS[0], mode, 40, dtype)
        for t in TARGETS
        for mode, dtype in zip(ONE, ("float32", "bfloat16", "bfloat16"), strict=True)
    ),
    c.Case("tpu", OURS[0], "shard_map", 300, "float32", SMALL),
    c.Case("gpu", OURS[0], "shard_map", 300, "float32", SMALL),
    c.Case("gpu", OURS[0], "explicit", 300, "bfloat16", SMALL),
]


def names(case: c.Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", COUNTED, ids=names)
def test_one_all_reduce(case: c.Case) -> None:
    found = c.report(case)
    assert (found.all_reduces, found.all_gathers) == (1, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_automatic_axes_send_no_more_than_optax(target: str, dtype: str) -> None:
    """One for each distinct way to split a leaf, which only XLA knows here."""
    ours = c.report(c.Case(target, "clip, adam", "auto", 4, dtype))
    theirs = c.report(c.Case(target, "optax clip, adam", "auto", 4, dtype))
    assert ours.all_reduces == theirs.all_reduces == 3
    assert ours.all_gathers == 0


@pytest.mark.parametrize("target", TARGETS)
def test_leaves_of_devices_elsewhere_are_not_joined(target: str) -> None:
    """Fails if one device here is taken for all: then split leaves are gathered."""
    found = c.report(c.Case(target, "clip, adam", "auto", 8, "float32", 32))
    assert (found.all_reduces, found.all_gathers) == (3, 0)


@pytest.mark.parametrize("leaves", [4, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["shard_map", "explicit", "auto"])
def test_bytes_moved_on_the_gpu(mode: str, dtype: str, leaves: int) -> None:
    """The gradients are read once more than adam alone reads them, and that is all.

    The partial sums of their squares are counted too, so leaves are large.
    """
    side = 4096 if mode == "auto" else 2048
    adam = c.report(c.Case("gpu", "adam", "shard_map", leaves, dtype, side))
    ours = c.report(c.Case("gpu", "clip, adam", mode, leaves, dtype, side))
    assert round(adam.moved, 2) == 7.00
    assert round(ours.moved, 2) == 8.00


@pytest.mark.parametrize("leaves", [(40, 2048), (40, 512), (300, SMALL)], ids=str)
def test_kernels_on_the_gpu(leaves: tuple[int, int]) -> None:
    """Fewer than optax launches, and no more than a few bytes for it.

    Fails if three sums of a leaf are three kernels, or if small leaves are not added
    to each other first.
    """
    count, side = leaves
    sizes = (count, "float32", side)
    adam = c.report(c.Case("gpu", "adam", "shard_map", *sizes))
    theirs = c.report(c.Case("gpu", "optax clip, adam", "auto", *sizes))
    ours = c.report(c.Case("gpu", "clip, adam", "shard_map", *sizes))
    assert ours.calls - adam.calls <= (theirs.calls - adam.calls) / 4
    assert ours.moved <= theirs.moved * 1.08


@pytest.mark.parametrize("mode", ["shard_map", "explicit"])
def test_bytes_moved_on_the_tpu(mode: str) -> None:
    """Leaves too large for on-chip memory, so that its use does not blur the count."""
    side = 8192
    adam = c.report(c.Case("tpu", "adam", "shard_map", 4, side=side))
    theirs = c.report(c.Case("tpu", "optax clip, adam", "auto", 4, side=side))
    ours = c.report(c.Case("tpu", "clip, adam", mode, 4, side=side))
    assert round(adam.moved, 2) == 7.00
    assert round(ours.moved, 2) == round(theirs.moved, 2) == 8.00
    assert round(ours.accessed, 2) == round(theirs.accessed, 2)


def test_leaves_that_fit_on_chip_are_read_no_more_often() -> None:
    """At most once more than by adam alone."""
    adam = c.report(c.Case("tpu", "adam", "shard_map"))
    ours = c.report(c.Case("tpu", "clip, adam", "shard_map"))
    assert ours.moved <= adam.moved + 1.005


@pytest.mark.parametrize("target", TARGETS)
def test_temporaries_do_not_grow_with_the_leaves(target: str) -> None:
    """Four times the elements, and the partial sums of a reduction as before."""
    small, large = (
        c.report(c.Case(target, "clip, adam", "shard_map", 4, side=side))
        for side in (4096, 8192)
    )
    assert large.temporary <= 2 * small.temporary + 2**16
    assert large.temporary <= 2**20
