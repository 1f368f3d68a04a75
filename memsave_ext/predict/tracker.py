"""Follows fake memory: a tracker whose events are those of fake storages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor

from .. import _parts
from ..checkpoint.fallback import surroundings
from ..memory.fallback.log import Block, Log, Logging
from ..memory.fallback.threads import RECOMPUTE, REMATERIALIZE, EventContext
from .storages import Storages

_listening: list[FakeTracker] = []  # the innermost last
_NO_NODE = 1 << 63  # sequence numbers from here on are those of nodes that accumulate gradients


class FakeMemory:
    """Labelled fake memory. Its end is reported, so that it need not be watched."""

    def __init__(self, number: int, size: int) -> None:
        self.ptr, self.size = number, size
        self.block: Block | None = None


class FakeTracker(Logging):
    """Does what the native tracker does, for the fake tensors made below :attr:`storages`.

    A clock that counts events stands for the time.

    Args:
        device: the device that is predicted. On the CPU memory from before :meth:`start` counts
            where it is labelled, as with real memory; on CUDA all of it counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts_all = device.type == "cuda"
        # The log only asks whether totals are those of CUDA's allocator, of which there are none.
        self._log = Log(torch.device("cpu"), [])
        self._running = False
        self._thread = threading.get_ident()
        self._clock = itertools.count()
        # Native remat counts the bytes and seconds of the step, too.
        self._remat: Any = (native := _parts.native("remat")) and native.RematFakes(
            _fake_of, self._counts_all
        )
        self.storages = Storages(self._allocated, self._freed, self._ran, device)
        self._open: list[int] = []
        self._depths: list[int] = []

    def plans(self) -> bool:
        """Whether blocks of remat plan the steps to come by one that has been."""
        return bool(self._remat) and bool(self._remat.knows_steps())

    def set_modules(self, parents: list[int]) -> None:
        """Tells the model's modules, before :meth:`start`."""
        self._log = Log(torch.device("cpu"), parents)

    def start(self) -> None:
        self._running = True
        if self._counts_all:
            for number, size in self.storages.living():
                self._log_allocated(number, size)

    def begin(self) -> None:
        """Begins the record, once all that lived before is labelled."""
        self._log.begin(None, self._context())

    def stop(self) -> None:
        self._running = False
        self._log.threads.clear()

    def enter_module(self, module: int) -> None:
        self._open.append(module)
        self._log.threads.enter_module(module, _get_sequence_nr(), self._context())

    def exit_module(self, module: int) -> None:
        if module in self._open:
            while self._open.pop() != module:
                pass
        self._log.threads.exit_module(module, _get_sequence_nr(), self._context())

    def inside_module(self) -> bool:
        return bool(self._open)

    def begin_optimizer(self) -> None:
        self._log.threads.begin_optimizer(self._context())
        self._log.mark_phase(self._context())

    def end_optimizer(self, step: bool) -> None:
        self._log.threads.end_optimizer(self._context())
        self._log.mark_phase(self._context())
        if step:
            self.end_step()

    def end_step(self) -> None:
        self._log.end_step(self._context())

    def label(self, tensors: Sequence[Tensor], category: int, names: Sequence[int]) -> None:
        found = []
        for tensor, name in zip(tensors, names, strict=True):
            memory = self.storages.memory(tensor)
            if memory is not None:
                found.append((FakeMemory(*memory), name))
        self._log.label(found, category, self._context())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears inside the block when recomputes begin and end.

        The caller holds a lock, so that of several only the innermost hears them.
        """
        before = surroundings.recompute_observer
        surroundings.recompute_observer = lambda begins: self._recompute(True, begins)
        _listening.append(self)
        self._listen_to_native(True)
        try:
            yield
        finally:
            surroundings.recompute_observer = before
            self._listen_to_native(False)
            _listening.pop()
            if _listening:
                _listening[-1]._listen_to_native(True)

    def _listen_to_native(self, begins: bool) -> None:
        if native := _parts.native("checkpoint"):
            native.listen_to_recomputes(self._recompute if begins else None)
        if self._remat:
            (self._remat.enter if begins else self._remat.leave)()

    def _recompute(self, region: bool, begins: bool) -> None:
        if threading.get_ident() == self._thread:
            self.storages.makers.recomputes += 1 if begins else -1
        if not self._running or threading.get_ident() != self._thread:
            return
        if begins:
            self._depths.append(len(self._open))
            phase = RECOMPUTE if region else REMATERIALIZE
            self._log.threads.begin_recompute(phase, self._context())
        else:
            if self._depths:
                # A recompute that stops early leaves its modules without calling their hooks.
                del self._open[self._depths.pop() :]
            self._log.threads.end_recompute(self._context())

    def _allocated(self, number: int, size: int) -> None:
        if self._remat:
            self._remat.allocated(number, size)
        self._log_allocated(number, size)

    def _log_allocated(self, number: int, size: int) -> None:
        if self._running:
            self._log.allocated(number, size, None, self._context())

    def _freed(self, number: int) -> None:
        if self._remat:
            self._remat.freed(number)
        if self._running:
            self._log.freed(number, None, self._context())

    def _ran(self, seconds: float) -> None:
        if self._remat:
            self._remat.ran(seconds)

    def _context(self) -> EventContext:
        time, thread = next(self._clock), threading.get_ident()
        if torch._C._current_graph_task_id() == -1:
            return EventContext(time, thread)
        node = torch._C._current_autograd_node()
        sequence = -1 if node is None else node._sequence_nr()
        return EventContext(time, thread, True, thread, -1 if sequence >= _NO_NODE else sequence)


def _fake_of(tensor: Tensor) -> FakeTensor:
    """Returns a fake tensor with the memory of one on the meta device."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return FakeTensor(mode, tensor, torch.device("cpu"))
