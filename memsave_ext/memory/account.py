"""Adds up what a tracker recorded: live bytes by category over time, and the peak."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .events import CATEGORIES, PHASES
from .holders import Holder
from .log import THERE, Record

FEWEST_STEPS = 3  # that leave something behind, where it counts as growth
# Steps. More than what is made ahead or kept for an average of the last few: a loader of 8 workers
# has 16 batches ahead.
_LONG = 20
_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__))
)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Live bytes after every allocation and every free, in order of time; equal if all rows are.

    Attributes:
        time: float64 ``[n]``, seconds since tracking began.
        live: int64 ``[n, 5]``, bytes by category, with the columns of ``CATEGORIES``; a row sums
            to all live bytes.
        phase: int64 ``[n]``, index into ``PHASES``: what the thread that allocated or freed was
            doing.
        step: int64 ``[n]``, the training step, counted from 0.
        moved: int64 ``[n]``, bytes that ``offload`` of :func:`remat` had elsewhere, as in files:
            they are not in ``live``, but for what was still being copied.
        gaps: rows before which whole steps were left out, because the record is bounded.
    """

    time: Tensor
    live: Tensor
    phase: Tensor
    step: Tensor
    moved: Tensor
    gaps: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        names = ("time", "live", "phase", "step", "moved")
        same = (torch.equal(getattr(self, name), getattr(other, name)) for name in names)
        return self.gaps == other.gaps and all(same)

    def __hash__(self) -> int:
        return hash((len(self.time), self.gaps))

    def at(self, rows: Any, gaps: tuple[int, ...] = ()) -> Timeline:
        """Returns these rows of it, with these gaps."""
        return Timeline(
            time=self.time[rows],
            live=self.live[rows],
            phase=self.phase[rows],
            step=self.step[rows],
            moved=self.moved[rows],
            gaps=gaps,
        )


@dataclass(frozen=True)
class TensorAtPeak:
    """Memory of one tensor that lived at the peak. Strings that are not known are empty.

    Attributes:
        bytes: its size.
        category: one of ``CATEGORIES``.
        phase: the one of ``PHASES`` in which it was made.
        name: name of the parameter, of the gradient's parameter or of the optimizer's state.
        module: dotted name of the module whose forward or backward made it.
        line: ``"file.py:12 in function"``, where stacks were recorded.
        operator: the outermost torch operator that made it, such as ``"linear"`` or, in backward,
            ``"mm"``, or the autograd node where none did. Where stacks were recorded, on the thread
            of the ``with`` block and in its backwards.
    """

    bytes: int
    category: str
    phase: str
    name: str
    module: str
    line: str
    operator: str = ""


@dataclass(frozen=True)
class Region:
    """A checkpointed region, or what ``remat`` recomputed in one module, over all steps.

    Attributes:
        name: name of the innermost module that holds everything the region ran, or whose backward
            needed what ``remat`` had dropped.
        calls: number of recomputes.
        saved_bytes: the most bytes that one recompute brought back for backward. They were not held
            between forward and backward.
        seconds: time of all recomputes together.
        phase: ``"recompute"`` of a checkpointed region, ``"rematerialize"`` of ``remat``.
    """

    name: str
    calls: int
    saved_bytes: int
    seconds: float
    phase: str = "recompute"


@dataclass(frozen=True)
class Growth:
    """Memory that several training steps have made and none has freed. What is not known is empty.

    Attributes:
        bytes: of all of it together.
        tensors: how many tensors it is.
        steps: in how many steps they were made.
        shape: of the last one from before the latest step, of the size that takes the most memory.
        held_by: what has that one, as a Python expression and where that stands, such as
            ``losses[10] in train(), train.py:31``; or the graph that has it saved for backward.
            Those of the latest step may be in variables of the loop, too.
        category, phase, module, line, operator: as of :class:`TensorAtPeak`, of all of them.
    """

    bytes: int
    tensors: int
    steps: int
    shape: tuple[int, ...]
    held_by: str
    category: str
    phase: str
    module: str
    line: str
    operator: str


@dataclass(frozen=True)
class Step:
    """One training step: its number, its time and its peak in bytes."""

    index: int
    seconds: float
    peak: int


class Account:
    """Adds up a record once and answers from that.

    Args:
        record: the record of a tracker that has started.
        names: names of blocks; the record holds indices into them.
        modules: names of modules; the record holds indices into them.
    """

    def __init__(self, record: Record, names: Sequence[str], modules: Sequence[str]) -> None:
        self._record = record
        self._names = names
        self._modules = modules
        time, step, block, change, phase, total = record.changes.unbind(1)
        size, category = record.blocks[:, 0], record.blocks[:, 1]
        known = block >= 0
        sign = torch.where(known, change.clamp(max=1), 0)
        rows = torch.where(known, block, 0)
        bytes_ = size[rows] * sign if len(size) else torch.zeros_like(block)
        categories = category[rows] if len(size) else torch.full_like(block, -1)

        head = (change == THERE) & ~known
        part = head.cumsum(0) - 1
        starts = head.nonzero().flatten()
        columns = []
        for index in range(len(CATEGORIES) - 1):
            live = torch.where(categories == index, bytes_, 0).cumsum(0)
            # Each part lists all that lived when it began, so its sum starts from 0 there.
            columns.append(live - live[starts][part])
        known_live = torch.stack(columns, 1)
        live = torch.cat([known_live, (total - known_live.sum(1)).unsqueeze(1)], 1)

        # The first row of a part has the part's number in the column of phases. A part that
        # directly follows the one before it adds no row: what lived is as in the row before.
        numbers = phase[starts]
        follows = torch.zeros(len(starts), dtype=torch.bool, device="cpu")
        follows[1:] = numbers[1:] == numbers[:-1] + 1
        last_there = torch.ones_like(head)
        last_there[:-1] = change[1:] != THERE
        last_there[:-1] |= head[1:]
        keep = (change != THERE) | (last_there & ~follows[part])
        shown = keep.nonzero().flatten()
        gaps = [
            int((shown < start).sum())
            for start, joined in zip(starts.tolist()[1:], follows.tolist()[1:], strict=True)
            if not joined
        ]
        there = change[shown] == THERE
        self.timeline = Timeline(
            time=(time[shown] - record.times[0]).double() * 1e-9,
            live=live[shown],
            phase=torch.where(there, 0, phase[shown]),
            step=step[shown],
            moved=record.moved[shown],
            gaps=tuple(gaps),
        )
        self.peak_row = int(total[shown].argmax())
        self._sign, self._block = sign, block
        self._peak_part = int(starts[part[shown[self.peak_row]]]), int(shown[self.peak_row])

    @property
    def at_peak(self) -> dict[str, int]:
        live = self.timeline.live[self.peak_row].tolist()
        return dict(zip(CATEGORIES, live, strict=True))

    @property
    def peak_phase(self) -> str:
        return PHASES[int(self.timeline.phase[self.peak_row])]

    @property
    def peak_step(self) -> int:
        return int(self.timeline.step[self.peak_row])

    @property
    def peak_time(self) -> float:
        return float(self.timeline.time[self.peak_row])

    def top(self, n: int) -> list[TensorAtPeak]:
        """Returns the ``n`` largest blocks at the peak, the largest first."""
        first, last = self._peak_part
        block, sign = self._block[first : last + 1], self._sign[first : last + 1]
        lives = torch.zeros(len(self._record.blocks), dtype=torch.int64, device="cpu")
        lives.index_add_(0, block[block >= 0], sign[block >= 0])
        rows = (lives > 0).nonzero().flatten()
        order = self._record.blocks[rows, 0].argsort(descending=True, stable=True)
        return [self._tensor(int(row)) for row in rows[order[:n]]]

    def growth(self, n: int, holders_of: Callable[[list[int]], dict[int, Holder]]) -> list[Growth]:
        """Returns the ``n`` largest groups, of one maker each, of what steps have left behind.

        Of a maker that has something from ``FEWEST_STEPS`` at least, as :meth:`_goes_on` says.
        """
        record = self._record
        made_by: dict[TensorAtPeak, list[tuple[int, int, int]]] = {}
        for row, address, step in record.alive.tolist():
            if 0 <= step < record.steps:
                tensor = self._tensor(row)
                maker = replace(tensor, bytes=0)
                made_by.setdefault(maker, []).append((step, address, tensor.bytes))
        grown = [
            (sum(size for *_, size in made), maker, made)
            for maker, made in made_by.items()
            if self._goes_on({step for step, *_ in made})
        ]
        grown.sort(key=lambda each: -each[0])
        typical = [_typical(made) for _, _, made in grown[:n]]
        holders = holders_of(typical)
        unknown = Holder((), "")
        return [
            Growth(
                bytes=size,
                tensors=len(made),
                steps=len({step for step, *_ in made}),
                shape=holders.get(address, unknown).shape,
                held_by=holders.get(address, unknown).text,
                category=maker.category,
                phase=maker.phase,
                module=maker.module,
                line=maker.line,
                operator=maker.operator,
            )
            for (size, maker, made), address in zip(grown, typical, strict=False)
        ]

    @property
    def left_at(self) -> list[int]:
        """The addresses of what steps have left behind, where it is of ``FEWEST_STEPS`` or more."""
        left = [(step, at) for _, at, step in self._record.alive.tolist() if step >= 0]
        return [at for _, at in left] if len({step for step, _ in left}) >= FEWEST_STEPS else []

    def _goes_on(self, steps: set[int]) -> bool:
        """Whether what has something from these steps goes on for long enough to be a leak.

        A queue or a cache has some of the latest ones alone: the first one is in the first half of
        all, or it is long ago and nearly each one since has left something.
        """
        first, ended = min(steps), self._record.steps
        since = ended - first
        early, long = 2 * first < ended, since >= _LONG and 4 * len(steps) >= 3 * since
        return len(steps) >= FEWEST_STEPS and (early or long)

    def _tensor(self, row: int) -> TensorAtPeak:
        size, category, phase, name, module = self._record.blocks[row].tolist()
        return TensorAtPeak(
            bytes=size,
            category=CATEGORIES[category],
            phase=PHASES[phase],
            name=self._names[name] if name >= 0 else "",
            module=self._modules[module] if module >= 0 else "",
            line=_line(self._record.stack(row)),
            operator=self._record.operator_name(row).removeprefix("aten::"),
        )

    @property
    def regions(self) -> list[Region]:
        """What was recomputed; the region that saves most comes first."""

        def name(module: int) -> str:
            return self._modules[module] if module >= 0 else ""

        regions = [
            Region(name(module), calls, saved, seconds, PHASES[phase])
            for phase, module, calls, saved, seconds in self._record.regions
        ]
        return sorted(regions, key=lambda region: -region.saved_bytes)

    @property
    def steps(self) -> list[Step]:
        """The steps that are still in the record.

        Rows after the last step are no step of their own, if no phase was entered in them.
        """
        timeline = self.timeline
        steps = []
        for index in timeline.step.unique().tolist():
            rows = timeline.step == index
            if not timeline.phase[rows].any() and index == timeline.step[-1]:
                continue
            begin, end = self._record.times[index : index + 2]
            peak = int(timeline.live[rows].sum(1).max())
            steps.append(Step(index, (end - begin) * 1e-9, peak))
        return steps


def _typical(made: list[tuple[int, int, int]]) -> int:
    """Returns the address of the last one of the size that has the most bytes, of those from before
    the latest step: that one's may be in variables of the loop, too.

    Args:
        made: step, address and bytes of each, from several steps.
    """
    latest = max(made)[0]
    earlier = [each for each in made if each[0] < latest]
    sums: Counter[int] = Counter()
    for _, _, size in earlier:
        sums[size] += size
    ((most, _),) = sums.most_common(1)
    return max(each for each in earlier if each[2] == most)[1]


def _line(stack: Sequence[tuple[str, int, str]]) -> str:
    """Returns the innermost line that is neither torch's nor this package's, else ``""``."""
    for file, line, function in stack:
        if not os.path.abspath(file).startswith(_PACKAGES) and not file.startswith("<"):
            relative = os.path.relpath(file)
            return f"{file if relative.startswith('..') else relative}:{line} in {function}"
    return ""
