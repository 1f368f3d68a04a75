"""What was found: techniques that make a training step fit into a budget, each with its peak."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer

from ..memory.account import TensorAtPeak
from ..memory.events import CATEGORIES
from ..shared.table import Text, as_text, format_bytes, format_seconds, print_table
from .agreement import check_same, together
from .applied import Applied, apply, undone_by_errors
from .picture import plot_fits
from .techniques import Techniques, named, technique_of


@dataclass(frozen=True)
class Fit:
    """What one combination of techniques needs.

    Attributes:
        name: the techniques, such as ``"checkpoint by block, Adam in backward"``.
        cost: what they cost.
        bits: whether results keep their bits: ``"yes"``, ``"but for rounding"`` of sums in another
            order, or ``"no"`` where states are rounded.
        peak: predicted bytes; None where they do not apply.
        at_peak: the peak by category.
        fits: whether the peak, on CUDA what is reserved, is within the budget.
        largest_batch: the largest batch that was found to fit, 0 for none; where steps of some
            sizes fail, as they take multiples of 8 alone, larger ones may fit, too. None where
            ``build`` takes no batch, they do not apply, or none was found, but smaller ones could
            not be predicted.
        reason: why they do not apply, or were not predicted, else ``""``.
        moved: the most bytes that lie elsewhere at a time, in the place ``offload``; not in the
            peak. None where they do not apply or nothing is moved.
        bus_seconds: about how long a step's copies there and back take, beside its arithmetic.
        reserved: bytes that CUDA's caching allocator reserves, as :attr:`PredictedStep.reserved`;
            None on a CPU, and where they do not apply.
        remat_budget: the bytes that ``remat`` has to keep to, of allocated memory, for what is
            reserved to be within the budget; None where that is the budget.
        time: about how long a step takes, over the step as it is built; None where they do not
            apply, the step as it is built was not predicted, or gradients, states or weights lie
            elsewhere, of which it is not known how fast they are copied.
        is_unpredicted: whether its prediction failed, as one that takes too long; else it has a
            peak, or the techniques do not apply.
    """

    name: str
    cost: str
    bits: str
    peak: int | None = None
    at_peak: dict[str, int] | None = None
    fits: bool = False
    largest_batch: int | None = None
    reason: str = ""
    moved: int | None = None
    bus_seconds: float | None = None
    reserved: int | None = None
    remat_budget: int | None = None
    time: float | None = None
    is_unpredicted: bool = False

    @property
    def needed(self) -> int | None:
        """What has to be within the budget."""
        return self.peak if self.reserved is None else self.reserved

    @property
    def times(self) -> str:
        """The time as a text, such as ``"1.34x"``; empty where it is not known."""
        return "" if self.time is None else f"{self.time:.2f}x"


@dataclass(frozen=True)
class Fits:
    """What :func:`fits` returns; ``rows`` are in the order of their cost, the cheapest first.

    The last is the first that fits, unless all were asked for.

    Attributes:
        rows: a combination of techniques each.
        budget: bytes.
        device: the device that was predicted for.
        batch: the batch that peaks are of; None where ``build`` takes none.
        largest: the largest tensors at the lowest peak.
        offload: the place where techniques may move memory to; None for nowhere.
        others: bytes of every peak that are other models', as :attr:`PredictedStep.others`.
        devices: how many devices each has a process of the step; None for a step of one process.
        hints: what else would lower that peak, by a change of the model's code: a sentence each.
        skipped: whether more expensive techniques were not tried, since one before them fits.
    """

    rows: list[Fit]
    budget: int
    device: str
    batch: int | None
    largest: list[TensorAtPeak]
    hints: list[str]
    offload: str | None = None
    others: int = 0
    devices: int | None = None
    skipped: bool = False

    @property
    def cheapest(self) -> Fit | None:
        """The first row that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    def __str__(self) -> str:
        return self.report()

    def report(self, *, file: TextIO | None = None) -> Text:
        """Returns a table with a row for each combination, and which is the cheapest, or what holds
        the memory.

        Args:
            file: where to print it, too; None for nowhere.
        """
        return as_text(self._write, file)

    def _write(self, file: TextIO) -> None:
        moves = any(row.moved for row in self.rows)
        reserves = any(row.reserved is not None for row in self.rows)
        cells = [
            (
                row.name,
                "-" if row.peak is None else format_bytes(row.peak),
                *(
                    []
                    if not reserves
                    else ["-" if row.reserved is None else format_bytes(row.reserved)]
                ),
                "yes" if row.fits else "no" if row.peak is not None else "-",
                "-" if row.largest_batch is None else row.largest_batch,
                *_moved(row, moves),
                row.times or "-",
                "-" if row.peak is None else row.bits,
                row.cost,
            )
            for row in self.rows
        ]
        more = ["moved", "copies take"] if moves else []
        reserved = ["reserved"] if reserves else []
        more = [*more, "time", "same bits"]
        columns = ["technique", "peak", *reserved, "fits", "largest batch", *more, "cost"]
        title = f"{self.title()}, in a budget of {format_bytes(self.budget)}"
        print_table(title, columns, cells, file)
        print(self.verdict(), file=file)
        for line in (*self.not_applied(), *self.hints):
            print(line, file=file)

    def not_applied(self) -> Iterator[str]:
        """Yields a sentence for each reason why techniques were not tried."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.peak is None:
                what = "predicted" if row.is_unpredicted else "tried"
                reasons.setdefault((what, row.reason), []).append(row.name)
        for (what, reason), names in reasons.items():
            yield f"Not {what}: {'; '.join(names)} ({reason})."
        if self.skipped:
            yield "More expensive techniques were skipped; every=True, or --every, tries them, too."

    def verdict(self) -> str:
        """Returns the cheapest that fits, or what holds the memory."""
        if self.cheapest is not None:
            return f"The cheapest that fits: {self.cheapest.name}."
        least = lowest(self.rows)
        assert least.at_peak is not None and least.peak is not None
        parts = [f"{c} {format_bytes(least.at_peak[c])}" for c in CATEGORIES if least.at_peak[c]]
        tensors = [
            f"{t.name or t.module or t.category} {format_bytes(t.bytes)}" for t in self.largest
        ]
        lowest_peak = format_bytes(least.peak)
        if least.reserved is not None:
            lowest_peak += f", for which {format_bytes(least.reserved)} are reserved"
        return (
            f"Nothing fits. The lowest peak is {lowest_peak}, with {least.name}: "
            f"{', '.join(parts)}. Its largest tensors: {', '.join(tensors)}."
        )

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draws a bar for each combination, what its peak is made of, with the budget's line and
        what it costs. Needs matplotlib.

        Args:
            path: the file to write, such as ``"fits.png"``; its suffix names the format.
            title: printed above the picture; None for one that names the device and the batch.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib cannot write that format.
        """
        plot_fits(self.rows, self.budget, path, self.title() if title is None else title)

    def title(self) -> str:
        """Returns what the peaks are of."""
        at = "" if self.batch is None else f", batch {self.batch}"
        return f"Predicted peaks of a training step on {self.device}{at}"

    def apply(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        technique: str | None = None,
        *,
        accumulate_when: Callable[[], object] | None = None,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        means: str | None = None,
    ) -> Applied:
        """Applies the cheapest technique that fits to a real model and its optimizer, in place.

        Args:
            model: a model such as was predicted. Where it is wrapped for several processes, all
                of them call this.
            optimizer: its optimizer; None for a loop without states.
            technique: the name of a row to apply in place of the cheapest that fits, whether it
                fits or not.
            accumulate_when, max_grad_norm, grad_scaler, means: as of :func:`memsave_ext.fit`.

        Returns:
            A handle with what the loop must use, and ``undo()``.

        Raises:
            torch.OutOfMemoryError: nothing fits. It says what was tried, and the lowest peak.
            TypeError, ValueError: an argument is not as said above; the model is wrapped in
                DataParallel, compiled, or has a technique applied to it already; the named
                technique does not apply; another process takes another one.
            RuntimeError: another process has raised an error, or the prediction of the named
                technique has failed.
        """
        with undone_by_errors(model), together("apply", model) as meeting:
            chosen, row = self.chosen("apply", technique_of("apply", technique, means))
            if meeting is not None:
                check_same(meeting, {"technique": chosen.name})
                if self.devices != len(meeting.ranks):
                    row = None  # of a step that is wrapped otherwise
            row = row or Fit(*chosen.row)
            made = apply(
                chosen, model, optimizer, self.budget, row.peak, remat_budget=row.remat_budget,
                time=row.time, others=self.others, place=self.offload, may_be_wrapped=True,
                accumulate_when=accumulate_when, max_grad_norm=max_grad_norm,
                grad_scaler=grad_scaler,
            )  # fmt: skip
            if meeting is not None:
                made.warns = meeting.is_first
                meeting.all_gather(None)
            return made

    def chosen(self, who: str, technique: str | None) -> tuple[Techniques, Fit | None]:
        """Returns the technique to apply, the cheapest that fits or the one that is named, and its
        row, if it was tried. Raises an error of ``who`` where it cannot be applied."""
        if technique is None and self.cheapest is None:
            raise torch.OutOfMemoryError(self.sentence(who))
        chosen = named(who, technique or self.cheapest.name)  # type: ignore[union-attr]
        row = next((row for row in self.rows if row.name == chosen.name), None)
        if row is not None and row.peak is None:
            if row.is_unpredicted:
                raise RuntimeError(f"{who}: {row.name} was not predicted: {row.reason}")
            raise ValueError(f"{who}: {row.name} does not apply: {row.reason}")
        return chosen, row

    def sentence(self, who: str) -> str:
        """Returns what an error of ``who`` says where nothing fits."""
        tried = (row for row in self.rows if row.peak is not None)
        names = ", ".join(f"{row.name} ({format_bytes(row.needed or 0)})" for row in tried)
        return " ".join(
            [
                f"{who}: {self.verdict()} Budget: {format_bytes(self.budget)}. Tried: {names}.",
                *self.not_applied(),
                *self.hints,
                "The step would run out of memory.",  # by which libraries know what to retry
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as numbers, strings, lists and dicts."""
        return {**asdict(self), "cheapest": self.cheapest.name if self.cheapest else None}


def lowest(rows: list[Fit]) -> Fit:
    """Returns the row that needs least."""
    tried = (row for row in rows if row.peak is not None)
    return min(tried, key=lambda row: (row.needed or 0, row.peak or 0))


def _moved(row: Fit, moves: bool) -> tuple[str, ...]:
    """Returns the cells of what is moved; none where no row moves anything."""
    if not moves:
        return ()
    if row.moved is None or row.bus_seconds is None:
        return "-", "-"
    return format_bytes(row.moved), format_seconds(row.bus_seconds)
