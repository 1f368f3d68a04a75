"""Figures of what a block kept, dropped and recomputed, and a report of them as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ..shared.table import format_bytes, format_seconds, print_table

DROPPED, INPUT, MOVED = "dropped", "from outside of the block", "moved"
NOT_AGAIN = "not recomputable"
PLANNED = (
    "This step follows a plan for its shapes, as each step of these shapes from the third on does: "
    "it drops only what saves at least 4 % of the activations at the peak for each percent of the "
    "step's time that computing it again takes"
)
# The order is that of Verdict in csrc/remat/content.h.
VERDICTS = (
    DROPPED,
    INPUT,
    NOT_AGAIN,
    "too expensive (matmul, convolution)",
    "would gain too little",
    "the budget has room for it",
    MOVED,
    "there was no room to move it to",
    "not the same when run twice, or not as its schema says",
)


@dataclass(frozen=True)
class Saved:
    """Memory that autograd saved in a block, summed by the module and operator that made it.

    Attributes:
        module: the module; empty where none of the model's made it.
        operator: the operator; empty where no recorded one made it.
        verdict: ``"dropped"``, or why it is kept.
        count: how many pieces of memory.
        bytes: their bytes.
        seconds: what it takes to compute what was dropped again, as measured in the forward.
    """

    module: str
    operator: str
    verdict: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Recomputed:
    """Operators that ran again in backward, summed by module and operator.

    Attributes:
        module: the module that had called it; empty where it was none of the model's.
        operator: the operator.
        count: how often it ran again.
        bytes: of its results.
        seconds: that it took.
    """

    module: str
    operator: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class RematFigures:
    """What has become of the memory that autograd saved in a block.

    Attributes:
        operators: how many operators the block saw.
        saved: a :class:`Saved` for each module, operator and verdict.
        recomputed: a :class:`Recomputed` for each module and operator.
        given_back_bytes: bytes that were dropped as allocations failed (``retry=True``).
        moved_bytes: bytes that were copied to ``offload``.
        brought_back_bytes: bytes that were copied back, as often as each was.
        not_moved_bytes: bytes that were to be moved, and for which there was no room.
        waited_seconds: how long copies were waited for that were not over in time, by the host's
            clock; on CUDA the device waits for them.
    """

    operators: int
    saved: tuple[Saved, ...]
    recomputed: tuple[Recomputed, ...]
    given_back_bytes: int = 0
    moved_bytes: int = 0
    brought_back_bytes: int = 0
    not_moved_bytes: int = 0
    waited_seconds: float = 0.0

    @property
    def dropped_bytes(self) -> int:
        """Bytes that were saved and dropped."""
        return sum(row.bytes for row in self.saved if row.verdict == DROPPED)

    @property
    def kept_bytes(self) -> int:
        """Bytes kept, not counting inputs and parameters, which exist anyway."""
        return sum(row.bytes for row in self.saved if row.verdict not in (DROPPED, INPUT, MOVED))

    @property
    def recomputed_operators(self) -> int:
        """How many operators ran again."""
        return sum(row.count for row in self.recomputed)


def make_figures(figures: dict[str, Any], names: Sequence[str]) -> RematFigures:
    """Converts a recorder's figures. ``names`` are the modules' names by number."""

    def name(number: int) -> str:
        # A script may be of a block that was given the model, where this one was not.
        return names[number] if 0 <= number < len(names) else ""

    return RematFigures(
        figures["operators"],
        tuple(Saved(name(m), op, VERDICTS[v], *sums) for m, op, v, *sums in figures["saved"]),
        tuple(Recomputed(name(m), op, *sums) for m, op, *sums in figures["again"]),
        figures["given_back"][1],
        *figures.get("moves", ())[:4],
    )


def write_report(figures: RematFigures, top: int, text: TextIO) -> None:
    kept, dropped = figures.kept_bytes, figures.dropped_bytes
    moved = sum(row.bytes for row in figures.saved if row.verdict == MOVED)
    all_of_it = kept + dropped + moved
    share = f", {kept / all_of_it:.2f} of the activations" if all_of_it else ""
    seconds = format_seconds(sum(row.seconds for row in figures.recomputed))
    print(
        f"Kept {format_bytes(kept)}{share}; dropped {format_bytes(dropped)}; "
        f"{figures.recomputed_operators} operators ran again, in {seconds}; {figures.operators} "
        "operators in all\n",
        file=text,
    )
    if figures.given_back_bytes:
        given_back = format_bytes(figures.given_back_bytes)
        print(
            f"Allocations failed, and {given_back} of what was kept were dropped to make room\n",
            file=text,
        )
    saved = [row for row in figures.saved if row.verdict != INPUT]
    for title, key in (("by module", _module), ("by operator", _operator)):
        columns = [title, "kept", "dropped", "moved", "computed again", "times", "in"]
        rows = _by(key, saved, figures.recomputed)
        if not moved:
            del columns[3]
            rows = [(*row[:3], *row[4:]) for row in rows]
        if title != "by module" or len(rows) > 1:
            print_table("", columns, rows[:top], text)
    reasons = _reasons(saved)
    if reasons:
        print_table("Why it is kept", ["reason", "operator", "memory"], reasons[:top], text)
    if any(row.verdict == NOT_AGAIN and not row.operator for row in saved):
        print(
            "-: no operator was seen to make it, as inside of DTensors (tensor parallelism), whose "
            "results are kept",
            file=text,
        )
    if saved and not any(row.module for row in figures.saved):
        print(
            "To see modules, pass the model: remat(model), or remat_module(model, by_module=True)",
            file=text,
        )


def write_moves(moves: tuple[int, int, int, float, str, str], text: TextIO) -> None:
    """Writes what a recorder's figures have as ``moves``."""
    moved, back, not_moved, waited, why, name = moves
    wait = f"; waited {format_seconds(waited)} for copies" if waited else ""
    print(f"Moved {format_bytes(moved)} to {name}, and {format_bytes(back)} back{wait}", file=text)
    if not_moved:
        reason = why or "offload_limit is reached"
        print(f"{format_bytes(not_moved)} could not be moved, and are kept: {reason}", file=text)


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
        place = {DROPPED: 1, MOVED: 2}.get(row.verdict, 0)
        sums.setdefault(key(row), [0] * 6)[place] += row.bytes
    for run in recomputed:
        total = sums.setdefault(key(run), [0] * 6)
        total[3] += run.bytes
        total[4] += run.count
        total[5] += run.seconds
    largest = sorted(sums.items(), key=lambda entry: -sum(entry[1][:3]))
    return [
        (name, *(format_bytes(int(b)) for b in total[:4]), int(total[4]), format_seconds(total[5]))
        for name, total in largest
    ]


def _reasons(saved: Iterable[Saved]) -> list[tuple[str, str, str]]:
    sums: dict[tuple[str, str], int] = {}
    for row in saved:
        if row.verdict not in (DROPPED, MOVED):
            key = row.verdict, _operator(row)
            sums[key] = sums.get(key, 0) + row.bytes
    largest = sorted(sums.items(), key=lambda entry: -entry[1])
    return [(*key, format_bytes(size)) for key, size in largest]
