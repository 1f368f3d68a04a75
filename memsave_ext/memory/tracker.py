"""Trackers: what writes events down, and the log that reads them."""

from __future__ import annotations

import atexit
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from .. import _native
from .events import (
    BEGIN_OPTIMIZER,
    END_OPTIMIZER,
    END_STEP,
    END_TRACKING,
    ENTER_MODULE,
    EXIT_MODULE,
)
from .log import Log, Record


class Tracker:
    """What hooks and figures call. A subclass writes events down and has the log read them."""

    def __init__(self, parents: list[int], max_events: int) -> None:
        self._log = Log(parents, max_events)
        self.steps = 0  # that have ended

    def enter_module(self, module: int) -> None:
        self._note(ENTER_MODULE, module, _get_sequence_nr())

    def exit_module(self, module: int) -> None:
        self._note(EXIT_MODULE, module, _get_sequence_nr())

    def begin_optimizer(self) -> None:
        self.look()
        self._note(BEGIN_OPTIMIZER)

    def end_optimizer(self, step: bool) -> None:
        """``step``: whether a training step ends with it."""
        self.look()
        self._note(END_OPTIMIZER)
        if step:
            self._end_step()

    def end_step(self) -> None:
        self.look()
        self._end_step()

    def _end_step(self) -> None:
        self.steps += 1
        self._note(END_STEP)

    def label(self, tensors: Sequence[Tensor], category: int, names: Sequence[int]) -> None:
        """Gives the memory of tensors a category and a name, unless it has them."""
        raise NotImplementedError

    def look(self) -> None:
        """Notes memory from before tracking that has been freed, where no event says so."""

    def check_stop(self) -> None:
        """Raises RuntimeError where it cannot be stopped on this thread."""

    def _note(self, kind: int, subject: int = 0, value: int = 0) -> None:
        raise NotImplementedError

    @property
    def live(self) -> int:
        return self._log.total

    @property
    def peak(self) -> int:
        return self._log.peak

    def record(self) -> Record:
        return self._log.record()


if _native.module is not None:
    atexit.register(_native.module.end_memory_reading)


class NativeTracker(Tracker):
    """Events are written down by csrc/memory/tracker.h, which counts what lives, too.

    Reading an event takes as long as ten allocations, so it is put off until somebody asks or
    there are so many that they take megabytes.
    """

    _EVENT = struct.Struct("i4xiiqqqqq")  # as Event has it

    def __init__(
        self, device: torch.device, parents: list[int], stacks: bool, max_events: int
    ) -> None:
        super().__init__(parents, max_events)
        native: Any = _native.module
        self._native = native.MemoryTracker(device, stacks)
        self._reading = threading.RLock()

    def start(self, total: int | None) -> None:
        """``total``: live bytes by the allocator's own count; None on the CPU, which has none."""
        self._native.start(total, self._read)

    def check_stop(self) -> None:
        self._native.check_stop()

    def stop(self) -> None:
        """Does nothing where it was not started."""
        self._native.stop()
        self._note(END_TRACKING)

    def label(self, tensors: Sequence[Tensor], category: int, names: Sequence[int]) -> None:
        self._native.label(tensors, category, names)

    def look(self) -> None:
        self._native.look()

    def reset_peak(self) -> None:
        self._native.reset_peak()

    def _note(self, kind: int, subject: int = 0, value: int = 0) -> None:
        self._native.note(kind, subject, value)

    @property
    def live(self) -> int:
        return int(self._native.live)

    @property
    def peak(self) -> int:
        return int(self._native.peak)

    def record(self) -> Record:
        self.look()
        with self._reading:
            self._read()
            return self._log.record()

    def _read(self) -> None:
        with self._reading:
            while True:
                events, origins = self._native.take()
                if not events:
                    return
                self._log.read(self._EVENT.iter_unpack(events), origins)
