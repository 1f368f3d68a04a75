"""Batch normalisation over the batches of several processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import Arguments, statistic_dtype
from .calls import Settings, Tensors
from .fallback import update_running
from .modules import NO_RUNNING, CountOnce, Running, run

_moments = torch.ops.memsave_ext.batch_norm_moments.default


class SyncBatchNorm(CountOnce):
    """Drop-in for :class:`torch.nn.SyncBatchNorm`, on CPU (gloo) and CUDA (NCCL).

    Statistics are those of all processes' batches together, which may differ in size or be empty.
    Forward and backward take one collective each, the recompute of a checkpointed region none. In
    all else it is like :class:`BatchNorm1d`. Without ``torch.distributed``, in a group of one
    process, and in eval mode, it uses its own process alone.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in torch.
        process_group: a group of torch.distributed; None is the default group.
        activation, negative_slope: as in :class:`BatchNorm1d`.

    Shapes: input, residual and output are (N, C, *).

    The errors of :class:`BatchNorm1d` are raised, too. That for one value per channel is raised by
    every process, if all processes together have only one. If all batches are empty, no statistics
    are updated.

    Raises:
        ValueError: the input has no channels.
        RuntimeError: ``process_group`` no longer exists; this process is not in it; double backward
            is asked for, or torch.func, forward-mode derivatives or torch.export in training with
            several processes, which are not supported.
    """

    # Does not derive from torch.nn.SyncBatchNorm, which DistributedDataParallel refuses on the CPU.
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, **kwargs
        )
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    def _run_and_count(
        self, tensors: Tensors, settings: Settings, running: Running
    ) -> tuple[Tensor, Tensor]:
        if settings.group is None:
            return super()._run_and_count(tensors, settings, running)
        with torch.no_grad():
            moments = self._gather(_moments(tensors.input.detach()), settings.group)
            # The total count waits for the device, so it is read only where it can be below 2.
            if Arguments(tensors.input).count < 2:
                total = int(_counts(moments).sum())
                if total == 1:  # on every process
                    raise ValueError(
                        "Expected more than 1 value per channel when training, got input size "
                        f"{tensors.input.shape}, and 1 value in the whole process group"
                    )
                if total == 0:  # nothing to count
                    running = NO_RUNNING
            statistics, mean, var = _combine(moments, tensors.input, settings.eps)
        # The call raises its errors before anything is updated.
        output, _ = run(tensors, settings, statistics)
        running_mean, running_var, share = running
        with torch.no_grad():
            update_running(running_mean, mean, share)
            update_running(running_var, var, share)
        return output, statistics

    def _gather(self, local: Tensor, group_name: str) -> Tensor:
        """Return the moments of all processes, shape (processes, bytes)."""
        size, functional = self._group_size(), torch.ops._c10d_functional
        try:
            gathered = functional.all_gather_into_tensor(local, size, group_name)
        except RuntimeError as error:
            if "resolve the process group" not in str(error):
                raise
            raise RuntimeError(
                f"SyncBatchNorm: its process_group does not exist any more: {error}"
            ) from error
        return functional.wait_tensor(gathered).view(size, -1)  # type: ignore[no-any-return]

    def _group_name(self) -> str | None:
        if not (self.training and dist.is_available()):
            return None
        if not dist.is_initialized():
            if self.process_group is None:
                return None
            raise RuntimeError(
                "SyncBatchNorm: its process_group does not exist any more: torch.distributed is "
                "not initialized"
            )
        return None if self._group_size() == 1 else self._group().group_name

    def _group_size(self) -> int:
        group = self._group()
        try:
            size = dist.get_world_size(group)
        except (RuntimeError, ValueError, KeyError) as error:
            raise RuntimeError(
                f"SyncBatchNorm: its process_group does not exist any more: {error}"
            ) from error
        if size < 1:
            raise RuntimeError("SyncBatchNorm: this process is not in its process_group")
        return size

    def _group(self) -> Any:
        return self.process_group or dist.group.WORLD


def _counts(moments: Tensor) -> Tensor:
    """Return the counts of all processes, shape (processes, 1)."""
    return moments[:, -8:].view(torch.int64)


def _combine(moments: Tensor, input: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return statistics (2, C), mean (C) and unbiased variance (C) of all batches together.

    Merges them as Chan, Golub and LeVeque 1983, in float64 and in the order of ranks, so that all
    processes get the same bits.
    """
    dtype = statistic_dtype(input)
    channels = input.shape[1]
    counts = _counts(moments).double()
    means, m2s = moments[:, :-8].view(dtype).view(-1, 2, channels).double().unbind(1)
    total = counts.sum().clamp(min=1)
    mean = (means * counts).sum(0) / total
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    statistics = torch.stack([mean, (m2 / total + eps).rsqrt()]).to(dtype)
    return statistics, mean, m2 / (total - 1)
