"""The parameters in an optimizer's current ``param_groups``; none when the optimizer is gone."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..dtensor import is_dtensor
from ..shards import sharding_of


class Params:
    def __init__(self, optimizer: torch.optim.Optimizer, own_step: bool) -> None:
        self.own_step = own_step  # whether its own step() steps them
        self.optimizer = weakref.ref(optimizer)

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.groups())

    def groups(self) -> list[dict[str, Any]]:
        optimizer = self.optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def group_of(self, param: Tensor) -> dict[str, Any] | None:
        groups = (g for g in self.groups() if any(p is param for p in g["params"]))
        return next(groups, None)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """Returns the parameter's state; empty where it has none."""
        optimizer = self.optimizer()
        return {} if optimizer is None else optimizer.state.get(param, {})

    def sharded(self) -> list[Tensor]:
        """Returns one DTensor of each sharding among the parameters."""
        of_each: dict[int, Tensor] = {}
        for param in self:
            if is_dtensor(param) and (number := sharding_of(param)[0]):
                of_each.setdefault(number, param)
        return list(of_each.values())

    def name(self, param: Tensor) -> str:
        position = next(i for i, p in enumerate(self) if p is param)
        return f"parameter {position} of the optimizer (shape {list(param.shape)})"
