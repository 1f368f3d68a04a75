"""Recompute checkpointing: keep a region's inputs, run it again in backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from . import saved_parameters  # noqa: F401
from .errors import CheckpointError
from .forward_records import count_once_contexts
from .function import CheckpointFunction, is_recomputing
from .models import CheckpointHandle, checkpoint_modules, checkpoint_sequential
from .patch import patch_torch_checkpoint
from .region import checkpoint, use_engine_hooks

__all__ = [
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointHandle",
    "checkpoint",
    "checkpoint_modules",
    "checkpoint_sequential",
    "count_once_contexts",
    "is_recomputing",
    "patch_torch_checkpoint",
    "use_engine_hooks",
]
