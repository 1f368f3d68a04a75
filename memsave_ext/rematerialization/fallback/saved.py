"""The objects that autograd holds in place of the tensors saved in a block."""

from __future__ import annotations

from torch import Tensor

from ...checkpointing import errors
from ...checkpointing.fallback.outside import version_of
from .content import Geometry, Memory
from .recompute import Again, paused, storage_of


class Kept:
    """A tensor that is kept, without the graph that made it.

    Its version is checked here, because autograd does not check it where there are hooks.
    """

    def __init__(self, tensor: Tensor, memory: Memory | None = None) -> None:
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._version = version_of(tensor)
        self._memory = memory  # kept alive, so that others can be recomputed from it

    def open(self) -> Tensor:
        tensor, now = self._tensor, version_of(self._tensor)
        if now != self._version:
            raise errors.remat_saved_changed(tensor.shape, self._version, now)
        return tensor


class Dropped:
    def __init__(self, tensor: Tensor, memory: Memory, again: Again) -> None:
        self._geometry = Geometry.of(tensor)
        self._memory, self._again = memory, again
        memory.add_holder(self)

    def open(self) -> Tensor:
        with self._again.lock, paused():
            storage = self._memory.storage
            if storage is None:
                storage = storage_of(self._memory, self._again)
            self._memory.taken(self)
            return self._geometry.view(storage)

    def __del__(self) -> None:
        self._memory.taken(self)


def unpack(saved: Kept | Dropped) -> Tensor:
    return saved.open()
