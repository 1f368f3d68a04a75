"""A tracker in pure Python, for where there is no native part.

Its events are those of torch's profiler, which are read when the block is left: until then it does
not know its figures. It sees no other threads.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.multiprocessing.reductions import StorageWeakRef

from ..checkpoint.fallback import surroundings
from .events import (
    ALLOCATED,
    BEGIN_RECOMPUTE,
    BEGIN_TRACKING,
    END_RECOMPUTE,
    END_TRACKING,
    FOUND,
    FREED,
    GONE,
    LABELLED,
    NO_NODE,
    NOT_IN_BACKWARD,
    RESET_PEAK,
    Event,
    label_value,
)
from .tracker import Tracker

_MARK = "memsave_ext.memory "
_NODE = "autograd::engine::evaluate_function: "
# Numbers of marks that stand for no note of the tracker.
_AFTER_BACKWARD, _NODE_LEFT = -1, -2
_PAUSE = -1  # a kind that the log does not see; its value is added to the depth of pauses

_queue = torch.autograd.Variable._execution_engine.queue_callback
_thread = threading.local()
_running: ProfilerTracker | None = None  # at most one, as the process has one profiler


def pause_tracking(paused: bool) -> None:
    """Pauses or resumes tracking on this thread; pauses may be nested.

    Allocations meanwhile do not count. This is for those of tracking itself.
    """
    by = 1 if paused else -1
    _thread.paused = getattr(_thread, "paused", 0) + by
    running = _running
    if running is not None:
        running.pause(by)


class ProfilerTracker(Tracker):
    """Follows the memory of the thread that starts it and of that thread's backwards.

    The figures are known once :meth:`stop` has run. What the hooks tell is noted, with a mark among
    the profiler's events, and read with them. Notes of other threads leave no mark and are lost.
    """

    def __init__(self, device: torch.device, parents: list[int], max_events: int) -> None:
        super().__init__(parents, max_events)
        self._device = device
        self._profile: torch.autograd.profiler.profile | None = None
        self._thread = self._begun = 0
        self._graph = -1  # graph task id of the latest backward, which is watched
        self._notes: dict[int, tuple[int, int, int]] = {}  # kind, subject and value, by number
        self._numbers = itertools.count()
        self._labelled: dict[int, _Memory] = {}  # by address

    def start(self, total: int | None) -> None:
        """``total``: live bytes by the allocator's own count; None on the CPU, which has none."""
        global _running
        if _running is not None or torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError(
                "memory tracking cannot start: this thread is already tracked, or torch's profiler "
                "is running on it, and only one of both can run in a thread"
            )
        self._thread, self._begun = threading.get_ident(), time.time_ns()
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()
        self.pause(getattr(_thread, "paused", 0))
        begin = Event(BEGIN_TRACKING, 0, 0, self._begun, NOT_IN_BACKWARD)
        self._log.read([begin if total is None else begin._replace(total=total)])
        surroundings.recompute_observer = self._observe_recompute
        _running = self

    def stop(self) -> None:
        global _running
        profile = self._profile
        if profile is None:
            return  # an interrupt came before it was started
        self.check_stop()
        try:
            self.look()
        finally:
            self._profile = _running = surroundings.recompute_observer = None
            profile.__exit__(None, None, None)
        notes, self._notes = self._notes, {}
        self._log.read(self._events(_marks_and_changes(profile, self._begun), notes))
        self._note(END_TRACKING)

    def check_stop(self) -> None:
        if self._profile is not None and self._thread != threading.get_ident():
            raise RuntimeError("memory tracking cannot stop: it was not started on this thread")

    def _events(
        self, found: list[_Found], notes: dict[int, tuple[int, int, int]]
    ) -> Iterator[Event]:
        paused: defaultdict[int, int] = defaultdict(int)  # by thread
        for event, what in found:
            if isinstance(what, int):
                kind, subject, value = notes[what]
                if kind == _PAUSE:
                    paused[event.thread] += value
                else:
                    yield event._replace(kind=kind, subject=subject, value=value)
            elif what.device == self._device:
                is_paused = bool(paused[event.thread])
                if is_paused and what.alloc_size > 0:
                    continue
                # What is freed counts also meanwhile: a garbage collector may do it at any time.
                no_total = is_paused or self._device.type == "cpu"
                yield event._replace(
                    kind=ALLOCATED if what.alloc_size > 0 else FREED,
                    subject=what.ptr,
                    value=what.alloc_size,
                    total=-1 if no_total else what.total_allocated,
                )

    def label(self, tensors: Sequence[Tensor], category: int, names: Sequence[int]) -> None:
        self._watch_backward()
        for tensor, name in zip(tensors, names, strict=True):
            memory = self._new_memory(tensor)
            if memory is not None:
                self._note(FOUND, memory.ptr, memory.size)
                self._note(LABELLED, memory.ptr, label_value(category, name))

    def look(self) -> None:
        if self._profile is None:
            return  # what is freed once tracking has ended does not count
        for memory in [memory for memory in self._labelled.values() if memory.is_gone()]:
            del self._labelled[memory.ptr]
            self._note(GONE, memory.ptr)

    def reset_peak(self) -> None:
        self.look()
        self._note(RESET_PEAK)

    def pause(self, by: int) -> None:
        self._note(_PAUSE, 0, by)

    def _observe_recompute(self, begins: bool) -> None:
        self._note(BEGIN_RECOMPUTE if begins else END_RECOMPUTE, 1)

    def _note(self, kind: int, subject: int = 0, value: int = 0) -> None:
        if self._profile is not None:
            number = next(self._numbers)
            self._notes[number] = kind, subject, value
            _put_mark(number)
        elif kind != _PAUSE:
            self._log.read([Event(kind, 0, 0, time.time_ns(), NOT_IN_BACKWARD, subject, value)])

    def _watch_backward(self) -> None:
        graph = torch._C._current_graph_task_id()
        if graph > self._graph and self._profile is not None:
            self._graph = graph
            _queue(partial(self._after_backward, 2))

    def _after_backward(self, again: int) -> None:
        """Marks that callbacks at the end of a backward ran until here.

        It queues itself ``again`` more times, to run after callbacks that other callbacks queue.
        """
        _put_mark(_AFTER_BACKWARD)
        if again:
            _queue(partial(self._after_backward, again - 1))

    def _new_memory(self, tensor: Tensor) -> _Memory | None:
        """Returns the tensor's memory, None if it has none or one with a label."""
        if tensor.device != self._device:
            return None
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a subclass without a storage
            return None
        ptr = _address(storage)
        if not ptr:
            return None
        known = self._labelled.get(ptr)
        if known is not None:
            if known.is_of(storage) or not known.is_gone():
                return None
            self._note(GONE, ptr)
        self._labelled[ptr] = memory = _Memory(storage, ptr)
        return memory


class _Memory:
    """The memory of a tensor that has a label, without keeping the tensor or its memory alive."""

    def __init__(self, storage: torch.UntypedStorage, ptr: int) -> None:
        self.ptr, self.size = ptr, storage.nbytes()
        self._weak = StorageWeakRef(storage)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        return bool(self._weak.cdata == storage._cdata)

    def is_gone(self) -> bool:
        if self._weak.expired():
            return True
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return storage is None or _address(storage) != self.ptr


def _address(storage: torch.UntypedStorage) -> int:
    """Returns the address of the memory of a storage, 0 if it has none."""
    try:
        return storage.data_ptr() if storage.nbytes() else 0
    except (RuntimeError, NotImplementedError):  # a FakeTensor's, or its memory was freed
        return 0


class _Found(NamedTuple):
    event: Event  # its kind is not known yet
    what: Any  # the number of a mark, or the profiler's fields of an allocation


def _put_mark(number: int) -> None:
    """Puts a mark among the profiler's events.

    As an event itself, it has an exact place among the others, which a clock would not give.
    :data:`_AFTER_BACKWARD` says that callbacks at the end of a backward ran until this mark.
    """
    with _RecordFunctionFast(f"{_MARK}{number}"):
        pass


def _marks_and_changes(profile: torch.autograd.profiler.profile, begun: int) -> list[_Found]:
    """Returns the marks and changes of a profile that has ended, in order of time.

    Args:
        profile: its first mark was put at ``begun``.
        begun: ns as of ``time.time_ns``; the profiler's clock is shifted to it.
    """
    assert profile.kineto_results is not None
    tree = profile.kineto_results.experimental_event_tree()
    first = next((event for event in tree if event.name.startswith(_MARK)), None)
    if first is None:
        return []  # an interrupt came before the first
    events = sorted(
        _walk(tree, first.start_tid, begun - first.start_time_ns),
        key=lambda found: found.event.time,
    )
    # Callbacks at the end of a backward are inside no event. They lie between the end of its last
    # node and the _AFTER_BACKWARD mark, so this goes backwards in time from that mark.
    all_found: list[_Found] = []
    callbacks: set[int] = set()  # threads that are in such callbacks at this event
    for found in reversed(events):
        event, what = found
        if what == _NODE_LEFT:
            callbacks.discard(event.thread)
        elif what == _AFTER_BACKWARD:
            if event.node == NOT_IN_BACKWARD:  # a nested backward is inside a node
                callbacks.add(event.thread)
        elif event.thread in callbacks and event.node == NOT_IN_BACKWARD:
            all_found.append(_Found(event._replace(node=NO_NODE), what))
        else:
            all_found.append(found)
    return all_found[::-1]


def _walk(tree: list[Any], home: int, shift: int) -> Iterator[_Found]:
    pending = [(event, home, NOT_IN_BACKWARD) for event in tree]
    while pending:
        event, node_thread, node = pending.pop()
        thread, name = event.start_tid, event.name
        here = Event(-1, thread, node_thread, event.start_time_ns + shift, node)
        if event.tag == _EventType.Allocation:
            yield _Found(here, event.extra_fields)
        elif name.startswith(_MARK):
            yield _Found(here, int(name[len(_MARK) :]))
        else:
            if name.startswith(_NODE):
                # Events do not say which thread made a node. A backward inside a node is taken as
                # that of a recompute, whose forward ran on the same thread; others are taken as
                # made by the thread that tracks.
                node_thread = home if node == NOT_IN_BACKWARD else thread
                if node == NOT_IN_BACKWARD:
                    yield _Found(here._replace(time=event.end_time_ns + shift), _NODE_LEFT)
                node = event.extra_fields.sequence_number
                node = node if node >= 0 else NO_NODE
            pending += [(child, node_thread, node) for child in event.children]
