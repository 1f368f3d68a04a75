"""Times of CUDA kernels by events, without what the host takes to queue them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Flush:
    """Leaves nothing in the cache but clean lines of its own.

    Where it takes the device longer than the host takes to queue a call, the device then runs that
    call without a pause: what events around it tell is the device's time.

    Args:
        size: bytes that are written, then read.
        device: where.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.buffer = torch.empty(size // 8, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()
        self.buffer.max()


def events(call: Callable[[], object]) -> Callable[[], float]:
    """Calls a function between two events; returns one that waits and returns the seconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()

    def seconds() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return seconds
