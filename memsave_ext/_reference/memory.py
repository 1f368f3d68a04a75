"""Allocation tracking from the memory events of torch's profiler."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


class AllocationTracker:
    """Live CPU bytes from the memory events of torch's profiler, known once :meth:`stop` ran."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._profile: torch.autograd.profiler.profile | None = None
        self._thread: int | None = None
        self._blocks: dict[int, int] = {}

    def start(self) -> None:
        if self._profile is not None or torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError(
                "memory tracking cannot start: this thread is already tracked, or torch's profiler "
                "is running on it; the two share one slot"
            )
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()
        self._thread = threading.get_ident()

    def stop(self) -> None:
        if self._profile is None or self._thread != threading.get_ident():
            raise RuntimeError("memory tracking cannot stop: it was not started on this thread")
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        assert profile.kineto_results is not None
        tree = profile.kineto_results.experimental_event_tree()
        events = [e for e in _walk(tree) if e.tag == _EventType.Allocation]
        for event in sorted(events, key=lambda e: e.start_time_ns):
            block: Any = event.extra_fields
            if block.device.type != "cpu":
                continue
            # A known address that is allocated again was freed while nobody looked.
            self.live -= self._blocks.pop(block.ptr, 0)
            if block.alloc_size > 0:
                self._blocks[block.ptr] = block.alloc_size
                self.live += block.alloc_size
                self.peak = max(self.peak, self.live)

    def reset_peak(self) -> None:
        self.peak = self.live
