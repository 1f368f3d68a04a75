"""What a storage holds between two writes, and how it is computed again.

Storages and not tensors: views and aliases share memory, and a change in place of one of them
changes all. A tensor is a content and a geometry.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...checkpointing.fallback.outside import version_of
from ...checkpointing.fallback.pinned import Pin, is_pinned, pin
from .operators import Key, Operator


def is_plain(tensor: Tensor) -> bool:
    """Whether it is memory with a geometry: dense or strided, no wrapper of others, not of meta."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (
            tensor.is_meta
            or tensor.is_quantized
            or tensor.is_nested
            or tensor._is_zerotensor()
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            or torch._is_functional_tensor(tensor)
        )
    )


class Geometry(NamedTuple):
    """Where a tensor lies in its storage."""

    sizes: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: Tensor) -> Geometry:
        return Geometry(
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, storage: UntypedStorage) -> Tensor:
        """A tensor on this storage, without history."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.sizes, self.strides)
        if self.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.is_neg else tensor


class Reference(NamedTuple):
    """An argument of a call."""

    key: Key
    element: int  # of an argument that is a list; -1
    content: Content
    geometry: Geometry
    written: bool


class Made(NamedTuple):
    """What a call made, which may be gone by now."""

    content: weakref.ref[Content]
    output: Key  # which value of those it returned
    element: int  # of one that is a list; -1
    written: Content | None  # of a change in place: what was there before


@dataclass(eq=False)
class Call:
    """An operator that was called."""

    operator: Operator
    arguments: dict[Key, Any]  # None where a tensor was
    module: int
    references: list[Reference] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    seconds: float = 0.0


class Content:
    def __init__(self, storage: UntypedStorage, *, external: bool, module: int) -> None:
        self._storage = StorageWeakRef(storage)  # keeps its address from being given to another
        self.bytes = storage.nbytes()
        self.external = external  # not made in this block: a parameter, an input
        # For the report: which module made it, by the recorder's numbers, and which operator.
        self.module, self.operator = module, ""
        self.call: Call | None = None  # None: it cannot be computed again
        self.depth = 0  # of calls that were not saved, up to what was
        self.overwritten = False  # the storage holds something else by now
        self._memory: weakref.ref[Memory] | None = None
        # The tensor by which it was seen, and its version then: it tells changes that no operator
        # of this thread made.
        self._tensor: weakref.ref[Tensor] | None = None
        self._version = 0

    @property
    def memory(self) -> Memory | None:
        return None if self._memory is None else self._memory()

    def is_gone(self) -> bool:
        return bool(self._storage.expired())

    def see(self, tensor: Tensor, *, about_to_change: bool = False) -> None:
        """``about_to_change``: autograd counts a change in place after its operator was seen."""
        seen = None if self._tensor is None else self._tensor()
        if seen is None:
            seen = tensor
            self._tensor = weakref.ref(tensor)
        self._version = version_of(seen) + about_to_change

    def was_changed_unseen(self) -> bool:
        seen = None if self._tensor is None else self._tensor()
        return seen is not None and version_of(seen) > self._version

    def hold(self, tensor: Tensor | None = None) -> Memory | None:
        """Its memory, as it is now. None where that is lost, or nothing tells of changes to come.
        ``tensor``: one that has this content."""
        memory = self.memory
        if memory is not None and not memory.is_lost():
            return memory
        if tensor is None and self._tensor is not None:
            tensor = self._tensor()
        if tensor is None or self.overwritten or self.was_changed_unseen():
            return None
        if tensor.untyped_storage()._cdata != self._storage.cdata:  # it was given another
            return None
        memory = Memory(self, tensor)
        if memory.is_lost():
            return None
        self._memory = weakref.ref(memory)
        return memory


class Memory:
    """The memory of a content, or in its place what it is computed from. Held by saved tensors, and
    by dropped memory that is computed from it: who is gone needs nothing."""

    def __init__(self, content: Content, tensor: Tensor) -> None:
        self.content = content
        # None where it is dropped, but from when it is computed again until it is not awaited.
        self.storage: UntypedStorage | None = tensor.untyped_storage()
        # Tells changes. None where the storage is no one else's.
        self._tensor: Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self.decided = False  # kept or dropped
        self.dropped = False
        self.depth = 0  # how many dropped ones it is computed from, one after the other
        self.calls: dict[Content, Call] = {}  # of a dropped one: on the way from what it needs
        self._needs: list[tuple[Memory, Pin | None]] = []
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()  # that may come for it
        self._waiting: set[int] = set()  # ids of holders, since it was computed again

    def is_lost(self) -> bool:
        """The storage holds something else by now, or nothing."""
        return self._tensor is not None and (self.content.overwritten or self._is_empty())

    def _is_empty(self) -> bool:
        """FSDP gives a module's parameters back after its forward, until its own backward."""
        return self.storage is not None and self.storage.nbytes() < self.content.bytes

    def change(self) -> tuple[int, int] | None:
        """Version then and now, if no operator that was seen changed it."""
        if self._tensor is None or version_of(self._tensor) == self._version:
            return None
        return self._version, version_of(self._tensor)

    def drop(self, needs: list[Memory], calls: dict[Content, Call]) -> None:
        self._needs = [(m, None if m.storage is None else pin(m.storage)) for m in needs]
        self.depth = 1 + max((memory.depth for memory in needs), default=0)
        self.calls = calls
        self.dropped = True
        self.storage = self._tensor = None

    def is_computable(self) -> bool:
        """Whether what it is computed from is there."""
        return not any(m._is_empty() or not m.is_computable() for m, _ in self._needs)

    def before_write(self) -> None:
        """Dropped memory that is computed from it is given a copy of it as it is."""
        if self._tensor is not None and self.storage is not None and is_pinned(self._tensor):
            self.storage = self.storage.clone()
            self._tensor = None

    def add_holder(self, holder: Any) -> None:
        self._holders.add(holder)

    def fill(self, storage: UntypedStorage) -> None:
        """It was computed again, and stays for those that are still to come for it."""
        self._waiting = {id(holder) for holder in self._holders}
        if self._waiting:
            self.storage = storage

    def taken(self, holder: Any) -> None:
        """By one that does not come again in this backward."""
        self._waiting.discard(id(holder))
        if self.dropped and not self._waiting:
            self.storage = None
