"""Arithmetic whose results do not depend on the machine: float32 that rounds each result once, as a
processor's fused operations do, and sums in one order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Returns a float64 copy, in which products and sums of float32 are nearly exact.

    On MPS, which has no float64, the copy keeps its dtype.
    """
    of_mps = tensor.device.type == "mps"
    return tensor.to(tensor.dtype if of_mps else torch.float64, copy=True)


def fused(a: Tensor | float, b: Any, c: Tensor) -> Tensor:
    """Returns a * b + c, for float32 rounded once as by a fused multiply-add.

    Where ``a`` is a tensor ``b`` may be a number, or a scalar tensor.
    """
    wide_sum = wide(a).mul_(b).add_(c) if isinstance(a, Tensor) else wide(c).add_(b, alpha=a)
    return wide_sum.to(c.dtype)


def square_root(values: Tensor) -> Tensor:
    """Returns the root, for float32 rounded to nearest, as torch's own is not on all devices."""
    return wide(values).sqrt_().to(values.dtype)


def total(values: Tensor) -> Tensor:
    """Returns the sum of all, in an order that does not depend on the number of threads.

    torch gives each thread a part where there are many values, and one result; rows it divides
    among threads as a whole.
    """
    flat = values.flatten()
    while flat.numel() > _AT_ONCE:
        whole = flat.numel() // _ROW * _ROW
        flat = torch.cat([flat[:whole].view(-1, _ROW).sum(1), flat[whole:]])
    return flat.sum()


_ROW, _AT_ONCE = 1024, 4096  # torch sums 32768 values and more in several threads
