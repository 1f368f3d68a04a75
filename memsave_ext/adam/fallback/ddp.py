"""Parameters of DistributedDataParallel modules, whose gradients are reduced after the hooks."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor


class ReducedByDdp:
    """Those whose reducer says so when it is done, and for which the hooks do nothing."""

    def __init__(self) -> None:
        self._params: set[int] = set()  # by id
        self._local: set[int] = set()  # of these, those with a gradient of this process alone

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._params

    def hand_over(self, params: Iterable[Tensor], enabled: bool) -> None:
        change = self._params.update if enabled else self._params.difference_update
        change(id(param) for param in params)

    def note_local(self, param: Tensor) -> None:
        self._local.add(id(param))

    def note_reduced(self, params: Iterable[Tensor]) -> None:
        self._local.difference_update(id(param) for param in params)

    def is_local(self, param: Tensor) -> bool:
        """Whether what is in .grad has not been reduced."""
        return id(param) in self._local


def params_of_modules() -> set[int]:
    """Parameters that a reducer has, attached or not: its hooks cannot be seen from Python."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return set()
    from torch.nn.parallel import DistributedDataParallel

    modules = [m for m in gc.get_objects() if type(m) is DistributedDataParallel]
    return {id(p) for module in modules for p in module.parameters()}
