"""Every public transform, with arguments under which it scales."""

import inspect
import typing
from typing import Any

import jax
import optax

import optax_unitnorm as oun

CLIP = 1e-3  # far below the norm of every tree: all clips bind

ARGUMENTS: dict[str, dict[str, Any]] = {
    "clip_by_global_norm": {"max_norm": CLIP},
    "clip_by_leaf_norm": {"max_norm": CLIP},
    "clip_by_group_norm": {"max_norm": CLIP, "groups": lambda g: halves(g)},
    "clip_by_global_rms": {"max_rms": CLIP},
    "clip_by_leaf_rms": {"max_rms": CLIP},
    "clip_by_param_norm": {"ratio": CLIP},
    "clip_by_value": {"max_value": CLIP},
    "soft_clip_by_global_norm": {"max_norm": CLIP},
    "normalize_to_unit_global_norm": {},
    "normalize_to_unit_leaf_norm": {},
    "normalize_to_unit_group_norm": {"groups": lambda g: halves(g)},
    "normalize_to_unit_global_rms": {},
    "normalize_to_unit_leaf_rms": {},
    "clip_by_global_norm_percentile": {"percentile": 10.0},
    "clip_by_global_norm_zscore": {},
    "clip_by_leaf_norm_ema": {},
    "clip_like_keras": {"global_clipnorm": CLIP},
    "clip_like_torch": {"max_norm": CLIP},
    "record_norm": {},
    "scale_from_norm": {"fn": lambda norm: 1 / (1 + norm)},
    "skip_spikes": {"inner": optax.identity()},
}


def halves(grads: Any) -> Any:
    """Two groups of leaves, taking turns."""
    leaves, treedef = jax.tree.flatten(grads)
    return treedef.unflatten([i % 2 for i in range(len(leaves))])


def every() -> dict[str, optax.GradientTransformationExtraArgs]:
    """All transforms of the package; one without a line above is an error."""
    kinds = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)
    names = [
        name
        for name, member in sorted(vars(oun).items())
        if not name.startswith("_")
        and inspect.isfunction(member)
        and typing.get_type_hints(member).get("return") in kinds
    ]
    return {name: getattr(oun, name)(**ARGUMENTS[name]) for name in names}
