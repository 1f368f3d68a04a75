"""The loss as a module that owns the linear layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .function import linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """:func:`linear_cross_entropy` with a linear layer of its own; torch's class of this name.

    Args:
        in_features, num_classes, out_features, bias, device, dtype: as in torch's
            ``LinearCrossEntropyLoss``, whose ``state_dict`` fits.
        reduction, weight, ignore_index, label_smoothing, options: as in torch's.
        softcap, chunk_size, loss_dtype, debug: as in :func:`linear_cross_entropy`.

    Raises:
        RuntimeError: ``weight`` has not one number for each class; ``label_smoothing`` is not
            between 0 and 1.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        softcap: float | None = None,
        chunk_size: int | None = None,
        loss_dtype: torch.dtype | None = None,
        debug: bool = False,
    ) -> None:
        if weight is not None and weight.shape != (num_classes,):
            raise RuntimeError(
                f"expected weight shape to be {(num_classes,)}, got {tuple(weight.shape)}"
            )
        if label_smoothing < 0 or label_smoothing > 1.0:
            raise RuntimeError(
                f"expected label_smoothing to be in range [0, 1], got {label_smoothing}"
            )
        super().__init__()
        self.register_buffer("weight", weight)
        self.num_classes, self.out_features = num_classes, out_features
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing, self.options = label_smoothing, options
        self.softcap, self.chunk_size, self.debug = softcap, chunk_size, debug
        self.loss_dtype = loss_dtype
        classes = math.prod(out_features, start=num_classes)
        self.linear = nn.Linear(in_features, classes, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if self.out_features:  # else it is the parameter itself, which an optimizer can step
            weight = weight.view(self.num_classes, *self.out_features, self.linear.in_features)
            bias = None if bias is None else bias.view(self.num_classes, *self.out_features)
        loss: Tensor = linear_cross_entropy(
            input,
            weight,
            target,
            linear_bias=bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
            softcap=self.softcap,
            chunk_size=self.chunk_size,
            loss_dtype=self.loss_dtype,
            debug=self.debug,
        )
        return loss

    def extra_repr(self) -> str:
        names = "num_classes", "out_features", "reduction", "ignore_index", "label_smoothing"
        shown = [f"{name}={getattr(self, name)}" for name in (*names, "softcap", "chunk_size")]
        return ", ".join([f"in_features={self.linear.in_features}", *shown])
