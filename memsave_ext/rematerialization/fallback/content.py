"""A content is what a storage holds between two writes. It knows how it can be recomputed.

Storages are followed instead of tensors, because views and aliases share memory and an in-place
change of one of them changes all. A tensor is a content and a geometry.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.multiprocessing.reductions import StorageWeakRef

from ...checkpointing.fallback.outside import version_of
from ...checkpointing.fallback.pinned import Pin, is_pinned, pin
from .operators import Key, Operator


def under_fakes() -> bool:
    """Whether operators run on fake tensors, which have sizes and no memory."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a strided Tensor or Parameter, or a fake of one: no wrapper, not on meta."""
    return (
        type(tensor) in (Tensor, nn.Parameter, FakeTensor)
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


def copied(storage: UntypedStorage, device: torch.device) -> UntypedStorage:
    """Returns a copy of the storage of a tensor that is on ``device``."""
    if storage.device == device:
        copy: UntypedStorage = storage.clone()
        return copy
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()


class Geometry(NamedTuple):
    """How a tensor views its storage. The device of a fake tensor is not that of its storage."""

    sizes: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: Tensor) -> Geometry:
        return Geometry(
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, storage: UntypedStorage) -> Tensor:
        """Returns a tensor with this geometry on ``storage``, without autograd history."""
        if storage.device != self.device:
            return self._fake_view(storage)
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(storage, self.offset, self.sizes, self.strides)
        if self.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.is_neg else tensor

    def _fake_view(self, storage: UntypedStorage) -> Tensor:
        """The mode's own set_() would keep the storage alive, in a key of its cache."""
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        with in_kernel_invocation_manager(mode):
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor.set_(storage, self.offset, self.sizes, self.strides)
            torch._C._set_conj(tensor, self.is_conj)
            torch._C._set_neg(tensor, self.is_neg)
        return FakeTensor(mode, tensor, self.device)


class Reference(NamedTuple):
    """A tensor argument of a call."""

    key: Key
    element: int  # index in an argument that is a list; -1: the argument itself
    content: Content
    geometry: Geometry
    written: bool  # whether the call changes it in place


class Made(NamedTuple):
    """A content that a call made. It may be gone by now."""

    content: weakref.ref[Content]
    output: Key  # index among the returned values
    element: int  # index in a returned list; -1: the value itself
    written: Content | None  # the content it replaced in place; None for a new storage


@dataclass(eq=False)
class Call:
    """A recorded call of an operator."""

    operator: Operator
    arguments: dict[Key, Any]  # None in the place of each tensor; those are in references
    module: int  # the number of the module that called it; -1: none
    references: list[Reference] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    seconds: float = 0.0


class Content:
    def __init__(self, storage: UntypedStorage, *, external: bool, module: int) -> None:
        self._storage = StorageWeakRef(storage)  # keeps its address from being reused
        self.bytes = storage.nbytes()
        self.external = external  # not made in this block, as parameters and inputs
        # For the report: the number of the module and the name of the operator that made it.
        self.module, self.operator = module, ""
        self.call: Call | None = None  # the call that recomputes it; None: it is not recomputed
        self.depth = 0  # length of the longest chain of calls back to what is kept
        self.overwritten = False  # whether the storage holds another content by now
        self._memory: weakref.ref[Memory] | None = None
        # The tensor by which it was seen, and that tensor's version then. They reveal changes that
        # no operator of this thread made.
        self._tensor: weakref.ref[Tensor] | None = None
        self._version = 0

    @property
    def memory(self) -> Memory | None:
        return None if self._memory is None else self._memory()

    def is_gone(self) -> bool:
        return bool(self._storage.expired())

    def see(self, tensor: Tensor, *, about_to_change: bool = False) -> None:
        """Notes the version of ``tensor``, which has this content.

        ``about_to_change``: an operator changes it in place, which autograd has still to count.
        """
        seen = None if self._tensor is None else self._tensor()
        if seen is None:
            seen = tensor
            self._tensor = weakref.ref(tensor)
        self._version = version_of(seen) + about_to_change

    def was_changed_unseen(self) -> bool:
        seen = None if self._tensor is None else self._tensor()
        return seen is not None and version_of(seen) > self._version

    def hold(self, tensor: Tensor | None = None) -> Memory | None:
        """Returns the content's memory, and makes it where there is none yet.

        None where the content is lost, or where no tensor is left whose version would reveal later
        changes. ``tensor`` is one that has this content.
        """
        memory = self.memory
        if memory is not None and not memory.is_lost():
            return memory
        if tensor is None and self._tensor is not None:
            tensor = self._tensor()
        if tensor is None or self.overwritten or self.was_changed_unseen():
            return None
        if tensor.untyped_storage()._cdata != self._storage.cdata:  # it has another storage now
            return None
        memory = Memory(self, tensor)
        if memory.is_lost():
            return None
        self._memory = weakref.ref(memory)
        return memory


class Memory:
    """The memory of a content, or, where it is dropped, what it is recomputed from.

    It is held by saved tensors, and by dropped memory that is recomputed from it, so that it is
    freed with the last of them.
    """

    def __init__(self, content: Content, tensor: Tensor) -> None:
        self.content = content
        # None while it is dropped. A recompute sets it until every holder has taken it.
        self.storage: UntypedStorage | None = tensor.untyped_storage()
        # Its version reveals changes. None where the storage belongs to this memory alone.
        self._tensor: Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self.decided = False  # whether it has been decided to keep or drop it
        self.dropped = False
        self.depth = 0  # length of the longest chain of dropped memory it ends; 0: it is kept
        self.calls: dict[Content, Call] = {}  # the calls that recompute it from _needs
        self._needs: list[tuple[Memory, Pin | None]] = []
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()  # saved tensors that may ask for it
        self._waiting: set[int] = set()  # ids of the holders that have not taken it since recompute

    def is_lost(self) -> bool:
        """Whether the storage was overwritten or emptied."""
        return self._tensor is not None and (self.content.overwritten or self._is_empty())

    def _is_empty(self) -> bool:
        """Whether the storage was freed, as FSDP frees parameters between forward and backward."""
        return self.storage is not None and self.storage.nbytes() < self.content.bytes

    def change(self) -> tuple[int, int] | None:
        """Returns the old and the present version after an unseen change, else None."""
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
        """Whether none of the memory that it is recomputed from was freed."""
        return not any(m._is_empty() or not m.is_computable() for m, _ in self._needs)

    def before_write(self) -> None:
        """Copies the content before it is changed, if dropped memory is recomputed from it."""
        if self._tensor is not None and self.storage is not None and is_pinned(self._tensor):
            self.storage = copied(self.storage, self._tensor.device)
            self._tensor = None

    def add_holder(self, holder: Any) -> None:
        self._holders.add(holder)

    def fill(self, storage: UntypedStorage) -> None:
        """Keeps the recomputed ``storage`` until all holders have taken it."""
        self._waiting = {id(holder) for holder in self._holders}
        if self._waiting:
            self.storage = storage

    def taken(self, holder: Any) -> None:
        """Notes that ``holder`` has taken the storage, or is gone. Frees it after the last one."""
        self._waiting.discard(id(holder))
        if self.dropped and not self._waiting:
            self.storage = None
