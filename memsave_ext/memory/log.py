"""What events of memory amount to: blocks with their categories, and all changes in order of time.

No other place knows it: memory that is tracked and memory that is predicted are read here. Events
are read as they happen or, of native trackers, later, many at once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import events
from .events import (
    ACTIVATIONS,
    FORWARD,
    LABELLED,
    OTHER,
    OTHER_CATEGORY,
    RECOMPUTE,
    RECOMPUTES,
    REMATERIALIZE,
    Event,
)
from .threads import Threads

_FREED, _ALLOCATED = -1, 1
THERE = 2  # in the column of changes: the block lived already when a part of the record began
_MADE_BY_FORWARD = (FORWARD, *RECOMPUTES)
_COLUMNS = 5  # of a part's changes and of blocks
_BLOCK = 1  # the column of changes that has the row of blocks
_CATEGORY, _NAME = 1, 3  # columns of blocks
_BEFORE = -1  # in place of the number of a forward: the block was there before tracking


class Origin(Protocol):
    """What asked for a block."""

    def frames(self) -> list[tuple[str, int, str]]:
        """Returns the stack, innermost first: file, line, function."""

    @property
    def operator_name(self) -> str:
        """The outermost operator, as "aten::linear", or ""."""


@dataclass(frozen=True)
class Record:
    """A copy of a log as tables, which account.py adds up.

    Attributes:
        changes: int64 ``[changes, 6]``: time in ns; training step; row of ``blocks``, -1 for none
            (memory that is not known, or a phase or a part begins); 1 allocated, -1 freed, 2 alive
            when its part of the log began; phase, or the part's number in the row that begins it;
            live bytes.
        moved: int64 ``[changes]``: bytes that lay elsewhere, as in files.
        blocks: int64 ``[blocks, 5]``: bytes; category; phase that made it; number of its name, -1
            without; module, -1 without.
        regions: what was recomputed: phase, module, calls, saved bytes, seconds.
        alive: int64 ``[alive, 3]``, of what lives now: row of ``blocks``; address; training step
            that made it, -1 where it was there before.
        steps: how many training steps have ended.
        times: in ns, when each step began, the first of them with tracking or where the peak was
            reset; last, when the last event was.
        origins: by row of ``blocks``, where they are known.
    """

    changes: Tensor
    moved: Tensor
    blocks: Tensor
    regions: list[tuple[int, int, int, int, float]]
    alive: Tensor
    steps: int
    times: list[int]
    origins: dict[int, Origin]

    def stack(self, block: int) -> list[tuple[str, int, str]]:
        return self.origins[block].frames() if block in self.origins else []

    def operator_name(self, block: int) -> str:
        return self.origins[block].operator_name if block in self.origins else ""


class _Part:
    """A run of changes within a training step. Its first rows list what lived when it began, so
    that other parts can be dropped."""

    def __init__(self, step: int, peak: int, moved: int) -> None:
        self.step = step
        self.peak = peak
        self.rows = array("q")
        self.moved = [(0, moved)]  # the row from which on so many bytes lay elsewhere
        self.most = 0  # its length where the next part begins


class Log:
    """Keeps the blocks that live and the changes.

    Args:
        parents: by module, the module that holds it, -1 for the outermost.
        max_changes: about how many changes are kept: of the part with the highest peak and of the
            latest ones.
    """

    def __init__(self, parents: list[int], max_changes: int) -> None:
        self.total = 0  # live bytes
        self.peak = 0
        self._threads = threads = Threads(parents)
        self._moved = 0  # bytes that lie elsewhere
        self._counts = True  # whether `total` is counted here; else events have the allocator's
        self._most = _COLUMNS * max_changes
        # By address: the row of blocks, the bytes, and the phase and forward that made it.
        self._live: dict[int, tuple[int, int, int, int]] = {}
        self._blocks = array("q")
        self._origins: dict[int, Origin] = {}
        self._new_origins: Iterator[Origin | None] = iter(())
        # What Threads.where() said of this thread and node; None once it may say something else.
        self._place: tuple[int, int, int] | None = None
        self._place_of = 0, 0, 0
        self._step = 0
        self._begins = [0]  # by training step, the row of its first block
        self._times: list[int] = []  # by training step, when it began
        self._latest = 0  # the time of the latest change
        self._number = 0  # of the next part
        self._parts: list[_Part] = []
        self._acts: dict[int, Callable[[Any], object]] = {
            events.ALLOCATED: self._allocated,
            events.FREED: self._freed,
            events.FOUND: self._found,
            events.LABELLED: self._labelled,
            events.BEGIN_RECOMPUTE: self._begin_recompute,
            events.END_RECOMPUTE: threads.end_recompute,
            events.BEGIN_TRACKING: self._begin,
            events.RESET_PEAK: self._reset_peak,
            events.MOVED: self._moves,
            events.END_TRACKING: lambda event: threads.clear(),
            events.ENTER_MODULE: threads.enter_module,
            events.EXIT_MODULE: threads.exit_module,
            events.BEGIN_OPTIMIZER: self._begin_optimizer,
            events.END_OPTIMIZER: self._end_optimizer,
            events.END_STEP: self._end_step,
            events.GONE: self._gone,
        }

    def read(self, some: Iterable[tuple[int, ...]], origins: Iterable[Origin | None] = ()) -> None:
        """Reads the next events, each an :class:`Event` or a tuple alike, in order of time.

        ``origins`` are those of their allocations.
        """
        self._new_origins = iter(origins)
        acts = self._acts
        for event in some:
            kind = event[0]
            if kind > LABELLED:
                self._place = None
            acts[kind](event)

    def record(self) -> Record:
        changes = [torch.empty(0, 6, dtype=torch.int64, device="cpu")]
        moved = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for part in self._parts:
            rows = _table(part.rows)
            step = torch.full((len(rows), 1), part.step, device="cpu")
            changes.append(torch.cat([rows[:, :1], step, rows[:, 1:]], 1))
            begins, sizes = torch.tensor(part.moved, device="cpu").unbind(1)
            lengths = torch.diff(begins, append=torch.tensor([len(rows)], device="cpu"))
            moved.append(sizes.repeat_interleave(lengths))
        regions = [
            (*key, region.calls, region.saved_bytes, region.nanoseconds * 1e-9)
            for key, region in sorted(self._threads.regions.items())
        ]
        alive = [
            (block, address, -1 if maker == _BEFORE else bisect_right(self._begins, block) - 1)
            for address, (block, _, _, maker) in self._live.items()
        ]
        return Record(
            changes=torch.cat(changes),
            moved=torch.cat(moved),
            blocks=_table(self._blocks),
            regions=regions,
            alive=torch.tensor(alive, dtype=torch.int64, device="cpu").view(-1, 3),
            steps=self._step,
            times=[*self._times, self._latest],
            origins=dict(self._origins),
        )

    def _allocated(self, event: Event) -> None:
        _, _, _, _, _, address, size, total = event
        # A known address that is allocated again was freed while this was paused or not running.
        if address in self._live:
            self._remove(event, -1)
        phase, span, module = self._where(event)
        if phase in RECOMPUTES:
            self._threads.count(span, size)
        category = ACTIVATIONS if phase in _MADE_BY_FORWARD else OTHER_CATEGORY
        block = len(self._blocks) // _COLUMNS
        self._blocks.extend((size, category, phase, -1, module))
        self._live[address] = block, size, phase, span
        origin = next(self._new_origins, None)
        if origin is not None:
            self._origins[block] = origin
        self._change(event, block, _ALLOCATED, phase, self._after(total, size))

    def _freed(self, event: Event) -> None:
        total = event[7]
        if event[5] in self._live:
            self._remove(event, total)
        elif total >= 0 and total != self.total:
            self._mark(event, total)

    def _gone(self, event: Event) -> None:
        known = self._live.get(event[5])
        if known is not None and known[-1] == _BEFORE:
            self._remove(event, -1)

    def _remove(self, event: Event, total: int) -> None:
        block, size, made_in, maker = self._live.pop(event[5])
        phase, span, _ = self._where(event)
        if made_in in _MADE_BY_FORWARD:
            category = _COLUMNS * block + _CATEGORY
            # What ends with the forward or recompute that made it is a temporary.
            if maker == span and made_in == phase and self._blocks[category] == ACTIVATIONS:
                self._blocks[category] = OTHER_CATEGORY
            if made_in in RECOMPUTES:
                self._threads.count(maker, -size)
        self._change(event, block, _FREED, phase, self._after(total, -size))

    def _found(self, event: Event) -> None:
        _, _, _, _, _, address, size, total = event
        if address not in self._live:
            block = len(self._blocks) // _COLUMNS
            self._blocks.extend((size, OTHER_CATEGORY, OTHER, -1, -1))
            self._live[address] = block, size, OTHER, _BEFORE
            phase, _, _ = self._where(event)
            self._change(event, block, _ALLOCATED, phase, self._after(total, size))

    def _labelled(self, event: Event) -> None:
        row = _COLUMNS * self._live[event[5]][0]
        if self._blocks[row + _CATEGORY] in (ACTIVATIONS, OTHER_CATEGORY):
            self._blocks[row + _NAME], self._blocks[row + _CATEGORY] = divmod(event[6], 16)

    def _begin_recompute(self, event: Event) -> None:
        self._threads.begin_recompute(RECOMPUTE if event[5] else REMATERIALIZE, event)

    def _begin_optimizer(self, event: Event) -> None:
        self._threads.begin_optimizer(event)
        self._mark(event, self.total)

    def _end_optimizer(self, event: Event) -> None:
        self._threads.end_optimizer(event)
        self._mark(event, self.total)

    def _begin(self, event: Event) -> None:
        self._threads.clear()
        self._counts = event[7] < 0
        self.total = self._after(event[7], 0)
        self._times = self._times or [event[3]]
        self._begin_part(event[3])

    def _end_step(self, event: Event) -> None:
        self._step += 1
        self._begins.append(len(self._blocks) // _COLUMNS)
        self._threads.end_step()
        self._times.append(event[3])
        self._begin_part(event[3])

    def _reset_peak(self, event: Event) -> None:
        self.peak = self.total
        self._parts.clear()
        self._times = [event[3]] * (self._step + 1)
        self._begin_part(event[3])

    def _moves(self, event: Event) -> None:
        if event[6] == self._moved:
            return
        self._moved = event[6]
        if self._parts:
            part = self._parts[-1]
            part.moved.append((len(part.rows) // _COLUMNS, self._moved))
            self._mark(event, self.total)

    def _where(self, event: Event) -> tuple[int, int, int]:
        context = event[1], event[2], event[4]
        if self._place is None or context != self._place_of:
            self._place, self._place_of = self._threads.where(*context), context
        return self._place

    def _after(self, total: int, change: int) -> int:
        """Returns the live bytes after an event that has ``total`` and changes them here."""
        if total >= 0:
            return total
        return self.total + change if self._counts else self.total

    def _mark(self, event: Event, total: int) -> None:
        """Adds a row without a block: a phase begins or ends, or memory not known here changed."""
        phase, _, _ = self._where(event)
        self._change(event, -1, _FREED, phase, total)

    def _change(self, event: Event, block: int, change: int, phase: int, total: int) -> None:
        self.total = total
        if not self._parts:
            return  # tracking has not begun
        part = self._parts[-1]
        self._latest = event[3]
        part.rows.extend((event[3], block, change, phase, total))
        if total > part.peak:
            part.peak = total
            self.peak = max(self.peak, total)
        if len(part.rows) >= part.most:
            self._begin_part(event[3])

    def _begin_part(self, time: int) -> None:
        self.peak = max(self.peak, self.total)
        self._latest = time
        part = _Part(self._step, self.total, self._moved)
        part.rows.extend((time, -1, THERE, self._number, self.total))
        for block, *_ in self._live.values():
            part.rows.extend((time, block, THERE, 0, self.total))
        part.most = len(part.rows) + self._most // 4 + 1
        self._number += 1
        self._parts.append(part)
        self._drop_parts()

    def _drop_parts(self) -> None:
        kept = sum(len(part.rows) for part in self._parts)
        while kept > self._most and len(self._parts) > 2:
            # The oldest one, or the second oldest where the oldest has the peak.
            kept -= len(self._parts.pop(1 if self._parts[0].peak == self.peak else 0).rows)
        if len(self._blocks) > kept:
            self._drop_blocks()

    def _drop_blocks(self) -> None:
        """Drops blocks that were in dropped parts alone, and numbers the others anew."""
        used = {block for block, *_ in self._live.values()}
        for part in self._parts:
            used.update(part.rows[_BLOCK::_COLUMNS])
        rows = sorted(used - {-1})
        new = {block: number for number, block in enumerate(rows)}
        self._begins = [bisect_left(rows, block) for block in self._begins]
        old = self._blocks
        self._blocks = array("q")
        for block in new:
            self._blocks.extend(old[_COLUMNS * block : _COLUMNS * (block + 1)])
        for address, (block, size, phase, maker) in self._live.items():
            self._live[address] = new[block], size, phase, maker
        self._origins = {new[b]: origin for b, origin in self._origins.items() if b in new}
        new[-1] = -1
        for part in self._parts:
            blocks = part.rows[_BLOCK::_COLUMNS]
            part.rows[_BLOCK::_COLUMNS] = array("q", [new[block] for block in blocks])


def _table(values: array[int]) -> Tensor:
    if not values:  # frombuffer takes no empty buffer
        return torch.empty(0, _COLUMNS, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(values), dtype=torch.int64).view(-1, _COLUMNS)
