"""Gradients to unit norm, clipped, and measured."""

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
from optax_unitnorm._transform import NormState as NormState
from optax_unitnorm._tree import clip_grad_norm as clip_grad_norm
from optax_unitnorm._tree import global_norm as global_norm
from optax_unitnorm._tree import leaf_norms as leaf_norms
from optax_unitnorm._tree import normalize_grad_norm as normalize_grad_norm
