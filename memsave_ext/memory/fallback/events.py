"""The allocations and frees that torch's profiler recorded, in order of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast

from .threads import EventContext

_MARK = "memsave_ext.memory "
_NODE = "autograd::engine::evaluate_function: "
# Numbers of marks that stand for no note of the tracker.
AFTER_BACKWARD, _NODE_LEFT = -1, -2


class Mark(NamedTuple):
    context: EventContext
    number: int


class Change(NamedTuple):
    context: EventContext
    device: torch.device
    ptr: int
    size: int  # bytes; negative if they were freed
    total: int  # bytes that the device's allocator holds after this change


def put_mark(number: int) -> None:
    """Puts a mark among the profiler's events.

    As an event itself, it has an exact place among the others, which a clock would not give.
    :data:`AFTER_BACKWARD` says that callbacks at the end of a backward ran until this mark.
    """
    with _RecordFunctionFast(f"{_MARK}{number}"):
        pass


def marks_and_changes(profile: torch.autograd.profiler.profile, begun: int) -> list[Mark | Change]:
    """Returns the marks and changes of a profile that has ended, in order of time.

    Args:
        profile: its first mark was put at ``begun``.
        begun: ns as of ``time.time_ns``; the profiler's clock is shifted to it.
    """
    assert profile.kineto_results is not None
    tree = profile.kineto_results.experimental_event_tree()
    first = next(event for event in tree if event.name.startswith(_MARK))
    events = sorted(
        _walk(tree, first.start_tid, begun - first.start_time_ns), key=lambda e: e.context.time
    )
    # Callbacks at the end of a backward are inside no event. They lie between the end of its last
    # node and the AFTER_BACKWARD mark, so this goes backwards in time from that mark.
    found: list[Mark | Change] = []
    callbacks: set[int] = set()  # threads that are in such callbacks at this event
    for event in reversed(events):
        thread, number = event.context.thread, getattr(event, "number", 0)
        if number == _NODE_LEFT:
            callbacks.discard(thread)
        elif number == AFTER_BACKWARD:
            if not event.context.in_backward:  # a nested backward is inside a node
                callbacks.add(thread)
        else:
            if thread in callbacks:
                event = event._replace(context=event.context._replace(in_backward=True))
            found.append(event)
    return found[::-1]


def _walk(tree: list[Any], home: int, shift: int) -> Iterator[Mark | Change]:
    pending = [(event, False, home, -1) for event in tree]
    while pending:
        event, in_backward, node_thread, sequence = pending.pop()
        thread, name = event.start_tid, event.name
        context = EventContext(
            event.start_time_ns + shift, thread, in_backward, node_thread, sequence
        )
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            yield Change(context, block.device, block.ptr, block.alloc_size, block.total_allocated)
        elif name.startswith(_MARK):
            yield Mark(context, int(name[len(_MARK) :]))
        else:
            if name.startswith(_NODE):
                if not in_backward:
                    yield Mark(context._replace(time=event.end_time_ns + shift), _NODE_LEFT)
                # Events do not say which thread made a node. A backward inside a node is taken as
                # that of a recompute, whose forward ran on the same thread; others are taken as
                # made by the thread that tracks.
                node_thread = thread if in_backward else home
                in_backward, sequence = True, event.extra_fields.sequence_number
            pending += [(child, in_backward, node_thread, sequence) for child in event.children]
