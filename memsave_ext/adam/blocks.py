"""Blockwise moments: a code for each element and a scale for each block.

The encoding of csrc/adam/blockwise.h in torch's operators. Unless stated otherwise, tensors are
float32 and flat. ``random`` is 16 random bits for each element, in int32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..shared import dtensor
from .elements import Elements, zeros_like
from .formats import STATE_FORMATS, Codes, StateFormat, first_of_state, key_of_state
from .precise import square_root, wide

_CODED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # moments that can be in blocks
SMALLEST = 4096  # elements; smaller parameters have no moments in blocks
_LOST = 2.0**63
_PART = 1 << 17  # elements that are converted at once, whole blocks
SCALES = tuple(f"{name}_scale" for name in _CODED)
_SAVED = "codes"  # what a saved state has under the name of a moment in blocks


def takes_blocks(param: Tensor) -> bool:
    """Whether the moments of ``param`` can be in blocks.

    Blocks are consecutive in memory, so it must be dense; in small ones they are not worth it.
    Of a DTensor all shards together decide, so that any number of processes has the same states.
    """
    return param.numel() >= SMALLEST and Elements(dtensor.local_tensor(param)).dense


def blocks_of(param: Tensor, spec: Codes) -> int:
    return (param.numel() + spec.block - 1) // spec.block


def scale_shape(param: Tensor, spec: Codes) -> torch.Size:
    """Returns the shape of a parameter's scales; of a DTensor those of all processes."""
    if dtensor.is_dtensor(param):
        return dtensor.scale_shape(param, spec.block)
    return torch.Size([blocks_of(param, spec)])


def coded_format(state: Mapping[str, Tensor]) -> StateFormat | None:
    """Returns the format of a state in blocks; None for others."""
    if not any(name in state for name in SCALES):
        return None
    key = key_of_state(state)
    return next((row for row in STATE_FORMATS if row.codes and (row.dtype, row.joint) == key), None)


def codes_to_saved(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state as it is saved, with the codes of each moment in a dict of their own.

    ``torch.distributed.checkpoint`` compares names and sizes alone, not dtypes: it would read codes
    as the float32 moments of an optimizer that has no blocks.
    """
    coded = [n for n in _CODED if f"{n}_scale" in state and isinstance(state.get(n), Tensor)]
    return state | {name: {_SAVED: state[name]} for name in coded}


def codes_from_saved(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved state as an optimizer has it. Versions up to 0.3.0 have saved it so."""
    coded = [n for n in _CODED if isinstance(state.get(n), dict) and _SAVED in state[n]]
    return state | {name: state[name][_SAVED] for name in coded}


@functools.cache
def _lines(levels: int, ratio: int) -> list[tuple[float, float, float, float]]:
    """Returns (start, step, offset, inverse) of each level.

    number = start + step * code, and code = offset + inverse * number.
    """
    lines = []
    for level in range(levels):
        top = 1.0
        for _ in range(levels - 1 - level):
            top /= ratio
        codes = 1 << level
        step = (1 - 1 / ratio) * top / codes if level else top
        start = top - step * (2 * codes - 1) if level else 0.0
        exact = torch.tensor(
            [start, step, -start / step, 1 / step], dtype=torch.float64, device="cpu"
        )
        start, step, offset, inverse = exact.float().tolist()
        lines.append((start, step, offset, inverse))
    return lines


@functools.cache
def _numbers(levels: int, ratio: int) -> Tensor:
    """Returns the number from 0 to 1 that each code stands for."""
    codes = torch.arange(1 << levels, dtype=torch.float64, device="cpu")
    of_levels = [codes * step + start for start, step, _, _ in _lines(levels, ratio)]
    return torch.stack(of_levels).amax(0).float()


def _codes(numbers: Tensor, levels: int, ratio: int) -> Tensor:
    """Returns the codes of numbers from 0 to 1, not yet rounded to integers."""
    numbers = wide(numbers)
    codes = torch.full_like(numbers, float("inf"))
    for _, _, offset, inverse in _lines(levels, ratio):
        codes = torch.minimum(codes, numbers * inverse + offset)
    return codes.float()


def _blocks(values: Tensor, spec: Codes) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.numel() % spec.block))
    return padded.view(padded.numel() // spec.block, spec.block)  # there may be no block


def _encode(
    values: Tensor, random: Tensor, spec: Codes, levels: int, least: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the codes in int32, padded to whole blocks, and a scale for each block."""
    values, random = _blocks(values, spec), _blocks(random, spec)
    scale = values.amax(1, keepdim=True)
    inverse = (1 / scale).clamp(max=torch.finfo(torch.float32).max)
    codes = _codes(values * inverse, levels, spec.ratio)
    if least is not None:
        codes = torch.maximum(codes, _blocks(least, spec))
    codes = (wide(codes) + wide(random) / 65536).float().clamp(max=(1 << levels) - 1)
    return codes.int().view(-1), scale.view(-1)


def _decode(codes: Tensor, scale: Tensor, spec: Codes, levels: int) -> Tensor:
    numbers = _numbers(levels, spec.ratio).to(codes.device)[codes.int()]
    return (_blocks(numbers, spec) * scale[:, None]).view(-1)[: codes.numel()]


def encode_exp_avg(exp_avg: Tensor, random: Tensor, spec: Codes) -> tuple[Tensor, Tensor]:
    """Returns uint8 codes, of which the top bit is the sign, and a scale for each block."""
    codes, scale = _encode(exp_avg.abs(), random, spec, spec.bits - 1, None)
    codes = codes[: exp_avg.numel()]
    return (codes | torch.where(exp_avg.signbit(), _sign(spec), 0)).byte(), scale


def decode_exp_avg(codes: Tensor, scale: Tensor, spec: Codes) -> Tensor:
    magnitudes = _decode(codes & _sign(spec) - 1, scale, spec, spec.bits - 1)
    return torch.where(codes >= _sign(spec), -magnitudes, magnitudes)


def _sign(spec: Codes) -> int:
    return 1 << spec.bits - 1


def encode_exp_avg_sq(exp_avg_sq: Tensor, random: Tensor, spec: Codes) -> tuple[Tensor, Tensor]:
    """Returns uint8 codes of the square root, and a scale for each block.

    A root that is not 0 does not become 0, because the step is divided by it.
    """
    root = square_root(exp_avg_sq)
    codes, scale = _encode(root, random, spec, spec.bits, least=(root * 1e30).clamp(max=1))
    return codes[: root.numel()].byte(), scale


def decode_exp_avg_sq(codes: Tensor, scale: Tensor, spec: Codes) -> Tensor:
    root = _decode(codes, scale, spec, spec.bits)
    return root * root


# The moments of a state, by name. Elements: those of the parameter.


def read(state: Mapping[str, Tensor], name: str, spec: Codes, elements: Elements) -> Tensor:
    codes = elements.flat(state["moments" if "moments" in state else name])
    if "moments" in state:
        codes = codes & (1 << spec.bits) - 1 if name == "exp_avg" else codes >> spec.bits
    decode = decode_exp_avg_sq if name == "exp_avg_sq" else decode_exp_avg
    return decode(codes, _used_scales(state, name, codes.numel(), spec), spec)


def write(
    state: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    random: Tensor,
    spec: Codes,
    elements: Elements,
) -> None:
    """Stores all moments of a state, by name."""
    for name, values in without_lost(moments).items():
        encode = encode_exp_avg_sq if name == "exp_avg_sq" else encode_exp_avg
        codes, scale = encode(values, random, spec)
        _used_scales(state, name, values.numel(), spec).copy_(scale)
        if "moments" in state:
            both, lower = state["moments"], (1 << spec.bits) - 1
            kept, shift = (~lower & 0xFF, 0) if name == "exp_avg" else (lower, spec.bits)
            both.bitwise_and_(kept).bitwise_or_(elements.shaped(codes << shift))
        else:
            state[name].copy_(elements.shaped(codes))


def without_lost(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the moments, 0 for elements of which one would spoil the scale of a block.

    That is exp_avg or the root of exp_avg_sq from 2^63 on, and what is no number. The others in
    the block go on without such an element: kLost of csrc/adam/blockwise.h.
    """
    kept = torch.stack(
        [
            (values >= 0) & (values < _LOST**2) if name == "exp_avg_sq" else values.abs() < _LOST
            for name, values in moments.items()
        ]
    ).all(0)
    return {name: torch.where(kept, values, 0) for name, values in moments.items()}


def _used_scales(state: Mapping[str, Tensor], name: str, numel: int, spec: Codes) -> Tensor:
    """Returns the scales of ``numel`` elements: a shard may leave some unused."""
    return state[f"{name}_scale"].view(-1)[: (numel + spec.block - 1) // spec.block]


def made(param: Tensor, row: StateFormat, names: Sequence[str]) -> dict[str, Tensor]:
    """Returns these moments, of zeros, in this format."""
    assert row.codes is not None and row.dtype is not None
    stored = ("moments",) if row.joint else names
    state = {name: zeros_like(param, row.dtype) for name in stored}
    shape = scale_shape(param, row.codes)
    if dtensor.is_dtensor(param):
        shape = dtensor.local_scale_shape(param, row.codes.block)
    for name in names:
        scale = torch.zeros(shape, dtype=torch.float32, device=param.device)
        state[f"{name}_scale"] = dtensor.scale_as_placed(param, scale)
    return state


def to_blocks(state: dict[str, Tensor], param: Tensor, row: StateFormat) -> None:
    """Converts the moments in ``state`` to this format, rounded to nearest."""
    assert row.codes is not None
    local = dtensor.local_tensor
    elements, half = Elements(local(param)), torch.tensor(0x8000, device=param.device)
    names = [name for name in _CODED if name in state]
    moments = {name: elements.flat(local(state.pop(name))) for name in names}
    state |= made(param, row, names)
    for begin, part in _parts(state, elements, row.codes):
        of_part = {n: flat[begin : begin + _PART].float() for n, flat in moments.items()}
        count = next(iter(of_part.values())).numel()
        write(part, of_part, half.expand(count), row.codes, Elements(of_part[names[0]]))


def from_blocks(state: Mapping[str, Tensor], row: StateFormat) -> dict[str, Tensor]:
    """Returns the moments of a state in this format, in float32."""
    assert row.codes is not None
    first = first_of_state(state)
    assert first is not None
    placed_like = state[first]
    like = dtensor.local_tensor(placed_like)
    elements = Elements(like)
    names = [name for name in _CODED if f"{name}_scale" in state]
    if any(state[f"{name}_scale"].dim() > 1 for name in names) and not dtensor.is_dtensor(
        placed_like
    ):
        raise ValueError(
            f"state_dict has {first!r} as a whole, with the scales of the blocks of "
            f"{list(state[f'{names[0]}_scale'].shape[:-1])} shards, from which it cannot be "
            "converted: call to_fp32_state_dict() while it is sharded, before "
            "get_optimizer_state_dict with full_state_dict=True"
        )
    moments = {name: zeros_like(like, torch.float32) for name in names}
    for begin, part in _parts(state, elements, row.codes):
        flat = Elements(part[first])
        for name, made in moments.items():
            into = elements.flat(made)[begin : begin + _PART]
            into.copy_(read(part, name, row.codes, flat))
    return {name: dtensor.as_placed(placed_like, made) for name, made in moments.items()}


def _parts(
    state: Mapping[str, Tensor], elements: Elements, spec: Codes
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields where a part of the elements begins, and what a state in blocks has of that part."""
    flat = {
        name: dtensor.local_tensor(value).view(-1)
        if name in SCALES
        else elements.flat(dtensor.local_tensor(value))
        for name, value in state.items()
        if name in (*SCALES, *_CODED, "moments")
    }
    numel = max(value.numel() for name, value in flat.items() if name not in SCALES)
    for begin in range(0, numel, _PART):
        block = begin // spec.block
        yield (
            begin,
            {
                name: value[block : block + _PART // spec.block]
                if name in SCALES
                else value[begin : begin + _PART]
                for name, value in flat.items()
            },
        )
