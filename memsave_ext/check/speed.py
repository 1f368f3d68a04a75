"""How fast kernels are, beside a copy on the same machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from .kernels import Kernel, called, copied

_ROUNDS, _SECONDS = 9, 0.25  # a kernel is called until one of them is reached
_MANY_BYTES = 1 << 28  # more than caches hold


def copy_speed(device: torch.device) -> float:
    """Returns the GB/s that a copy reads and writes."""
    size = _MANY_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device) / 1e9


def speed_of(kernel: Kernel, device: torch.device) -> float | None:
    """Returns the GB/s of what a kernel has to move, each input and each output once; None where it
    isn't timed."""
    if kernel.large is None:
        return None
    arguments, moved = kernel.large(device)
    operator = getattr(torch.ops.memsave_ext, kernel.operator)
    # In turn, so that none is found in a cache.
    copies = [arguments, *(copied(arguments) for _ in range(_MANY_BYTES // moved))]
    turns = itertools.cycle(copies)
    return moved / _seconds(lambda: called(operator, next(turns)), device) / 1e9


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest time of a call, after one that is not counted."""
    taken: list[float] = []
    _synchronize(device)
    begin = time.perf_counter()
    while len(taken) <= _ROUNDS and (len(taken) < 3 or time.perf_counter() - begin < _SECONDS):
        taken.append(_events(call) if device.type == "cuda" else _clock(call))
    return min(taken[1:])


def _clock(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
