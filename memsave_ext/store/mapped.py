"""Tensors on mapped memory of a file."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from .file import File, Region


class MappedFile:
    """A file without a name, and tensors whose memory it is.

    They are tensors as any other: the kernel reads what is used of them, and writes what has
    changed. What is mapped is no private memory of the process.

    Args:
        folder: where the file is.
        name: what errors begin with.
        content: what is in it, for errors.
    """

    def __init__(self, folder: str, name: str, content: str) -> None:
        self.file = File(folder, name, content)
        self._regions: dict[int, Region] = {}  # of tensors, by address
        add(self)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Returns a tensor like this one, without its values.

        Raises:
            OSError: the disk is full.
        """
        region = self.file.take(tensor.nbytes)
        memory = region.memory(tensor.nbytes)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        weakref.finalize(memory, self._give_back, storage.data_ptr(), region).atexit = False
        self._regions[storage.data_ptr()] = region
        return laid_on(storage, tensor)

    def region_of(self, tensor: Tensor) -> Region | None:
        """Returns the memory of one of these; None for another tensor."""
        return self._regions.get(tensor.data_ptr()) if _has_memory(tensor) else None

    def has(self, tensor: Tensor) -> bool:
        """Whether it is one of these."""
        return self.region_of(tensor) is not None

    def let_go(self) -> None:
        """Unmaps all that is mapped; what is used again is mapped again."""
        for region in list(self._regions.values()):
            region.unmap()

    def _give_back(self, address: int, region: Region) -> None:
        del self._regions[address]
        self.file.free(region)


class Place(Protocol):
    """Where tensors lie that take no memory, as whoever counts that sees it."""

    def has(self, tensor: Tensor) -> bool: ...


# By id: a thread may look at all of them, which a WeakSet lets it not, while another adds one.
_all: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()
_PLAIN = (Tensor, nn.Parameter)
_PRETENDS = "_memsave_ext_mapped"  # an attribute of fake tensors
_used = False  # whether there has ever been one, also a pretended one


def laid_on(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """Returns a tensor like this one, whose memory is that of ``storage``."""
    strides = torch.empty_like(tensor, device="meta").stride()
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return made.set_(storage, 0, tensor.shape, strides)


def is_plain(tensor: Tensor) -> bool:
    """Whether it has nothing but values: its class has no more, and no ``torch.func`` wraps it."""
    return type(tensor) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def add(place: Place) -> None:
    """Has :func:`is_mapped` ask a place, too, as long as it lives."""
    _all[id(place)] = place
    _note_use()


def _note_use() -> None:
    global _used
    _used = True


def pretend(fake: Tensor) -> None:
    """Has a prediction's tensor taken for one on mapped memory, or whose memory is elsewhere."""
    setattr(fake, _PRETENDS, True)
    _note_use()
    for tell in listeners:
        tell(fake)


listeners: list[Callable[[Tensor], None]] = []  # called with each such tensor, in a child


def pretends(tensor: Tensor) -> bool:
    """Whether it is a prediction's tensor that is to be taken for one on mapped memory."""
    return hasattr(tensor, _PRETENDS)


def is_mapped(tensor: Tensor) -> bool:
    """Whether its memory is mapped, or managed by CUDA; of a prediction's tensor, whether it would
    be."""
    if pretends(tensor):
        return True
    places = (reference() for reference in _all.valuerefs())
    return any(place is not None and place.has(tensor) for place in places)


def any_mapped(tensors: Iterable[Tensor]) -> bool:
    return _used and any(map(is_mapped, tensors))


def nbytes_mapped(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of those that :func:`is_mapped` says take no memory."""
    return sum(tensor.nbytes for tensor in tensors if is_mapped(tensor)) if _used else 0


def in_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns those that take memory; of a prediction's, would take it."""
    if not _used:  # as most often: this is asked of all states in every step
        return list(tensors)
    return [tensor for tensor in tensors if not is_mapped(tensor)]


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is of the CPU and has an address."""
    return is_plain(tensor) and tensor.is_cpu and tensor.layout == torch.strided
