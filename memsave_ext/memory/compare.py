"""Variants of a training step beside one another: their peaks, their times, what they hold when."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer

from .._version import __version__
from .account import CATEGORIES, Timeline
from .checks import check_count
from .report import format_seconds, timeline_as_json, write_json
from .series import step_of, thin
from .table import format_bytes, print_table
from .tracking import track

FORMAT = "memsave_ext.memory.comparison"
VERSION = 1
_POINTS = 4000

Build = Callable[[], tuple[nn.Module, Optimizer | None, Callable[[], object]]]


@dataclass(frozen=True)
class Row:
    """What was measured of one variant."""

    name: str
    seconds: float  # of one step without tracking, median
    peak: int  # bytes live at the peak of the tracked steps
    at_peak: dict[str, int]  # bytes by category, which sum to peak
    peak_phase: str
    timeline: Timeline = field(repr=False)  # of the step that has the peak, its time from 0


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` measured; ``rows`` are in the order in which the variants were given."""

    rows: list[Row]
    device: str

    def report(self, *, file: TextIO | None = None) -> None:
        """Print a row for each variant: time, peak, both times the first one's, what the peak held.

        Args:
            file: where to; None for ``sys.stdout``.
        """
        first = self.rows[0]
        held = [c for c in CATEGORIES if any(row.at_peak[c] for row in self.rows)]
        cells = [
            (
                row.name,
                format_seconds(row.seconds),
                times(row.seconds, first.seconds),
                format_bytes(row.peak),
                times(row.peak, first.peak),
                row.peak_phase,
                *(format_bytes(row.at_peak[category]) for category in held),
            )
            for row in self.rows
        ]
        columns = ["variant", "step", "\N{MULTIPLICATION SIGN}", "peak", "\N{MULTIPLICATION SIGN}"]
        title = f"Training steps on {self.device}, \N{MULTIPLICATION SIGN} against {first.name}"
        print_table(title, [*columns, "in", *held], cells, file)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw all variants in one picture: memory over a step, peak against time, what peaks hold.

        Args:
            path: the file to write; its suffix names the format.
            title: above the picture.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib cannot write that format.
        """
        from .pictures.comparison import plot_comparison

        plot_comparison(self, path, title)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The comparison as numbers, strings, lists and dicts; also written to ``path`` if given.

        ``variants`` lists the fields of the rows (seconds, bytes); the timelines are as in
        :meth:`Track.to_json`, thinned out.
        """
        document = {
            "format": FORMAT,
            "version": VERSION,
            "memsave_ext": __version__,
            "torch": str(torch.__version__),
            "device": self.device,
            "variants": [
                {
                    "name": row.name,
                    "seconds": row.seconds,
                    "peak": row.peak,
                    "at_peak": dict(row.at_peak),
                    "peak_phase": row.peak_phase,
                    "timeline": timeline_as_json(row.timeline),
                }
                for row in self.rows
            ],
        }
        if path is not None:
            write_json(document, path)
        return document


def times(value: float, first: float) -> str:
    """How many times ``first`` it is, ``"0.65"``."""
    return f"{value / first:.2f}" if first else "-"


def compare(
    variants: Mapping[str, Build],
    *,
    steps: int = 3,
    warmup: int = 1,
    device: torch.device | str | None = None,
) -> Comparison:
    """Run variants of a training step one after the other and measure memory and time of each.

    Example::

        def naive():
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters())
            return model, optimizer, lambda: train_step(model, optimizer)

        memory.compare({"naive": naive, "checkpoint": with_checkpoint}).plot("compare.png")

    Each variant is built, makes ``warmup`` steps, then ``steps`` whose times are taken, then
    ``steps`` that are tracked, and is dropped before the next is built.

    Args:
        variants: a function for each name. It takes nothing and returns the model, its optimizer or
            None, and a function that makes one training step.
        steps: how many steps are timed, and how many tracked.
        warmup: steps before; with 0, the state that an optimizer makes in its first step counts as
            memory of that step.
        device: whose memory is tracked; None for that of the first model's first parameter.

    Raises:
        TypeError, ValueError: an argument, or what a function returned, is not as said above.
        RuntimeError: a variant raised; the message names it, and the cause is what it raised.
    """
    if not isinstance(variants, Mapping):
        raise TypeError(
            "compare: variants must be a mapping of names to functions that build them, got "
            f"{type(variants).__name__}"
        )
    if not variants:
        raise ValueError("compare: variants must name at least one variant, got none")
    for name, build in variants.items():
        if not isinstance(name, str):
            raise TypeError(f"compare: the names of variants must be str, got {name!r}")
        if not callable(build):
            raise TypeError(
                f"compare: variant {name!r} must be a function that builds it, got "
                f"{type(build).__name__}"
            )
    check_count("compare: steps", steps, 1)
    check_count("compare: warmup", warmup, 0)
    wanted = None if device is None else torch.device(device)
    rows = []
    for name, build in variants.items():
        row, wanted = _measure(name, build, steps, warmup, wanted)
        rows.append(row)
        _forget(wanted)
    return Comparison(rows, str(wanted))


def _measure(
    name: str, build: Build, steps: int, warmup: int, wanted: torch.device | None
) -> tuple[Row, torch.device]:
    """Measure one variant, on the device that is wanted or else its own, which is returned too."""
    with _named(name, "while it was built"):
        made = build()
    model, optimizer, step = _checked(name, made)
    device = wanted or _device_of(model)
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


def _checked(name: str, made: object) -> tuple[nn.Module, Optimizer | None, Callable[[], object]]:
    """What a builder returned, or an error that names the variant."""
    start = f"compare: the builder of variant {name!r} must return (model, optimizer or None, step)"
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


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _time(step: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(device: torch.device) -> None:
    """Give back what a variant left: cycles, and on CUDA the blocks that its tensors were in."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
