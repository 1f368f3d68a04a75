"""Batch normalisation that counts its statistics once, also where a checkpoint runs it twice."""

from .convert import convert_batch_norm
from .modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, CpBatchNorm2d
from .sync import SyncBatchNorm

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CpBatchNorm2d",
    "SyncBatchNorm",
    "convert_batch_norm",
]
