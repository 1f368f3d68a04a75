"""The arguments of the batch_norm operators, under the names in their schemas, and their checks.

The kernels of csrc take only arguments that pass these checks. They leave all others to the
fallback, which raises the errors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .activations import check_activation


@dataclass(slots=True)
class Arguments:
    """Arguments that an operator does not take keep their defaults."""

    input: Tensor
    grad: Any = None  # like the next two, a tensor wherever the schema requires one
    statistics: Any = None
    means: Any = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    training: bool = False
    momentum: float = 0.0
    eps: float = 0.0
    activation: str = "none"
    negative_slope: float = 0.0
    group: str | None = None
    output_mask: Sequence[bool] = ()

    @property
    def count(self) -> int:
        """Values per channel."""
        return self.input.numel() // self.input.shape[1] if self.input.shape[1] else 0


@functools.cache
def names(operator: str) -> tuple[str, ...]:
    schema = getattr(torch.ops.memsave_ext, operator).default._schema
    return tuple(argument.name for argument in schema.arguments)


def read(operator: str, values: Sequence[Any]) -> Arguments:
    return Arguments(**dict(zip(names(operator), values, strict=True)))


def call(operator: str, args: Arguments) -> Any:
    return getattr(torch.ops.memsave_ext, operator)(*(getattr(args, n) for n in names(operator)))


def statistic_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def memory_format(input: Tensor) -> torch.memory_format:
    """Return the output's format: that of a dense input, or else the one that torch suggests."""
    if input.is_contiguous():
        return torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if last is not None and input.is_contiguous(memory_format=last):
        return last
    return torch._prims_common.suggest_memory_format(input)


def grad_memory_format(input: Tensor) -> torch.memory_format:
    """Return the format of the input's gradient, which is that of torch's gradient.

    Where a size is 1, the same memory can be contiguous in both formats; then it is the suggested
    one.
    """
    suggested = torch._prims_common.suggest_memory_format(input)
    if input.is_contiguous(memory_format=suggested):
        return suggested
    return memory_format(input)


def nothing(input: Tensor) -> Tensor:
    return input.new_empty(0, dtype=statistic_dtype(input))


def check(args: Arguments) -> None:
    input = args.input
    if input.dim() < 2:
        raise RuntimeError(
            f"batch_norm: expected an input of shape (N, C, *), got {list(input.shape)}"
        )
    if input.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise NotImplementedError(f'"batch_norm" not implemented for {input.dtype}')
    check_activation("batch_norm", args.activation)
    for name in ("weight", "bias", "running_mean", "running_var"):
        vector = _on_device(args, name)
        if vector is None:
            continue
        if vector.numel() != input.shape[1]:
            raise RuntimeError(
                f"{name} should contain {input.shape[1]} elements not {vector.numel()}"
            )
        if not vector.is_floating_point():
            raise RuntimeError(
                f"batch_norm: {name} must be a floating-point tensor, got {vector.dtype}"
            )
    for name in ("residual", "grad"):
        like = _on_device(args, name)
        if like is not None and (like.shape != input.shape or like.dtype != input.dtype):
            raise RuntimeError(
                f"batch_norm: {name} must have the shape and dtype of input, "
                f"{list(input.shape)} {input.dtype}, got {list(like.shape)} {like.dtype}"
            )
    dtype, shape = statistic_dtype(input), (2, input.shape[1])
    for name in ("statistics", "means"):
        rows = _on_device(args, name)
        if rows is None or (rows.dtype == dtype and rows.shape == shape and rows.is_contiguous()):
            continue
        raise RuntimeError(
            f"batch_norm: {name} must be a contiguous "
            f"{'Double' if dtype == torch.float64 else 'Float'} tensor of shape {list(shape)}, got "
            f"{rows.dtype} {list(rows.shape)}"
        )


def _on_device(args: Arguments, name: str) -> Tensor | None:
    tensor: Tensor | None = getattr(args, name)
    if tensor is not None and tensor.device != args.input.device:
        raise RuntimeError(
            f"batch_norm: expected all tensors to be on the same device, but {name} is on "
            f"{tensor.device} and input on {args.input.device}"
        )
    return tensor
