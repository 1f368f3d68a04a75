"""Reads and writes a parameter and its state in the dtype that steps compute in."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import blocks, formats
from ..elements import Elements, real, real_type
from ..rules import rule_of
from .random_bits import Draw, random_bits


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
            if self._states.store is not None:
                values = self._states.store(values, self._of_moments)
            real(self._state[name]).copy_(values)
