"""Gradients to unit norm, clipped, and measured: on every dtype and device layout.

Every transform here measures norms of the gradients, decides a scale from each norm,
and applies it. Put one before the optimizer, in `optax.chain`.

Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_unitnorm as oun
    >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(1)}
    >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.0])}
    >>> tx = optax.chain(oun.clip_by_global_norm(2.5), optax.sgd(1.0))
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> updates["w"]
    Array([-1.5, -2. ], dtype=float32)
    >>> float(oun.metrics(state)["grad_norm"])
    5.0

Transforms, and what each multiplies the gradients by (n is a norm, r = n / sqrt(size)
a root mean square)::

    normalize_to_unit_global_norm()            1 / n, of the whole tree
    normalize_to_unit_leaf_norm(stacked_axis)  1 / n, of each leaf
    normalize_to_unit_group_norm(groups)       1 / n, of each labelled group
    normalize_to_unit_global_rms()             1 / r, of the whole tree
    normalize_to_unit_leaf_rms(stacked_axis)   1 / r, of each leaf
    clip_by_global_norm(max_norm)              min(1, max_norm / n), n of the tree
    clip_by_leaf_norm(max_norm, stacked_axis)  min(1, max_norm / n), n of each leaf
    clip_by_group_norm(max_norm, groups)       min(1, max_norm / n), n of each group
    clip_by_global_rms(max_rms)                min(1, max_rms / r), r of the tree
    clip_by_leaf_rms(max_rms, stacked_axis)    min(1, max_rms / r), r of each leaf
    clip_by_param_norm(ratio, eps, axis)       min(1, ratio * max(m, eps) / n), n of
                                               each unit, m of its parameters
    soft_clip_by_global_norm(max_norm)         max_norm / (max_norm + n)
    scale_from_norm(fn, per)                   fn(n)
    record_norm()                              1, and the norm is recorded
    clip_by_value(max_value, min_value)        no norm: each element by itself

Thresholds that follow the history of norms::

    clip_by_global_norm_percentile, clip_by_global_norm_zscore, clip_by_leaf_norm_ema
    skip_spikes(inner)                         no update at all on a spike

With the arithmetic of elsewhere: `clip_like_keras`, `clip_like_torch`.

Functions on trees, outside any optimizer::

    global_norm(tree)                          the norm
    leaf_norms(tree)                           a norm for each path
    normalize_grad_norm(grads)                 (grads, norm)
    clip_grad_norm(grads, max_norm)            (grads, norm)
    metrics(opt_state)                         scalars to log, from every NormState
    describe(tree)                             a table: shares, magnitudes, NaN, inf

Options, by keyword, of whatever measures norms::

    ord           None (2), 1, inf or any p >= 1; static. Not for root mean squares.
    mask          A tree (or prefix, or callable of the gradients) of bools: leaves
                  at False are neither counted nor scaled.
    sharded_over  Over which mesh axes leaves are split, as pieces of larger arrays.
                  "auto" reads it from the types: right under jit, and in shard_map
                  with check_vma=True. Inside pmap and check_vma=False types say
                  nothing, and an error asks: is each leaf whole on every device?
                  Then None (average over devices first, if that is what you mean).
                  A piece of a larger array? Then the axis name, a tuple of names,
                  or a prefix tree of PartitionSpecs. Norms along part of a split
                  leaf need the specs. Names are ignored outside mapped regions.
                  tx.update(..., sharded_over=None) says it in the training step.
    nonfinite     What a NaN or inf makes of all that shares its norm: "propagate"
                  (NaN) or "zero". Not for record_norm.
    min_norm      When normalising: divide by max(n, min_norm).

Thresholds (`max_norm`, `max_rms`, `max_value`, `min_value`, `ratio`) are numbers,
scalar arrays, traced or not, or optax schedules, which run on the transform's own
step counter. `stacked_axis`: each slice along it counts as a leaf (scanned layers).
`groups`: a tree (or prefix, or callable) of labels; None leaves a leaf out.

Leaves that count are floating and complex: float8 to float64, jax and numpy arrays,
Python floats. None, MaskedNode, integers, bools, keys and empty arrays pass untouched.

A wrong argument is a TypeError or ValueError when the transform is built, "`name` must
be rule; got value."; what does not fit the gradients is one at update, and names the
path. Values under jit are never looked at.

Whatever measures norms records the norm, the scale and counts of steps in its state, a
`NormState`.

Guarantees:
    - Norms agree with float64 to 4 float32 eps, however leaves are cut, at any
      magnitude that float32 holds (tests: test_fold.py::test_cuts,
      ::test_orders_and_magnitudes, ::test_every_power_of_two).
    - Each element is the exact product, rounded once to its own dtype (tests:
      test_contract.py::test_oracle, ::test_structure_and_dtypes).
    - Zeros stay zeros, with a finite derivative (tests:
      test_contract.py::test_zero, ::test_derivative_at_zero).
    - A clip that does not bind leaves the same bits (tests:
      test_contract.py::test_not_binding).
    - A NaN or inf never makes a mixture (tests: test_contract.py::test_nonfinite).
    - Leaves that do not count stay as they are; boxes keep their type (tests:
      test_contract.py::test_leaves_that_do_not_count,
      test_leaves.py::test_boxes_keep_their_type).
    - Split over devices, all is as on one device, bit for bit the same on each
      (tests: test_devices_auto.py::test_every_transform_and_order,
      ::test_training_equals_one_device,
      test_devices_stated.py::test_specs_of_each_leaf,
      ::test_pmap_training_with_averaged_gradients).
    - Under jit no leaf is gathered, and with explicit axes or stated specs one
      all-reduce serves all (tests: test_devices_jit.py::test_sharded_arrays,
      test_cases.py::test_jit_gathers_nothing).
    - Where types cannot tell how leaves lie, an error asks; where gradients vary and
      their parameters do not, it says so (tests:
      test_devices_stated.py::test_auto_asks_the_question,
      test_devices_auto.py::test_gradients_that_vary_where_parameters_do_not).
    - jit, vmap, scan, checkpoint, donation, one compilation for all thresholds
      (tests: test_contract.py::test_vmap, ::test_scan_and_while,
      ::test_checkpoint, ::test_donated, ::test_one_compilation).
    - Every optax wrapper, flax and equinox (tests: test_compose.py::test_chain,
      ::test_masked_twice, ::test_partition, ::test_multisteps,
      ::test_flax_nnx, ::test_flax_linen_partitioned, ::test_equinox,
      test_contract.py::test_inject_hyperparams).
    - A wrong argument is refused in one sentence (tests:
      test_contract.py::test_bad_threshold, test_transform.py::test_message_shape).
"""

from optax_unitnorm._clip import clip_by_global_norm as clip_by_global_norm
from optax_unitnorm._clip import clip_by_global_rms as clip_by_global_rms
from optax_unitnorm._clip import clip_by_group_norm as clip_by_group_norm
from optax_unitnorm._clip import clip_by_leaf_norm as clip_by_leaf_norm
from optax_unitnorm._clip import clip_by_leaf_rms as clip_by_leaf_rms
from optax_unitnorm._clip import clip_by_param_norm as clip_by_param_norm
from optax_unitnorm._clip import clip_by_value as clip_by_value
from optax_unitnorm._clip import record_norm as record_norm
from optax_unitnorm._clip import scale_from_norm as scale_from_norm
from optax_unitnorm._clip import soft_clip_by_global_norm as soft_clip_by_global_norm
from optax_unitnorm._history import (
    clip_by_global_norm_percentile as clip_by_global_norm_percentile,
)
from optax_unitnorm._history import (
    clip_by_global_norm_zscore as clip_by_global_norm_zscore,
)
from optax_unitnorm._history import clip_by_leaf_norm_ema as clip_by_leaf_norm_ema
from optax_unitnorm._migrate import clip_like_keras as clip_like_keras
from optax_unitnorm._migrate import clip_like_torch as clip_like_torch
from optax_unitnorm._monitor import describe as describe
from optax_unitnorm._monitor import metrics as metrics
from optax_unitnorm._normalize import (
    normalize_to_unit_global_norm as normalize_to_unit_global_norm,
)
from optax_unitnorm._normalize import (
    normalize_to_unit_global_rms as normalize_to_unit_global_rms,
)
from optax_unitnorm._normalize import (
    normalize_to_unit_group_norm as normalize_to_unit_group_norm,
)
from optax_unitnorm._normalize import (
    normalize_to_unit_leaf_norm as normalize_to_unit_leaf_norm,
)
from optax_unitnorm._normalize import (
    normalize_to_unit_leaf_rms as normalize_to_unit_leaf_rms,
)
from optax_unitnorm._skip import skip_spikes as skip_spikes
from optax_unitnorm._transform import NormState as NormState
from optax_unitnorm._tree import clip_grad_norm as clip_grad_norm
from optax_unitnorm._tree import global_norm as global_norm
from optax_unitnorm._tree import leaf_norms as leaf_norms
from optax_unitnorm._tree import normalize_grad_norm as normalize_grad_norm
