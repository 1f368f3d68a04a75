"""Measures a variant of a training step: its time, its peak, what it holds over time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from ..shared.modules import device_of
from .account import Timeline
from .events import CATEGORIES
from .series import step_of, thin
from .tracking import track

_POINTS = 4000

Build = Callable[[], tuple[nn.Module, Optimizer | None, Callable[[], object]]]


@dataclass(frozen=True)
class Row:
    """What was measured of one variant.

    Attributes:
        name: the variant's.
        seconds: the median time of a step that is not tracked.
        peak: bytes that live at the peak of the tracked steps.
        at_peak: these bytes by category.
        peak_phase: the phase that the peak is in.
        timeline: that of the step with the peak, thinned, with times from 0.
    """

    name: str
    seconds: float
    peak: int
    at_peak: dict[str, int]
    peak_phase: str
    timeline: Timeline = field(repr=False)


def measure(
    name: str, build: Build, steps: int, warmup: int, wanted: torch.device | None
) -> tuple[Row, torch.device]:
    """Measures one variant on ``wanted``, or on its model's device if None; returns that too."""
    with _named(name, "while it was built"):
        made = build()
    start = f"compare: the builder of variant {name!r}"
    model, optimizer, step = checked(start, made)
    device = wanted or device_of(model)
    with _named(name, "in a warm-up step"):
        for _ in range(warmup):
            step()
    with _named(name, "in a step that was timed"):
        seconds = [_time(step, device) for _ in range(steps)]
    with _named(name, "in a step that was tracked"):
        with track(model, optimizer, device=device) as tracked:
            for _ in range(steps):
                step()
        timeline = step_of(tracked.timeline, tracked.peak_step)
        row = Row(
            name=name,
            seconds=statistics.median(seconds),
            peak=tracked.peak,
            at_peak={category: tracked.at_peak[category] for category in CATEGORIES},
            peak_phase=tracked.peak_phase,
            timeline=thin(timeline, _POINTS),
        )
    return row, device


@contextmanager
def _named(name: str, when: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise RuntimeError(f"compare: variant {name!r} failed {when}: {what}") from error


def checked(who: str, made: object) -> tuple[nn.Module, Optimizer | None, Callable[[], object]]:
    """Returns what a builder made; raises an error that names ``who`` built it if it is wrong."""
    start = f"{who} must return (model, optimizer or None, step)"
    if not isinstance(made, tuple) or len(made) != 3:
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise TypeError(f"{start}, got {got}")
    model, optimizer, step = made
    wrong = {
        "the model": None if isinstance(model, nn.Module) else "a torch.nn.Module",
        "the optimizer": None
        if optimizer is None or isinstance(optimizer, Optimizer)
        else "a torch.optim.Optimizer or None",
        "the step": None if callable(step) else "callable",
    }
    for (what, allowed), value in zip(wrong.items(), made, strict=True):
        if allowed:
            raise TypeError(f"{start}; {what} must be {allowed}, got {type(value).__name__}")
    return model, optimizer, step


def _time(step: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Frees what a variant left: reference cycles, and on CUDA the allocator's cached blocks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
