"""Random bits for stochastic rounding: those of csrc/adam/philox.h, in torch's operators."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


class Draw(IntEnum):
    """What random bits are for: the last word of the Philox counter. Both moments share theirs."""

    PARAM = 0
    MOMENTS = 1


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> list[Tensor]:
    """Philox4x32-10 of Salmon et al. 2011. Words are int64 tensors that broadcast."""
    words = list(counter)
    keys = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, words[0])
        high2, low2 = _multiply(0xCD9E8D57, words[2])
        words = [high2 ^ words[1] ^ keys[0], low2, high0 ^ words[3] ^ keys[1], low0]
        keys = [keys[0] + 0x9E3779B9 & _WORD, keys[1] + 0xBB67AE85 & _WORD]
    return words


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the upper and lower 32 bits of the products, without exceeding 63 bits on the way."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    return upper + (lower >> 16) >> 16, ((upper & 0xFFFF) << 16) + lower & _WORD


def random_bits(
    numel: int, *, seed: int, position: int, step: int | Tensor, draw: Draw, device: torch.device
) -> Tensor:
    """Returns 16 random bits in int32 for each of ``numel`` elements."""
    groups = torch.arange((numel + 7) // 8, device=device)

    def word(value: int | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.int64) & _WORD

    words = philox((groups & _WORD, word(position), word(step), word(draw)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(-1)[:numel].int()
