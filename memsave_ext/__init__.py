"""Train larger PyTorch models in the memory there is, without changing how they train."""

from . import memory
from ._version import __version__
from .batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, CpBatchNorm2d
from .checkpointing import CheckpointFunction, is_recomputing

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CheckpointFunction",
    "CpBatchNorm2d",
    "__version__",
    "is_recomputing",
    "memory",
]
