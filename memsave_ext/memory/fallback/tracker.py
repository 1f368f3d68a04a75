"""Follows memory by the events of torch's profiler."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from ...checkpoint.fallback import surroundings
from .events import AFTER_BACKWARD, Mark, marks_and_changes, put_mark
from .log import Log, Logging, Memory, address
from .threads import RECOMPUTE, EventContext

_queue = torch.autograd.Variable._execution_engine.queue_callback
_thread = threading.local()
_running: MemoryTracker | None = None  # at most one, as the process has one profiler


def pause_tracking(paused: bool) -> None:
    """Pauses or resumes tracking on this thread; pauses may be nested.

    Allocations meanwhile do not count. This is for those of tracking itself.
    """
    by = 1 if paused else -1
    _thread.paused = getattr(_thread, "paused", 0) + by
    running = _running
    if running is not None:
        running.pause(by)


class MemoryTracker(Logging):
    """Follows the memory of the thread that starts it and of that thread's backwards.

    The figures are known once :meth:`stop` has run. What the hooks tell is noted, with a mark among
    the profiler's events, and acted on when these are read. Notes of other threads leave no mark
    and are lost.
    """

    def __init__(
        self, device: torch.device, parents: list[int], stacks: bool, max_events: int
    ) -> None:
        """Takes ``stacks`` and ``max_events`` as the native tracker does; they have no effect."""
        self._device = device
        self._log = Log(device, parents)
        self._profile: torch.autograd.profiler.profile | None = None
        self._thread = self._begun = 0
        self._graph = -1  # graph task id of the latest backward, which is watched
        self._notes: dict[int, Callable[[EventContext], None]] = {}
        self._numbers = itertools.count()
        # By thread: the modules it is in, and how many these were when each of its present
        # recomputes began.
        self._open: defaultdict[int, list[int]] = defaultdict(list)
        self._depths: defaultdict[int, list[int]] = defaultdict(list)
        self._labelled: dict[int, Memory] = {}  # by address
        self._paused: defaultdict[int, int] = defaultdict(int)  # by thread, at the event being read

    def start(self, total: int | None) -> None:
        global _running
        if _running is not None or torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError(
                "memory tracking cannot start: this thread is already tracked, or torch's profiler "
                "is running on it; the two share one slot"
            )
        profile = torch.autograd.profiler.profile(profile_memory=True)
        profile.__enter__()
        self._profile, self._thread = profile, threading.get_ident()
        self._open.clear()
        self._depths.clear()
        self._paused.clear()
        self._begun = time.time_ns()
        self.pause(getattr(_thread, "paused", 0))
        self._log.begin(total, EventContext(self._begun, 0))
        surroundings.recompute_observer = self._observe_recompute
        _running = self

    def stop(self) -> None:
        global _running
        if self._profile is None or self._thread != threading.get_ident():
            raise RuntimeError("memory tracking cannot stop: it was not started on this thread")
        self._look()
        profile, self._profile = self._profile, None
        _running = surroundings.recompute_observer = None
        profile.__exit__(None, None, None)
        notes, self._notes = self._notes, {}
        for event in marks_and_changes(profile, self._begun):
            if isinstance(event, Mark):
                notes[event.number](event.context)
            elif event.device == self._device and not self._paused[event.context.thread]:
                total = None if self._device.type == "cpu" else event.total
                if event.size > 0:
                    self._log.allocated(event.ptr, event.size, total, event.context)
                else:
                    self._log.freed(event.ptr, total, event.context)
        self._log.threads.clear()

    def enter_module(self, module: int) -> None:
        if not self.inside_module():
            self._look()
        self._open[threading.get_ident()].append(module)
        self._note(partial(self._log.threads.enter_module, module, _get_sequence_nr()))

    def exit_module(self, module: int) -> None:
        opened = self._open[threading.get_ident()]
        if module in opened:
            while opened.pop() != module:
                pass
        self._note(partial(self._log.threads.exit_module, module, _get_sequence_nr()))

    def inside_module(self) -> bool:
        return bool(self._open[threading.get_ident()])

    def begin_optimizer(self) -> None:
        self._look()
        self._note(self._log.threads.begin_optimizer)
        self._note(self._log.mark_phase)

    def end_optimizer(self, step: bool) -> None:
        self._look()
        self._note(self._log.threads.end_optimizer)
        self._note(self._log.mark_phase)
        if step:
            self._note(self._log.end_step)

    def end_step(self) -> None:
        self._look()
        self._note(self._log.end_step)

    def label(self, tensors: Sequence[Tensor], category: int, names: Sequence[int]) -> None:
        self._watch_backward()
        found: list[tuple[Memory, int]] = []
        for tensor, name in zip(tensors, names, strict=True):
            memory = self._memory(tensor)
            if memory is not None:
                found.append((memory, name))
        if found:
            self._note(partial(self._log.label, found, category))

    def reset_peak(self) -> None:
        self._look()
        self._note(self._log.reset_peak)

    def pause(self, by: int) -> None:
        self._note(partial(self._pause, by))

    def _pause(self, by: int, context: EventContext) -> None:
        self._paused[context.thread] += by

    def _observe_recompute(self, begins: bool) -> None:
        opened, depths = self._open[threading.get_ident()], self._depths[threading.get_ident()]
        if begins:
            depths.append(len(opened))
            self._note(partial(self._log.threads.begin_recompute, RECOMPUTE))
        else:
            if depths:  # else it began before tracking
                # A recompute that stops early leaves its modules without calling their hooks.
                del opened[depths.pop() :]
            self._note(self._log.threads.end_recompute)

    def _note(self, act: Callable[[EventContext], None]) -> None:
        if self._profile is None:
            act(EventContext(time.time_ns(), 0))
        else:
            number = next(self._numbers)
            self._notes[number] = act
            put_mark(number)

    def _watch_backward(self) -> None:
        graph = torch._C._current_graph_task_id()
        if graph > self._graph and self._profile is not None:
            self._graph = graph
            _queue(partial(self._after_backward, 2))

    def _after_backward(self, again: int) -> None:
        """Marks that callbacks at the end of a backward ran until here.

        It queues itself ``again`` more times, to run after callbacks that other callbacks queue.
        """
        put_mark(AFTER_BACKWARD)
        if again:
            _queue(partial(self._after_backward, again - 1))

    def _memory(self, tensor: Tensor) -> Memory | None:
        if tensor.device != self._device:
            return None
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a subclass without a storage
            return None
        ptr = address(storage)
        if not ptr:
            return None
        known = self._labelled.get(ptr)
        if known is not None:
            if known.is_of(storage) or not known.is_gone():
                return known
            self._note(partial(self._log.forget, [known]))
        self._labelled[ptr] = memory = Memory(storage, ptr)
        return memory

    def _look(self) -> None:
        """Forgets labelled memory that is gone.

        Memory from before tracking may have been freed without an event that says so. What is freed
        once it has ended does not count.
        """
        if self._profile is None:
            return
        gone = [memory for memory in self._labelled.values() if memory.is_gone()]
        for memory in gone:
            del self._labelled[memory.ptr]
        if gone:
            self._note(partial(self._log.forget, gone))
