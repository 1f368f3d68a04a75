"""Every block of memory that lives, what made it, and the changes in order of time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .threads import FORWARD, OTHER, RECOMPUTES, EventContext, Threads

# Indices into CATEGORIES of memsave_ext/memory/account.py.
_ACTIVATIONS, _OTHER_CATEGORY = 3, 4
_FREED, _ALLOCATED, _THERE = -1, 1, 2


@dataclass(eq=False)
class Block:
    size: int  # bytes
    phase: int = OTHER  # the phase in which it was allocated
    span: int = 0  # the number of the forward or recompute in which it was allocated
    module: int = -1  # the module that allocated it; -1 if not known
    temporary: bool = False  # freed before that forward or recompute ended
    label: int | None = None  # the category that was given by label(); None: none was
    name: int = -1  # the name that was given by label(); -1: none was

    @property
    def category(self) -> int:
        if self.label is not None:
            return self.label
        made_by_forward = self.phase in (FORWARD, *RECOMPUTES)
        return _ACTIVATIONS if made_by_forward and not self.temporary else _OTHER_CATEGORY


class Labelled(Protocol):
    """Memory that can get a label."""

    ptr: int
    size: int
    block: Block | None


class Memory:
    """The memory of a tensor that has a label, without keeping the tensor or its memory alive."""

    def __init__(self, storage: torch.UntypedStorage, ptr: int) -> None:
        self.ptr, self.size = ptr, storage.nbytes()
        self.block: Block | None = None
        self._weak = StorageWeakRef(storage)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        return bool(self._weak.cdata == storage._cdata)

    def is_gone(self) -> bool:
        if self._weak.expired():
            return True
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return storage is None or address(storage) != self.ptr


def address(storage: torch.UntypedStorage) -> int:
    """Returns the address of the memory of a storage, 0 if it has none."""
    try:
        return storage.data_ptr() if storage.nbytes() else 0
    except (RuntimeError, NotImplementedError):  # a FakeTensor's, or its memory was freed
        return 0


@dataclass(frozen=True)
class Record:
    """A copy of a log as tables; csrc/memory/record.h describes the columns."""

    changes: Tensor
    blocks: Tensor
    regions: list[tuple[int, int, int, int, float]]

    def stack(self, block: int) -> tuple[tuple[str, int, str], ...]:
        """Returns (): torch's profiler records no stacks of allocations."""
        return ()

    def operator_name(self, block: int) -> str:
        """Returns "", as for stacks."""
        return ""


class Log:
    """Keeps the blocks that live and the changes. It is told everything in order of time.

    The argument ``total`` of its methods is the allocator's figure, None on the CPU.
    """

    def __init__(self, device: torch.device, parents: list[int]) -> None:
        self.threads = Threads(parents)
        self.total = 0  # live bytes
        self._peak = 0
        self._device = device
        self._live: dict[int, Block] = {}
        self._step = 0
        self._part = 0
        self._changes: list[tuple[int, int, Block | None, int, int, int]] = []

    @property
    def peak(self) -> int:
        return max(self._peak, self.total)

    def allocated(self, ptr: int, size: int, total: int | None, context: EventContext) -> None:
        # A known address that is allocated again was freed while this was paused or not running.
        if ptr in self._live:
            self._remove(ptr, None if total is None else self.total, context)
        phase, span, module = self.threads.where(context)
        if phase in RECOMPUTES:
            self.threads.count(span, size)
        self._live[ptr] = block = Block(size, phase, span, module)
        after = self.total + size if total is None else total
        self._change(block, _ALLOCATED, after, phase, context)

    def freed(self, ptr: int, total: int | None, context: EventContext) -> None:
        if ptr in self._live:
            self._remove(ptr, total, context)
        elif total is not None and total != self.total:
            self._change(None, _FREED, total, self.threads.where(context).phase, context)

    def mark_phase(self, context: EventContext) -> None:
        """Adds a row without a change: a phase begins or ends, which may allocate nothing."""
        self._change(None, _FREED, self.total, self.threads.where(context).phase, context)

    def label(
        self, memories: Iterable[tuple[Labelled, int]], category: int, context: EventContext
    ) -> None:
        """Gives memory a category and a name. Memory not yet known was there before tracking."""
        for memory, name in memories:
            block = self._live.get(memory.ptr)
            if block is None:
                self._live[memory.ptr] = block = Block(memory.size)
                # The figure of CUDA's allocator already includes it.
                total = self.total + (memory.size if self._device.type == "cpu" else 0)
                self._change(block, _ALLOCATED, total, self.threads.where(context).phase, context)
            memory.block = block
            if block.label is None:
                block.label, block.name = category, name

    def forget(self, memories: Iterable[Memory], context: EventContext) -> None:
        """Removes memory that was freed, unless its free is recorded already."""
        for memory in memories:
            if memory.block is not None and self._live.get(memory.ptr) is memory.block:
                total = None if self._device.type == "cpu" else self.total
                self._remove(memory.ptr, total, context)

    def begin(self, total: int | None, context: EventContext) -> None:
        """Begins tracking, with ``total`` live bytes."""
        self.threads.clear()
        self.total = self.total if total is None else total
        self._begin_part(context)

    def end_step(self, context: EventContext) -> None:
        self._step += 1
        self.threads.end_step()
        self._begin_part(context)

    def reset_peak(self, context: EventContext) -> None:
        self._peak = self.total
        self._changes.clear()
        self._begin_part(context)

    def record(self) -> Record:
        numbers: dict[Block, int] = {}
        changes = array("q")
        for time, step, block, change, phase, total in self._changes:
            row = -1 if block is None else numbers.setdefault(block, len(numbers))
            changes.extend((time, step, row, change, phase, total))
        blocks = array("q")
        for block in numbers:
            blocks.extend((block.size, block.category, block.phase, block.name, block.module))
        regions = [
            (*key, region.calls, region.saved_bytes, region.nanoseconds * 1e-9)
            for key, region in sorted(self.threads.regions.items())
        ]
        return Record(_as_table(changes, 6), _as_table(blocks, 5), regions)

    def _remove(self, ptr: int, total: int | None, context: EventContext) -> None:
        block = self._live.pop(ptr)
        phase, span, _ = self.threads.where(context)
        block.temporary = (block.phase, block.span) == (phase, span)
        if block.phase in RECOMPUTES:
            self.threads.count(block.span, -block.size)
        after = self.total - block.size if total is None else total
        self._change(block, _FREED, after, phase, context)

    def _change(
        self, block: Block | None, change: int, total: int, phase: int, context: EventContext
    ) -> None:
        self.total = total
        if self._changes:  # tracking has begun
            self._peak = max(self._peak, total)
            self._changes.append((context.time, self._step, block, change, phase, total))

    def _begin_part(self, context: EventContext) -> None:
        """Begins a part, which is complete in itself: its first rows list all that lives then."""
        self._peak = self.peak
        self._changes.append((context.time, self._step, None, _THERE, self._part, self.total))
        for block in self._live.values():
            self._changes.append((context.time, self._step, block, _THERE, 0, self.total))
        self._part += 1


class Logging:
    """A tracker whose figures are those of its log."""

    _log: Log

    @property
    def live(self) -> int:
        return self._log.total

    @property
    def peak(self) -> int:
        return self._log.peak

    def record(self) -> Record:
        return self._log.record()


def _as_table(values: array[int], columns: int) -> Tensor:
    if not values:  # frombuffer takes no empty array
        return torch.empty(0, columns, dtype=torch.int64)
    return torch.frombuffer(values, dtype=torch.int64).view(-1, columns)
