"""Reads and writes a parameter and its state in the dtype that steps compute in, and the random
bits that round them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .. import blocks, formats
from ..elements import Elements, real, real_type
from ..rules import rule_of

_WORD = 0xFFFFFFFF


class Stored:
    """A parameter and its state: decoded when they are loaded, rounded when they are stored.

    Complex tensors are handled as pairs of real numbers.
    """

    def __init__(
        self,
        param: Tensor,
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
        position: int,
        number: float | Tensor,
    ) -> None:
        self.group, self.number = group, number
        self.compute = torch.float64 if real_type(param) == torch.float64 else torch.float32
        self._format = formats.param_format_of(param, group)
        self.device = param.device
        self._states = formats.STATE_FORMATS[0]  # stands for none
        if rule_of(group).moments:
            self._states = formats.state_formats(param, group)[formats.key_of_state(state)]
        self.in_blocks = self._states.codes is not None
        self._param, self._state, self._position = param, state, position

    @functools.cached_property
    def _elements(self) -> Elements:
        return Elements(self._param)

    def random(self, draw: Draw) -> Tensor:
        bits = random_bits(
            real(self._param).numel(),
            seed=self.group.get("seed", 0),
            position=self._position,
            step=self.number if isinstance(self.number, Tensor) else int(self.number),
            draw=draw,
            device=self._param.device,
        )
        return self._elements.shaped(bits)

    @functools.cached_property
    def _of_moments(self) -> Tensor:
        return self.random(Draw.MOMENTS)

    def load_param(self) -> Tensor:
        if self._format.load is not None:
            return self._format.load(self._param, self._state["param_rest"])
        return real(self._param).to(self.compute)

    def store_param(self, values: Tensor) -> None:
        random = self.random(Draw.PARAM) if self._format.at_random else None
        values, low_part = self._format.store(values, random)
        if low_part is not None:
            self._state["param_rest"].copy_(low_part)
        real(self._param).copy_(values)

    def load(self, name: str) -> Tensor:
        if (codes := self._states.codes) is None:
            return real(self._state[name]).to(self.compute)
        return self._elements.shaped(blocks.read(self._state, name, codes, self._elements))

    def store(self, **moments: Tensor) -> None:
        """Stores these moments, all of the rule's where they are in blocks."""
        if (codes := self._states.codes) is not None:
            flat = {name: self._elements.flat(values) for name, values in moments.items()}
            random = self._elements.flat(self._of_moments)
            return blocks.write(self._state, flat, random, codes, self._elements)
        for name, values in moments.items():
            if self._states.at_random:
                values = formats.round_at_random(values, self._of_moments)
            real(self._state[name]).copy_(values)


# ---- random bits: csrc/adam/philox.h -----------------------------------------------------------


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
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.int64, device="cpu")
        return value.long() & _WORD

    words = philox((groups & _WORD, word(position), word(step), word(draw)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(-1)[:numel].int()
