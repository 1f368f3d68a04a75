"""Parameters of DistributedDataParallel modules.

Their gradients are reduced after the parameters' hooks have run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor


class ReducedByDdp:
    """The parameters of attached modules. Their hooks do nothing; the communication hook steps."""

    def __init__(self) -> None:
        self._params: set[int] = set()  # ids
        self._local: set[int] = set()  # ids of those whose gradient has not been reduced yet

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
        """Whether the gradient in ``.grad`` is that of this process, not reduced."""
        return id(param) in self._local


def params_of_modules() -> set[int]:
    """Returns ids of the parameters of all DistributedDataParallel modules, attached or not.

    The modules are searched for, since the reducer's hooks are not visible from Python.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return set()
    from torch.nn.parallel import DistributedDataParallel

    # Every object refers to its class. To ask the collector for these takes half of what a list of
    # all objects does; it is still some 30 ms.
    referrers = gc.get_referrers(DistributedDataParallel)
    modules = [m for m in referrers if type(m) is DistributedDataParallel]
    return {id(p) for module in modules for p in module.parameters()}
