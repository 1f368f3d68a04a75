"""Blockwise 8-bit moments: a code for each element and a scale for each block.

The encoding of csrc/adam/blockwise_8bit.h in torch's operators. Unless stated otherwise,
tensors are float32 and flat. ``random`` is 16 random bits for each element, in int32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from .elements import Elements, zeros_like
from .formats import BLOCK
from .precise import square_root, wide

SMALLEST = 4096  # elements; smaller parameters have no 8-bit moments
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


def takes_blocks(param: Tensor) -> bool:
    """Whether the moments of ``param`` can be 8-bit.

    Blocks are consecutive in memory, so it must be dense; in small ones they are not worth it.
    """
    return param.numel() >= SMALLEST and Elements(param).dense


def blocks_of(param: Tensor) -> int:
    return (param.numel() + BLOCK - 1) // BLOCK


@functools.cache
def _lines(levels: int) -> list[tuple[float, float, float, float]]:
    """Returns (start, step, offset, inverse) of each level.

    number = start + step * code, and code = offset + inverse * number.
    """
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
    """Returns the number from 0 to 1 that each code stands for."""
    codes = torch.arange(1 << levels, dtype=torch.float64)
    of_levels = [codes * step + start for start, step, _, _ in _lines(levels)]
    return torch.stack(of_levels).amax(0).float()


def _codes(numbers: Tensor, levels: int) -> Tensor:
    """Returns the codes of numbers from 0 to 1, not yet rounded to integers."""
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
    """Returns the codes in int32, padded to whole blocks, and a scale for each block.

    A block with a value that is not finite has a NaN as scale.
    """
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
    """Returns uint8 codes, of which the top bit is the sign, and a scale for each block."""
    codes, scale = _encode(exp_avg.abs(), random, 7, None)
    codes = codes[: exp_avg.numel()]
    finite = scale.isfinite().repeat_interleave(BLOCK)[: exp_avg.numel()]
    return (codes | torch.where(finite & exp_avg.signbit(), 0x80, 0)).byte(), scale


def decode_exp_avg(codes: Tensor, scale: Tensor) -> Tensor:
    magnitudes = _decode(codes & 0x7F, scale, 7)
    return torch.where(codes >= 0x80, -magnitudes, magnitudes)


def encode_exp_avg_sq(exp_avg_sq: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Returns uint8 codes of the square root, and a scale for each block.

    A root that is not 0 does not become 0, because the step is divided by it.
    """
    root = square_root(exp_avg_sq)
    codes, scale = _encode(root, random, 8, least=(root * 1e30).clamp(max=1))
    return codes[: root.numel()].byte(), scale


def decode_exp_avg_sq(codes: Tensor, scale: Tensor) -> Tensor:
    root = _decode(codes, scale, 8)
    return root * root


# The same, for a moment given by its name.


def encode(name: str, values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    return (encode_exp_avg if name == "exp_avg" else encode_exp_avg_sq)(values, random)


def decode(name: str, codes: Tensor, scale: Tensor) -> Tensor:
    return (decode_exp_avg if name == "exp_avg" else decode_exp_avg_sq)(codes, scale)


def to_blocks(state: dict[str, Tensor], param: Tensor) -> None:
    """Converts the moments in ``state`` to blockwise 8-bit, rounded to nearest."""
    elements, half = Elements(param), torch.tensor(0x8000, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        values = elements.flat(state[name]).float()
        codes, state[f"{name}_scale"] = encode(name, values, half.expand(values.shape))
        state[name] = zeros_like(param, torch.uint8).copy_(elements.shaped(codes))


def from_blocks(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns the 8-bit moment ``name`` in float32."""
    elements = Elements(state[name])
    values = decode(name, elements.flat(state[name]), state[f"{name}_scale"])
    return zeros_like(state[name], torch.float32).copy_(elements.shaped(values))
