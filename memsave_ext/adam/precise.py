"""Float32 arithmetic with one rounding for each result, as of the processors' fused operations."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """A copy in which products and sums of float32 are all but exact."""
    of_mps = tensor.device.type == "mps"  # which has no float64
    return tensor.to(tensor.dtype if of_mps else torch.float64, copy=True)


def fused(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, of float32 rounded once, as by a fused multiply-add."""
    wide_sum = wide(a).mul_(b).add_(c) if isinstance(a, Tensor) else wide(c).add_(b, alpha=a)
    return wide_sum.to(c.dtype)


def square_root(values: Tensor) -> Tensor:
    """Of float32 rounded to nearest, which torch's own is not everywhere."""
    return wide(values).sqrt_().to(values.dtype)
