"""BatchNorm1d, BatchNorm2d and BatchNorm3d."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .. import _ops  # noqa: F401  # defines the operators
from ..checkpointing import tapes
from . import record

_forward = torch.ops.memsave_ext.batch_norm_forward.default


class CountOnce(_BatchNorm):
    """What the modules share. Keeps torch's parameters, buffers and options."""

    # Of a converted module, which was not made by __init__.
    activation: str | None = None
    negative_slope: float = 0.01

    def __init__(
        self,
        *args: Any,
        activation: str | None = None,
        negative_slope: float = 0.01,
        **kwargs: Any,
    ) -> None:
        if activation not in (None, "relu", "leaky_relu"):
            raise ValueError(
                f"{type(self).__name__}: activation must be None, 'relu' or 'leaky_relu', got "
                f"{activation!r}"
            )
        super().__init__(*args, **kwargs)
        self.activation = activation
        self.negative_slope = negative_slope

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)
        if _must_use_torch():
            output = super().forward(input)
            return self._activate(output if residual is None else output + residual)
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return self._run(input, residual, None, training=False)[0]
        return self._with_batch_statistics(input, residual)

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        if self.activation is not None:
            text += f", activation={self.activation!r}"
        if self.activation == "leaky_relu":
            text += f", negative_slope={self.negative_slope}"
        return text

    def _with_batch_statistics(self, input: Tensor, residual: Tensor | None) -> Tensor:
        around = tapes.NOTHING if torch.compiler.is_compiling() else tapes.enclosing()
        found = record.find(self, input, around.replay)
        if found is not None:
            output, _ = self._run(input, residual, found.statistics, group=self._group_name())
        else:
            output, statistics = self._run_and_count(input, residual)
            if self.training and self.track_running_stats and self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            if around.recording:
                found = record.Record.of(self, input, statistics)
        if found is not None:
            record.keep(self, found, around.recording)
        return output

    def _run_and_count(self, input: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._run(input, residual, None, running=self._running())

    def _group_name(self) -> str | None:
        """Of the processes whose statistics are shared."""
        return None

    def _running(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The buffers to update, and the share of the batch in them."""
        if not (self.training and self.track_running_stats):
            return None, None, 0.0
        if self.momentum is not None:
            return self.running_mean, self.running_var, self.momentum
        count = self.num_batches_tracked
        share = 0.0 if count is None else 1.0 / (float(count) + 1.0)
        return self.running_mean, self.running_var, share

    def _run(
        self,
        input: Tensor,
        residual: Tensor | None,
        statistics: Tensor | None,
        training: bool = True,
        running: tuple[Tensor | None, Tensor | None, float] | None = None,
        group: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not training:
            running = self.running_mean, self.running_var, 0.0
        mean, var, momentum = running or (None, None, 0.0)
        result: tuple[Tensor, Tensor] = _forward(
            input, self.weight, self.bias, residual, statistics, mean, var, training, momentum,
            self.eps, self.activation or "none", self.negative_slope, group,
        )  # fmt: skip
        return result

    def _activate(self, z: Tensor) -> Tensor:
        if self.activation == "relu":
            return F.relu(z)
        return F.leaky_relu(z, self.negative_slope) if self.activation == "leaky_relu" else z


def _must_use_torch() -> bool:
    """torch.func transforms, forward-mode derivatives and export know only torch's operators."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.compiler.is_exporting()
    )


class BatchNorm1d(CountOnce, torch.nn.BatchNorm1d):
    """Drop-in for :class:`torch.nn.BatchNorm1d`: same arguments, state_dict and meaning.

    In training it differs in three ways. Inside a checkpointed region (this package's, torch's, or
    any other that runs a function again in backward) the batch is counted once: the recompute
    takes mean and variance from the first forward, in one pass, and updates nothing; torch counts
    again (pytorch#96136). An activation can be fused, after adding a residual:
    ``activation(bn(input) + residual)``. And when the call raises, nothing was updated.

    Args:
        activation: None, "relu" or "leaky_relu". What is saved for backward is the input, not the
            output of the activation.
        negative_slope: of "leaky_relu".
        *args, **kwargs: those of :class:`torch.nn.BatchNorm1d`: num_features, eps, momentum,
            affine, track_running_stats, device, dtype, bias.

    Shapes: input, residual and output (N, C) or (N, C, L), of one floating-point dtype. Statistics
    are computed in float32 (float64 for float64), whatever the dtype of the parameters.

    Raises:
        ValueError: an unknown activation; another number of dimensions; one value per channel in
            training.
        RuntimeError: another number of channels, a residual of another shape or dtype, tensors on
            several devices; in a recompute: weight or bias changed since the forward.

    Under torch.func transforms, forward-mode derivatives and torch.export torch's kernel runs.
    Source: Ioffe and Szegedy 2015, arXiv 1502.03167.
    """


class BatchNorm2d(CountOnce, torch.nn.BatchNorm2d):
    """Drop-in for :class:`torch.nn.BatchNorm2d`, as :class:`BatchNorm1d` for shape (N, C, H, W)."""


class BatchNorm3d(CountOnce, torch.nn.BatchNorm3d):
    """Drop-in for :class:`torch.nn.BatchNorm3d`, as :class:`BatchNorm1d` for (N, C, D, H, W)."""


CpBatchNorm2d = BatchNorm2d
