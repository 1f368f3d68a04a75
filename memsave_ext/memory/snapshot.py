"""Saves snapshots of torch's CUDA allocator for torch's viewer, and draws them without it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from ..shared.axes import new_figure, save
from ..shared.table import Text, as_text, format_bytes, print_table
from .pictures.history import draw_history
from .series import first_largest
from .snapshot_file import History, histories, read_snapshot


@dataclass(frozen=True)
class DeviceSummary:
    """What a snapshot says of one device; all sizes in bytes.

    Attributes:
        device: index of the device.
        events: number of events in the trace; 0 if no history was recorded.
        peak: the most that was allocated in the time that the trace covers, in sizes asked for.
        at_peak: the bytes at the peak by line of code, the largest first; they sum to ``peak``.
        reserved_at_peak: what the allocator had reserved at the peak.
        peak_reserved: the most that the allocator had reserved.
        out_of_memory: the sizes that were asked for when memory ran out.
        unexplained: bytes by which the trace and the blocks at its end disagree; 0 unless events
            are missing.
    """

    device: int
    events: int
    peak: int
    at_peak: dict[str, int]
    reserved_at_peak: int
    peak_reserved: int
    out_of_memory: tuple[int, ...]
    unexplained: int


@dataclass(frozen=True)
class SnapshotSummary:
    """What :func:`plot_snapshot` found; ``picture`` is the file it drew."""

    devices: list[DeviceSummary]
    picture: Path

    def report(self, *, top: int = 10, file: TextIO | None = None) -> Text:
        """Returns a text: the peak of each device and the ``top`` lines of code that held most at
        it. It is also printed to ``file`` if given."""
        return as_text(lambda text: self._write(top, text), file)

    def _write(self, top: int, file: TextIO) -> None:
        for found in self.devices:
            print(
                f"cuda:{found.device}: peak {format_bytes(found.peak)} allocated, "
                f"{format_bytes(found.reserved_at_peak)} reserved then, "
                f"{format_bytes(found.peak_reserved)} at most\n",
                file=file,
            )
            rows = [
                (line, format_bytes(size), f"{100 * size / found.peak:.1f}%")
                for line, size in list(found.at_peak.items())[:top]
            ]
            print_table("What the peak was made of", ["line", "memory", "share"], rows, file)
            for note in _notes(found):
                print(f"cuda:{found.device}: {note}\n", file=file)


def _notes(found: DeviceSummary) -> list[str]:
    notes = [f"out of memory: {format_bytes(size)} asked for" for size in found.out_of_memory]
    if not found.events:
        notes.append(
            "the snapshot has no history: call torch.cuda.memory._record_memory_history() before "
            "the steps that it is to show"
        )
    if found.unexplained:
        size = format_bytes(abs(found.unexplained))
        notes.append(
            "some events are missing: those in the trace, and the memory at its end, differ by "
            f"{size}"
        )
    return notes


def save_snapshot(device: torch.device, path: str | os.PathLike[str]) -> None:
    """Writes a snapshot of torch's CUDA allocator to ``path``, for https://pytorch.org/memory_viz.

    Its history begins with the call of ``torch.cuda.memory._record_memory_history()``.

    Args:
        device: the device that was tracked. The snapshot covers all devices.
        path: the file to write; its folder must exist.

    Raises:
        RuntimeError: ``device`` is no CUDA device, or torch finds no CUDA device.
    """
    if device.type != "cuda":
        raise RuntimeError(
            f"snapshot: only the memory of CUDA devices has snapshots, but {device} was tracked; "
            "to_json() saves what was tracked on any device"
        )
    if not torch.cuda.is_available():
        raise RuntimeError("snapshot: torch finds no CUDA device here")
    snapshot = torch.cuda.memory._snapshot(device)
    # Written to another file and renamed, so that an interruption keeps an earlier snapshot.
    aside = Path(f"{os.fspath(path)}.tmp")
    try:
        with open(aside, "wb") as file:
            pickle.dump(snapshot, file)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def plot_snapshot(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | int | None = None,
) -> SnapshotSummary:
    """Draws a snapshot of torch's CUDA allocator: what held how much when, and what was reserved.

    This needs neither a GPU nor a browser, and runs no code that the file may hold. Bytes are those
    asked for, by the innermost line of code that is neither torch's nor this package's. A block
    counts until it can be used again. What was allocated before the trace begins is found from the
    blocks at its end and from what is freed in it.

    Args:
        path: a file written by ``Track.snapshot`` or ``torch.cuda.memory._dump_snapshot``, or a
            pickle of what ``torch.cuda.memory._snapshot`` returned.
        out: the picture to write; its suffix names the format. None for ``path`` with ``.png``.
        device: the only device to draw; None for all in the file, one below another.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: ``path`` cannot be read, or ``out`` cannot be written.
        ValueError: ``path`` is no snapshot, holds more than plain data, or holds nothing about
            ``device``.
    """
    every = histories(read_snapshot(path), os.fspath(path))
    chosen = _of_device(every, device, path)
    figure = new_figure((11, 4.5 * len(chosen)))
    found = []
    for place, history in enumerate(chosen, 1):
        draw_history(figure.add_subplot(len(chosen), 1, place), history)
        found.append(_summary(history))
    picture = Path(path).with_suffix(".png") if out is None else Path(out)
    save(figure, picture)
    return SnapshotSummary(found, picture)


def _of_device(
    every: Sequence[History],
    device: torch.device | str | int | None,
    path: str | os.PathLike[str],
) -> Sequence[History]:
    if not every:
        raise ValueError(
            f"{os.fspath(path)} is an empty snapshot: it has neither blocks of memory nor events"
        )
    if device is None:
        return every
    index = device if isinstance(device, int) else torch.device(device).index or 0
    chosen = [history for history in every if history.device == index]
    if not chosen:
        there = ", ".join(f"cuda:{history.device}" for history in every)
        raise ValueError(f"plot_snapshot: device must be one of {there}, got {device!r}")
    return chosen


def _summary(history: History) -> DeviceSummary:
    peak = first_largest(history.allocated)
    return DeviceSummary(
        device=history.device,
        events=len(history.allocated) - 1,
        peak=int(history.allocated[peak]),
        at_peak=history.by_line(peak),
        reserved_at_peak=int(history.reserved[peak]),
        peak_reserved=int(history.reserved.max()),
        out_of_memory=tuple(size for _, size in history.out_of_memory),
        unexplained=history.unexplained,
    )
