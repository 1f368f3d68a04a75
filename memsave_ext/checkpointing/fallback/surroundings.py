"""Autocast, random state and device of a forward, restored for its recompute."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..._streams import on_stream

_thread = threading.local()


class Again(Enum):
    """What runs again: a region's function, or single operators of a rematerialization."""

    REGION = "region"
    OPERATORS = "operators"


# Called at the begin and end of every recompute while memory is tracked; None otherwise.
recompute_observer: Callable[[Again, bool], None] | None = None
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class AutocastState:
    devices: tuple[tuple[bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def capture() -> AutocastState:
        devices = tuple(
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES
        )
        return AutocastState(devices, torch.is_autocast_cache_enabled())

    def restore(self, cache: bool) -> None:
        for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, self.devices, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def uncached_autocast(state: AutocastState) -> Iterator[None]:
    """The state without its cache: casts made without a graph must not be found by others."""
    outer = AutocastState.capture()
    state.restore(cache=False)
    try:
        yield
    finally:
        outer.restore(outer.cache)


class RngState:
    def __init__(self, cpu: torch.Generator, cuda: dict[int, Tensor]) -> None:
        self.cpu, self.cuda = cpu, cuda  # a generator is no tensor, which would count as memory

    @staticmethod
    def capture() -> RngState:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
        cpu = torch.default_generator.clone_state()
        return RngState(cpu, {d: torch.cuda.get_rng_state(d) for d in devices})

    def restore(self) -> None:
        torch.set_rng_state(self.cpu.get_state())
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)


def is_recomputing() -> bool:
    return getattr(_thread, "depth", 0) > 0


@dataclass
class Surroundings:
    """What a recompute must find as its forward did."""

    autocast: AutocastState
    rng: RngState | None  # None where random numbers are not replayed
    stream: torch.cuda.Stream | None

    @staticmethod
    def capture(rng: bool = True) -> Surroundings:
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        return Surroundings(AutocastState.capture(), RngState.capture() if rng else None, stream)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them, with grad mode on, for a recompute inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_stream(self.stream))
            stack.enter_context(uncached_autocast(self.autocast))
            if self.rng is not None:
                stack.callback(RngState.capture().restore)
                self.rng.restore()
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recomputing())
            yield


@contextlib.contextmanager
def recomputing(again: Again = Again.REGION) -> Iterator[None]:
    _thread.depth = getattr(_thread, "depth", 0) + 1
    _tell(again, True)
    try:
        yield
    finally:
        _thread.depth -= 1
        _tell(again, False)


def _tell(again: Again, begins: bool) -> None:
    observer = recompute_observer
    if observer is not None:
        observer(again, begins)
