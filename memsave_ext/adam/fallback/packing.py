"""Packs both moments of before a step into one tensor while gradients are folded into exp_avg.

This is Packed of csrc/adam/math.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def pack(exp_avg: Tensor, exp_avg_sq: Tensor, random: Tensor | None) -> Tensor:
    """Returns both moments in the bits of one tensor, kept in place of exp_avg_sq.

    ``random`` rounds float32 moments, which get 16 bits each. float64 has room for two floats.
    """
    if exp_avg.dtype == torch.float64:
        upper, lower = (t.float().view(torch.int32).long() for t in (exp_avg, exp_avg_sq))
        return (upper << 32 | lower & _WORD).view(torch.float64)
    assert random is not None
    upper = exp_avg.bfloat16().view(torch.int16).int()
    squares = exp_avg_sq.view(torch.int32) & 0x7FFFFFFF
    lower = torch.where(exp_avg_sq.isnan(), 0xFF80, squares + (random >> 1) >> 15)
    return (upper << 16 | lower).view(torch.float32)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp_avg and exp_avg_sq."""
    if packed.dtype == torch.float64:
        both = packed.view(torch.int64)
        upper, lower = ((t.int()).view(torch.float32).double() for t in (both >> 32, both))
        return upper, lower
    bits = packed.view(torch.int32)
    lower = ((bits & 0xFFFF) << 15).view(torch.float32)
    return (bits >> 16 << 16).view(torch.float32), lower
