"""What a region of ``checkpoint`` keeps of its arguments and of what its graph saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..._leaves import hold_accumulators
from ..errors import Metadata
from .outside import version_of

BackwardKey = tuple[str, int]


class Holder:
    """What autograd keeps in place of a saved tensor."""

    def __init__(self, open_: Callable[[Holder], Tensor]) -> None:
        self.values: dict[BackwardKey, Tensor] = {}  # computed again, by the backward that asked
        self._open = open_

    def open(self) -> Tensor:
        return self._open(self)


@dataclass(eq=False)
class Slot:
    """What the forward saved at one position."""

    holder: weakref.ref[Holder]  # dead once autograd has dropped it
    metadata: Metadata
    storage: StorageWeakRef | None
    version: int

    @staticmethod
    def of(tensor: Tensor, holder: Holder) -> Slot:
        weak, version = weakref.ref(holder), tensor._version
        return Slot(weak, metadata_of(tensor), storage_of(tensor), version)


def metadata_of(tensor: Tensor) -> Metadata:
    shape = torch.Size() if tensor.is_nested else tensor.shape  # it has none in one piece
    return shape, tensor.dtype, tensor.device


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
        return None


class Argument:
    """A positional argument. Tensors are kept as autograd keeps them: hooks see them, and a change
    in place is noticed."""

    def __init__(self, value: Any) -> None:
        self.is_tensor = isinstance(value, Tensor)
        self.value = None if self.is_tensor else value
        if self.is_tensor:
            # Autograd does not look at versions where hooks are called with what it saves.
            self._storage, self._version = storage_of(value), version_of(value)
            # A node of its own is how Python can make autograd save a tensor. In torch 2.11 the
            # node's tensors go with its output.
            with torch.enable_grad():
                nodes = hold_accumulators([value])
                self._keeper: Any = _Keep.apply(torch.empty(0, requires_grad=True), [value])
                del nodes

    def get(self) -> Any:
        if not self.is_tensor:
            return self.value
        (tensor,) = self._keeper.grad_fn.saved_tensors
        return tensor

    def change(self, now: Any) -> tuple[int, int] | None:
        """The versions in the forward and now, where the argument was changed in place."""
        if not self.is_tensor or self._storage is None or self._storage != storage_of(now):
            return None
        versions = self._version, version_of(now)
        return versions if versions[0] != versions[1] else None


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*kept)  # in a list: not an input to be differentiated
        return anchor.detach()
