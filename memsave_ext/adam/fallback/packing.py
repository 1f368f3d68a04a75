"""Packs both moments of before a step into one tensor while gradients are folded into exp_avg.

This is Packed of csrc/adam/math.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_POSITIVE = (1 << 63) - 1  # all bits but the sign
_NAN = 0x7FF8 << 48  # which stays one when its lower bits are cut off


def pack(exp_avg: Tensor, exp_avg_sq: Tensor, random: Tensor | None) -> Tensor:
    """Returns both moments in the bits of one tensor, kept in place of exp_avg_sq.

    ``random`` rounds float32 moments, which get 16 bits each. Those of float64 get 32.
    """
    if exp_avg.dtype == torch.float64:
        upper = _rounded(_number_bits(exp_avg), 32)
        lower = _rounded(_number_bits(exp_avg_sq) & _POSITIVE, 31)
        return (upper << 32 | lower).view(torch.float64)
    assert random is not None
    upper = exp_avg.bfloat16().view(torch.int16).int()
    squares = exp_avg_sq.view(torch.int32) & 0x7FFFFFFF
    lower = torch.where(exp_avg_sq.isnan(), 0xFF80, squares + (random >> 1) >> 15)
    return (upper << 16 | lower).view(torch.float32)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp_avg and exp_avg_sq."""
    if packed.dtype == torch.float64:
        both = packed.view(torch.int64)
        lower = (both & _WORD) << 31
        return (both >> 32 << 32).view(torch.float64), lower.view(torch.float64)
    bits = packed.view(torch.int32)
    lower = ((bits & 0xFFFF) << 15).view(torch.float32)
    return (bits >> 16 << 16).view(torch.float32), lower


def _number_bits(values: Tensor) -> Tensor:
    """Returns the bits of float64 values, the same for all NaNs."""
    return torch.where(values.isnan(), _NAN, values.view(torch.int64))


def _rounded(bits: Tensor, cut: int) -> Tensor:
    """Returns the bits without that many lower ones, rounded to nearest even."""
    half = 1 << cut - 1
    return bits + (half - 1) + (bits >> cut & 1) >> cut
