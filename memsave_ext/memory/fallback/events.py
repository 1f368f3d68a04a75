"""What torch's profiler saw of memory, in order of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast

from .threads import Moment

_MARK = "memsave_ext.memory "
_NODE = "autograd::engine::evaluate_function: "
# Numbers of marks that are no notes.
AFTER_BACKWARD, _NODE_LEFT = -1, -2


class Mark(NamedTuple):
    moment: Moment
    number: int


class Change(NamedTuple):
    moment: Moment
    device: torch.device
    ptr: int
    size: int  # negative: freed
    total: int  # what the device's allocator holds after it


def put_mark(number: int) -> None:
    """A mark is an event itself: its place among the others is exact, which no clock's would be.
    :data:`AFTER_BACKWARD` tells that callbacks at the end of a backward have run until there."""
    with _RecordFunctionFast(f"{_MARK}{number}"):
        pass


def marks_and_changes(profile: torch.autograd.profiler.profile, begun: int) -> list[Mark | Change]:
    """Those of a profile that has ended, and was marked at ``begun`` before anything else."""
    assert profile.kineto_results is not None
    tree = profile.kineto_results.experimental_event_tree()
    first = next(event for event in tree if event.name.startswith(_MARK))
    events = sorted(
        _walk(tree, first.start_tid, begun - first.start_time_ns), key=lambda e: e.moment.time
    )
    # No event holds the callbacks: they come after the last node's.
    found: list[Mark | Change] = []
    callbacks: set[int] = set()  # threads
    for event in reversed(events):
        thread, number = event.moment.thread, getattr(event, "number", 0)
        if number == _NODE_LEFT:
            callbacks.discard(thread)
        elif number == AFTER_BACKWARD:
            if not event.moment.in_backward:  # else of a backward inside a node
                callbacks.add(thread)
        else:
            if thread in callbacks:
                event = event._replace(moment=event.moment._replace(in_backward=True))
            found.append(event)
    return found[::-1]


def _walk(tree: list[Any], home: int, shift: int) -> Iterator[Mark | Change]:
    pending = [(event, False, home, -1) for event in tree]
    while pending:
        event, in_backward, node_thread, sequence = pending.pop()
        thread, name = event.start_tid, event.name
        moment = Moment(event.start_time_ns + shift, thread, in_backward, node_thread, sequence)
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            yield Change(moment, block.device, block.ptr, block.alloc_size, block.total_allocated)
        elif name.startswith(_MARK):
            yield Mark(moment, int(name[len(_MARK) :]))
        else:
            if name.startswith(_NODE):
                if not in_backward:
                    yield Mark(moment._replace(time=event.end_time_ns + shift), _NODE_LEFT)
                # Events do not say which thread made a node. A backward inside a node is that of
                # a recompute, which the same thread has run.
                node_thread = thread if in_backward else home
                in_backward, sequence = True, event.extra_fields.sequence_number
            pending += [(child, in_backward, node_thread, sequence) for child in event.children]
