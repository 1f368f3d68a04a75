"""Moments of 8 bits, in blocks: codes, and a scale for each block. As csrc/adam/code8.h says, in
torch's operators.

Tensors are float32 and flat where nothing else is said. ``random`` is 16 random bits for each
element, in int32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from .elements import Elements, zeros_like
from .formats import BLOCK
from .precise import square_root, wide

SMALLEST = 4096  # elements of a parameter
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


def takes_blocks(param: Tensor) -> bool:
    """Whether its moments can be of 8 bits: blocks follow memory, and are not worth it in small
    ones."""
    return param.numel() >= SMALLEST and Elements(param).dense


def blocks_of(param: Tensor) -> int:
    return (param.numel() + BLOCK - 1) // BLOCK


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


# by the name of a moment


def encode(name: str, values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    return (encode_exp_avg if name == "exp_avg" else encode_exp_avg_sq)(values, random)


def decode(name: str, codes: Tensor, scale: Tensor) -> Tensor:
    return (decode_exp_avg if name == "exp_avg" else decode_exp_avg_sq)(codes, scale)


def to_blocks(state: dict[str, Tensor], param: Tensor) -> None:
    """Moments become 8 bits, rounded to nearest."""
    elements, half = Elements(param), torch.tensor(0x8000, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        values = elements.flat(state[name]).float()
        codes, state[f"{name}_scale"] = encode(name, values, half.expand(values.shape))
        state[name] = zeros_like(param, torch.uint8).copy_(elements.shaped(codes))


def from_blocks(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A moment of 8 bits in float32."""
    elements = Elements(state[name])
    values = decode(name, elements.flat(state[name]), state[f"{name}_scale"])
    return zeros_like(state[name], torch.float32).copy_(elements.shaped(values))
