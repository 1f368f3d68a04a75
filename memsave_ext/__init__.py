"""Train larger PyTorch models in the memory there is, without changing how they train."""

from . import integrations, memory
from ._parts import disable
from ._version import __version__
from .adam import SGD, Adam, AdamW, Lion, in_backward, remove_hooks
from .batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    CpBatchNorm2d,
    SyncBatchNorm,
    convert_batch_norm,
)
from .checkpoint import (
    CheckpointError,
    CheckpointFunction,
    checkpoint,
    checkpoint_modules,
    checkpoint_sequential,
    count_once_contexts,
    is_recomputing,
    patch_torch_checkpoint,
    use_engine_hooks,
)
from .dry_run import is_dry_run
from .elsewhere.weights import weights_on
from .loss_head import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_kl,
    linear_log_probs,
    patch_causal_lm,
    patch_seq2seq_lm,
)
from .memory import fit
from .remat import remat, remat_module

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CheckpointError",
    "CheckpointFunction",
    "CpBatchNorm2d",
    "LinearCrossEntropyLoss",
    "Lion",
    "SyncBatchNorm",
    "__version__",
    "checkpoint",
    "checkpoint_modules",
    "checkpoint_sequential",
    "convert_batch_norm",
    "count_once_contexts",
    "disable",
    "fit",
    "in_backward",
    "integrations",
    "is_dry_run",
    "is_recomputing",
    "linear_cross_entropy",
    "linear_kl",
    "linear_log_probs",
    "memory",
    "patch_causal_lm",
    "patch_seq2seq_lm",
    "patch_torch_checkpoint",
    "remat",
    "remat_module",
    "remove_hooks",
    "use_engine_hooks",
    "weights_on",
]
