"""Figures of what a block kept, dropped and recomputed, and a report of them as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ..shared.table import format_bytes, format_seconds, print_table

DROPPED, INPUT = "dropped", "from outside of the block"
PLANNED = (
    "This step follows a plan for its shape, as the third one and later do: it drops only what "
    "saves 4 % of the activations at the peak for each percent of the step's time"
)
# The order is that of Verdict in csrc/remat/policy.h.
VERDICTS = (
    DROPPED,
    INPUT,
    "cannot be repeated, or was not seen",
    "bound by arithmetic",
    "would gain too little",
    "the budget has room for it",
)


@dataclass(frozen=True)
class Saved:
    """Memory that autograd saved in a block, summed by the module and operator that made it."""

    module: str  # empty: made outside of the model's modules
    operator: str  # empty: not made by a recorded operator
    verdict: str  # "dropped", or why it is kept
    count: int  # how many storage contents
    bytes: int
    seconds: float  # to recompute what was dropped, as measured in the forward


@dataclass(frozen=True)
class Recomputed:
    """Operators that ran again in backward, summed by module and operator."""

    module: str
    operator: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class RematFigures:
    """What has become of the memory that autograd saved in a block."""

    operators: int  # how many operators were recorded
    saved: tuple[Saved, ...]
    recomputed: tuple[Recomputed, ...]
    given_back_bytes: int = 0  # dropped as allocations failed (``retry=True``)

    @property
    def dropped_bytes(self) -> int:
        return sum(row.bytes for row in self.saved if row.verdict == DROPPED)

    @property
    def kept_bytes(self) -> int:
        """Bytes kept, not counting inputs and parameters, which exist anyway."""
        return sum(row.bytes for row in self.saved if row.verdict not in (DROPPED, INPUT))

    @property
    def recomputed_operators(self) -> int:
        return sum(row.count for row in self.recomputed)


def make_figures(figures: dict[str, Any], names: Sequence[str]) -> RematFigures:
    """Converts a recorder's figures. ``names`` are the modules' names by number."""

    def name(number: int) -> str:
        return names[number] if number >= 0 else ""

    return RematFigures(
        figures["operators"],
        tuple(Saved(name(m), op, VERDICTS[v], *sums) for m, op, v, *sums in figures["saved"]),
        tuple(Recomputed(name(m), op, *sums) for m, op, *sums in figures["again"]),
        figures["given_back"][1],
    )


def write_report(figures: RematFigures, top: int, text: TextIO) -> None:
    kept, dropped = figures.kept_bytes, figures.dropped_bytes
    share = f", {kept / (kept + dropped):.2f} of the activations" if kept + dropped else ""
    seconds = format_seconds(sum(row.seconds for row in figures.recomputed))
    print(
        f"Kept {format_bytes(kept)}{share}; dropped {format_bytes(dropped)}; "
        f"computed again by {figures.recomputed_operators} operators in {seconds}; "
        f"{figures.operators} operators recorded\n",
        file=text,
    )
    if figures.given_back_bytes:
        given_back = format_bytes(figures.given_back_bytes)
        print(f"Allocations failed, and {given_back} were dropped for them\n", file=text)
    saved = [row for row in figures.saved if row.verdict != INPUT]
    for title, key in (("by module", _module), ("by operator", _operator)):
        columns = [title, "kept", "dropped", "computed again", "times", "in"]
        rows = _by(key, saved, figures.recomputed)
        if title != "by module" or len(rows) > 1:
            print_table("", columns, rows[:top], text)
    reasons = _reasons(saved)
    if reasons:
        print_table("Why it is kept", ["reason", "operator", "memory"], reasons[:top], text)
    if saved and not any(row.module for row in figures.saved):
        print("By module: with remat(model), or remat_module(model, by_module=True)", file=text)


def _module(row: Saved | Recomputed) -> str:
    return row.module or "-"


def _operator(row: Saved | Recomputed) -> str:
    return row.operator or "-"


def _by(
    key: Callable[[Saved | Recomputed], str],
    saved: Iterable[Saved],
    recomputed: Iterable[Recomputed],
) -> list[tuple[object, ...]]:
    """Returns the rows of a table, those with the most memory first."""
    sums: dict[str, list[float]] = {}
    for row in saved:
        sums.setdefault(key(row), [0] * 5)[row.verdict == DROPPED] += row.bytes
    for run in recomputed:
        total = sums.setdefault(key(run), [0] * 5)
        total[2] += run.bytes
        total[3] += run.count
        total[4] += run.seconds
    largest = sorted(sums.items(), key=lambda entry: -sum(entry[1][:2]))
    return [
        (name, *(format_bytes(int(b)) for b in total[:3]), int(total[3]), format_seconds(total[4]))
        for name, total in largest
    ]


def _reasons(saved: Iterable[Saved]) -> list[tuple[str, str, str]]:
    sums: dict[tuple[str, str], int] = {}
    for row in saved:
        if row.verdict != DROPPED:
            key = row.verdict, _operator(row)
            sums[key] = sums.get(key, 0) + row.bytes
    largest = sorted(sums.items(), key=lambda entry: -entry[1])
    return [(*key, format_bytes(size)) for key, size in largest]
