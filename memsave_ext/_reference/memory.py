"""Allocation tracking from the memory events of torch's profiler."""

from __future__ import annotations

import threading

import torch


class AllocationTracker:
    """Live CPU bytes from the memory events of torch's profiler, known once :meth:`stop` ran."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._profile: torch.autograd.profiler.profile | None = None
        self._thread: int | None = None

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
        events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            if event.device_type() == torch._C._autograd.DeviceType.CPU:
                self.live += event.nbytes()  # type: ignore[attr-defined]
                self.peak = max(self.peak, self.live)

    def reset_peak(self) -> None:
        self.peak = self.live
