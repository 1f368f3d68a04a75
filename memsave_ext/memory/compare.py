"""Compares variants of a training step: their peaks, their times, and what they hold over time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from .._version import __version__
from ..shared.checks import check_count, checked_device
from ..shared.table import Text, as_text, format_bytes, format_seconds, print_table
from .events import CATEGORIES
from .measure import Build, Row, forget, measure
from .pictures.comparison import plot_comparison
from .report import timeline_as_json, write_json

FORMAT = "memsave_ext.memory.comparison"
VERSION = 1


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` measured; ``rows`` are in the order in which the variants were given."""

    rows: list[Row]
    device: str

    def __str__(self) -> str:
        return self.report()

    def report(self, *, file: TextIO | None = None) -> Text:
        """Returns a table with a row for each variant: its time, its peak, and what the peak held.

        Times and peaks are also given relative to those of the first variant.

        Args:
            file: where to print it, too; None for nowhere.
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
        columns += ["in", *held]
        return as_text(lambda text: print_table(title, columns, cells, text), file)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draws all variants in one picture: memory over a step, peak against time and
        what the peaks hold.

        Args:
            path: the file to write; its suffix names the format.
            title: printed above the picture; None for one that names the device.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib cannot write that format.
        """
        title = title or f"Training steps on {self.device}"
        plot_comparison(self.rows, path, title)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Returns the comparison as numbers, strings, lists and dicts; also written to ``path``.

        ``variants`` lists the fields of the rows, in seconds and bytes. The timelines are thinned
        out and look as in :meth:`Track.to_json`.
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
    """Returns ``value / first`` as text, ``"0.65"``, or ``"-"`` if ``first`` is 0."""
    return f"{value / first:.2f}" if first else "-"


def compare(
    variants: Mapping[str, Build],
    *,
    steps: int = 3,
    warmup: int = 1,
    device: torch.device | str | None = None,
) -> Comparison:
    """Runs variants of a training step one after the other and measures memory and time of each.

    Example::

        def naive():
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters())
            return model, optimizer, lambda: train_step(model, optimizer)

        memory.compare({"naive": naive, "checkpoint": with_checkpoint}).plot("compare.png")

    Each variant is built, makes ``warmup`` steps, then ``steps`` that are timed, then ``steps``
    that are tracked, and is dropped before the next one is built.

    Args:
        variants: a function for each name. It takes no arguments and returns the model, its
            optimizer or None, and a function that makes one training step.
        steps: how many steps are timed, and how many are tracked.
        warmup: how many steps are made before these. With 0 the first step is timed too, in which
            an optimizer makes its state.
        device: the device whose memory is tracked; None for that of the first model's first
            parameter.

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
    wanted = None if device is None else checked_device("compare", device)
    rows = []
    for name, build in variants.items():
        row, wanted = measure(name, build, steps, warmup, wanted)
        rows.append(row)
        forget(wanted)
    return Comparison(rows, str(wanted))
