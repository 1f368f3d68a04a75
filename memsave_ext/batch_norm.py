"""Batch normalisation that counts its statistics once, also where a checkpoint runs it twice.

torch's own counts twice there (pytorch#96136): once in the forward and once in the recompute.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .checkpointing import is_recomputing


class _CountOnce(_BatchNorm):
    """Runs on torch's kernel; a recompute normalises with the batch and updates nothing."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.track_running_stats and is_recomputing()):
            return super().forward(input)
        self._check_input_dim(input)
        # Running statistics take no part in the output of a training forward. Copies take the
        # update, because a recompute must save as many tensors as the forward did.
        mean = None if self.running_mean is None else self.running_mean.clone()
        var = None if self.running_var is None else self.running_var.clone()
        return F.batch_norm(input, mean, var, self.weight, self.bias, True, 0.1, self.eps)


class BatchNorm1d(_CountOnce, torch.nn.BatchNorm1d):
    """Drop-in for :class:`torch.nn.BatchNorm1d`: same arguments, state_dict and results.

    Input and output have shape (N, C) or (N, C, L). ``running_mean``, ``running_var`` and
    ``num_batches_tracked`` are updated in the forward of a :class:`CheckpointFunction` or
    :func:`checkpoint` region and not in its recompute. Ioffe and Szegedy 2015, arXiv 1502.03167.
    """


class BatchNorm2d(_CountOnce, torch.nn.BatchNorm2d):
    """Drop-in for :class:`torch.nn.BatchNorm2d`, as :class:`BatchNorm1d` for shape (N, C, H, W)."""


class BatchNorm3d(_CountOnce, torch.nn.BatchNorm3d):
    """Drop-in for :class:`torch.nn.BatchNorm3d`, as :class:`BatchNorm1d` for (N, C, D, H, W)."""


CpBatchNorm2d = BatchNorm2d
