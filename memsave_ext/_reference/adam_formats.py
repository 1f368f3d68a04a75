"""How Adam's parameters and states are stored, and which random numbers round them: what
csrc/adam/formats.h, code8.h and philox.h say, in torch's operators.

Tensors are float32 and flat where nothing else is said. ``random`` is what :func:`random_bits`
returns.
"""

from __future__ import annotations

import functools
from enum import IntEnum

import torch
from torch import Tensor

BLOCK = 256
SMALLEST_OF_BLOCKS = 4096  # elements of a parameter

_WORD = 0xFFFFFFFF
_NAN = 0x7FC00000


class Draw(IntEnum):
    """What random bits are for, the last word of their counter."""

    PARAM = 0
    EXP_AVG = 1
    EXP_AVG_SQ = 2
    MAX_EXP_AVG_SQ = 3


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


# random bits


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
    """Both halves of the products, in steps that 63 bits are enough for."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    return upper + (lower >> 16) >> 16, ((upper & 0xFFFF) << 16) + lower & _WORD


def random_bits(
    numel: int, *, seed: int, position: int, step: int | Tensor, draw: Draw, device: torch.device
) -> Tensor:
    """16 random bits for each element of a tensor, in int32."""
    groups = torch.arange((numel + 7) // 8, device=device)

    def word(value: int | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.int64) & _WORD

    words = philox((groups & _WORD, word(position), word(step), word(draw)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(-1)[:numel].int()


# parameters of 16 bits


def round_at_random(values: Tensor, random: Tensor) -> Tensor:
    """To bfloat16, up in proportion to the distance from below."""
    return _upper(_bits(values) + random)


def kahan(values: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16, and what rounding took, as another. An infinity has no rest: with one it would be
    no number when it is read again."""
    upper = values.bfloat16()
    rest = values - upper.float()
    return upper, torch.where(rest.isfinite(), rest, 0).bfloat16()


def unkahan(upper: Tensor, rest: Tensor) -> Tensor:
    return upper.float() + rest.float()


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """All bits: a bfloat16, of the nearest, and an int16."""
    bits = _bits(values)
    return _upper(bits + 0x8000), bits.to(torch.int16)


def unsplit(upper: Tensor, rest: Tensor) -> Tensor:
    return ((upper.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def _bits(values: Tensor) -> Tensor:
    """With one NaN for all, to whose bits others can be added."""
    return torch.where(values.isnan(), _NAN, values.view(torch.int32))


def _upper(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


# moments in blocks of 8-bit codes


@functools.cache
def _lines(levels: int) -> list[tuple[float, float, float, float]]:
    """Of each level: number = start + step * code, and code = offset + inverse * number."""
    lines = []
    for level in range(levels):
        top = 1.0
        for _ in range(levels - 1 - level):
            top /= 10
        codes = 1 << level
        step = 0.9 * top / codes if level else top
        start = top - step * (2 * codes - 1) if level else 0.0
        exact = torch.tensor([start, step, -start / step, 1 / step], dtype=torch.float64)
        start, step, offset, inverse = exact.float().tolist()
        lines.append((start, step, offset, inverse))
    return lines


@functools.cache
def _numbers(levels: int) -> Tensor:
    """Of all codes."""
    codes = torch.arange(1 << levels, dtype=torch.float64)
    of_levels = [codes * step + start for start, step, _, _ in _lines(levels)]
    return torch.stack(of_levels).amax(0).float()


def _codes(numbers: Tensor, levels: int) -> Tensor:
    """Not rounded."""
    numbers = wide(numbers)
    codes = torch.full_like(numbers, float("inf"))
    for _, _, offset, inverse in _lines(levels):
        codes = torch.minimum(codes, numbers * inverse + offset)
    return codes.float()


def _blocks(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _encode(
    values: Tensor, random: Tensor, levels: int, least: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes as int32 and scales. A block with a value that is not finite is shown by its scale."""
    values, random = _blocks(values), _blocks(random)
    scale = values.amax(1, keepdim=True)
    scale = torch.where(scale.isfinite(), scale, float("nan"))
    inverse = (1 / scale).clamp(max=torch.finfo(torch.float32).max)
    codes = _codes(values * inverse, levels)
    if least is not None:
        codes = torch.maximum(codes, _blocks(least))
    codes = (wide(codes) + wide(random) / 65536).float().clamp(max=(1 << levels) - 1)
    codes = torch.where(scale.isnan(), 0, codes).int()
    return codes.view(-1), scale.view(-1)


def _decode(codes: Tensor, scale: Tensor, levels: int) -> Tensor:
    numbers = _numbers(levels).to(codes.device)[codes.int()]
    return (_blocks(numbers) * scale[:, None]).view(-1)[: codes.numel()]


def encode_exp_avg(exp_avg: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes, and a scale for each block."""
    codes, scale = _encode(exp_avg.abs(), random, 7, None)
    codes = codes[: exp_avg.numel()]
    finite = scale.isfinite().repeat_interleave(BLOCK)[: exp_avg.numel()]
    return (codes | torch.where(finite & exp_avg.signbit(), 0x80, 0)).byte(), scale


def decode_exp_avg(codes: Tensor, scale: Tensor) -> Tensor:
    magnitudes = _decode(codes & 0x7F, scale, 7)
    return torch.where(codes >= 0x80, -magnitudes, magnitudes)


def encode_exp_avg_sq(exp_avg_sq: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Likewise, of the root. No root but 0 becomes 0, by which a step would be divided."""
    root = square_root(exp_avg_sq)
    codes, scale = _encode(root, random, 8, least=(root * 1e30).clamp(max=1))
    return codes[: root.numel()].byte(), scale


def decode_exp_avg_sq(codes: Tensor, scale: Tensor) -> Tensor:
    root = _decode(codes, scale, 8)
    return root * root


# moments as they were before a step whose gradients are being folded into exp_avg


def pack(exp_avg: Tensor, exp_avg_sq: Tensor, random: Tensor | None) -> Tensor:
    """Both in the bits of one. ``random`` is needed with float32; float64 has room for floats."""
    if exp_avg.dtype == torch.float64:
        upper, lower = (t.float().view(torch.int32).long() for t in (exp_avg, exp_avg_sq))
        return (upper << 32 | lower & _WORD).view(torch.float64)
    assert random is not None
    upper = exp_avg.bfloat16().view(torch.int16).int()
    squares = exp_avg_sq.view(torch.int32) & 0x7FFFFFFF
    lower = torch.where(exp_avg_sq.isnan(), 0xFF80, squares + (random >> 1) >> 15)
    return (upper << 16 | lower).view(torch.float32)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """exp_avg and exp_avg_sq."""
    if packed.dtype == torch.float64:
        both = packed.view(torch.int64)
        upper, lower = ((t.int()).view(torch.float32).double() for t in (both >> 32, both))
        return upper, lower
    bits = packed.view(torch.int32)
    lower = ((bits & 0xFFFF) << 15).view(torch.float32)
    return (bits >> 16 << 16).view(torch.float32), lower
