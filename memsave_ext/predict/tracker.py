"""Follows fake memory: a tracker whose events are those of fake storages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _parts
from ..checkpoint.fallback import surroundings
from ..fakes.caching import CachingAllocator
from ..fakes.mode import fake_of
from ..fakes.storages import Storages
from ..memory.events import (
    ALLOCATED,
    BEGIN_RECOMPUTE,
    BEGIN_TRACKING,
    END_RECOMPUTE,
    END_TRACKING,
    FOUND,
    FREED,
    LABELLED,
    MOVED,
    NO_NODE,
    NOT_IN_BACKWARD,
    Event,
    label_value,
)
from ..memory.hooks import Hooks, Names
from ..memory.log import Log
from ..memory.tracker import Tracker
from ..shared.modules import Modules
from ..shared.tensors import plain_tensors
from ..store.mapped import in_memory, listeners

_FIRST_OF_NONE = 1 << 63  # sequence numbers from here on are of nodes that accumulate gradients
_NO_LIMIT = 1 << 40  # of events


class FakeTracker(Tracker):
    """Does what other trackers do, for the fake tensors made below :attr:`storages`.

    A clock that counts events stands for the time.

    Args:
        device: the device that is predicted. On the CPU memory from before :meth:`start` counts
            where it is labelled, as with real memory; on CUDA all of it counts.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__([], _NO_LIMIT)
        self._counts_all = device.type == "cuda"
        self._running = False
        self._thread = threading.get_ident()
        self._clock = itertools.count()
        self._moved = 0  # bytes that lie elsewhere
        self._on_device = 0.0  # seconds that operators ran there
        self.others = 0  # bytes of other models
        # Native remat counts the bytes and seconds of the step, too.
        self._remat: Any = (native := _parts.native("remat")) and native.RematFakes(
            fake_of, self._moves, self._counts_all
        )
        self.storages = Storages(self._allocated, self._freed, self._ran, device)
        if self._counts_all:  # on the CPU what lies elsewhere is not labelled, and so not counted
            listeners.append(self.storages.leave)
        self._allocators: tuple[CachingAllocator, ...] = ()

    def reserve(self, held: list[Tensor]) -> None:
        """Follows what CUDA's caching allocator reserves, from now on. What lives lies in the order
        in which it was made: what building has freed may have been on another device.

        Args:
            held: what model and optimizer have, which counts also where it was made before.
        """
        if self._counts_all:
            memories = map(self.storages.memory, in_memory(plain_tensors(held)))
            numbers = {memory[0] for memory in memories if memory is not None}
            self._allocators = CachingAllocator(False), CachingAllocator(True)
            for allocator in self._allocators:
                for number, size in self.storages.living(numbers):
                    allocator.allocated(number, size)

    @property
    def reserved(self) -> tuple[int, ...]:
        """The most bytes reserved: by default, and with expandable segments; none of a CPU."""
        return tuple(allocator.reserved for allocator in self._allocators)

    def plans(self) -> bool:
        """Whether blocks of remat plan the steps to come by one that has been."""
        return bool(self._remat) and bool(self._remat.knows_steps())

    def start(self) -> None:
        self._running = True
        self._note(MOVED, 0, self._moved)
        if self._counts_all:
            for number, size in self.storages.living():
                self._note(ALLOCATED, number, size)

    def label(self, tensors: Sequence[Tensor], category: int, names: Sequence[int]) -> None:
        for tensor, name in zip(tensors, names, strict=True):
            memory = self.storages.memory(tensor)
            if memory is not None:
                number, size = memory
                self._note(FOUND, number, size)
                self._note(LABELLED, number, label_value(category, name))

    def follow(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        modules: Modules,
        names: Names,
        step: Callable[[], object],
        others: Iterable[Tensor] = (),
    ) -> tuple[float, float]:
        """Records a step. Returns how long its copies take of what is moved elsewhere and back, and
        about how long it takes itself.

        Args:
            others: what counts beside model and optimizer; :attr:`others` says how many bytes.
        """
        self._log = Log(modules.parents, _NO_LIMIT)
        hooks = Hooks(self, model, modules, [optimizer] if optimizer else [], names)
        self.elsewhere = hooks.elsewhere
        self.start()
        hooks.label()
        before = self._log.total
        for tensor in others:
            if (memory := self.storages.memory(tensor)) is not None:
                self._note(FOUND, *memory)
                for allocator in self._allocators:
                    allocator.allocated(*memory)
        self.others = self._log.total - before
        self._note(BEGIN_TRACKING)  # now that all that lived before is labelled
        copying, seconds = self.copying, self.seconds
        with hooks.install():
            step()
        self._running = False
        self._note(END_TRACKING)
        copying = self.copying - copying
        # The plans' clock, by which copies are waited for, is none of a card; those of one way take
        # half of the time there.
        return copying, max(self.seconds - seconds, copying / 2)

    def listen(self) -> None:
        """Hears of operators, and when recomputes begin and end, for good."""
        surroundings.recompute_observer = lambda begins: self._recompute(True, begins)
        if native := _parts.native("checkpoint"):
            native.listen_to_recomputes(self._recompute)
        if self._remat:
            self._remat.enter()

    def _recompute(self, region: bool, begins: bool) -> None:
        if threading.get_ident() == self._thread:
            self.storages.makers.recomputes += 1 if begins else -1
            if self._running:
                self._note(BEGIN_RECOMPUTE if begins else END_RECOMPUTE, region)

    def _allocated(self, number: int, size: int) -> None:
        if self._remat:
            self._remat.allocated(number, size)
        for allocator in self._allocators:
            allocator.allocated(number, size)
        if self._running:
            self._note(ALLOCATED, number, size)

    def _freed(self, number: int) -> None:
        if self._remat:
            self._remat.freed(number)
        for allocator in self._allocators:
            allocator.freed(number)
        if self._running:
            self._note(FREED, number)

    def _moves(self, size: int) -> None:
        self._moved += size
        if self._running:
            self._note(MOVED, 0, self._moved)

    @property
    def copying(self) -> float:
        """Seconds that copies have taken of what was moved elsewhere and back."""
        return float(self._remat.copying()) if self._remat else 0.0

    @property
    def seconds(self) -> float:
        """About how long operators have run on the device; on the CPU with waits for copies."""
        on_clock = self._remat and not self._counts_all
        return float(self._remat.seconds()) if on_clock else self._on_device

    def _ran(self, seconds: float, on_device: float) -> None:
        self._on_device += on_device
        if self._remat:
            self._remat.ran(seconds)

    def _note(self, kind: int, subject: int = 0, value: int = 0) -> None:
        thread, node_number = threading.get_ident(), NOT_IN_BACKWARD
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            node_number = NO_NODE if node is None else node._sequence_nr()
            if node_number >= _FIRST_OF_NONE:
                node_number = NO_NODE
        time = next(self._clock)
        self._log.read([Event(kind, thread, thread, time, node_number, subject, value)])
