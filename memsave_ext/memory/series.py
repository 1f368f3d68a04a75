"""Reduces timelines to few enough rows to draw and to send."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..shared.checks import check_count
from .account import Timeline


def thin(timeline: Timeline, points: int) -> Timeline:
    """Returns at most about ``points`` rows of ``timeline``, which look the same when drawn.

    These are the rows of :func:`telling_rows`, so the peak is always among them; the rows beside
    gaps; and the rows where steps or phases begin, unless there are ``points`` or more of these.
    """
    check_count("points", points, 4)
    rows = len(timeline.time)
    if rows <= points:
        return timeline
    keep = telling_rows(timeline.time, timeline.live.sum(1), points)
    for gap in timeline.gaps:
        keep[gap - 1 : gap + 1] = True
    for column in (timeline.step, timeline.phase):
        begins = column[1:] != column[:-1]
        if int(begins.sum()) < points:
            keep[1:] |= begins
    chosen = keep.nonzero().flatten()
    return timeline.at(chosen, tuple(int((chosen == gap).nonzero()) for gap in timeline.gaps))


def telling_rows(time: Tensor, total: Tensor, points: int) -> Tensor:
    """Returns a mask of at most ``points`` rows that show the course of ``total`` over ``time``.

    The time is cut into ``points // 4`` equal bins. Each bin keeps its first and last row, the
    first row with its smallest ``total`` and the first row with its largest. ``total`` is int64.
    """
    bins = points // 4
    span = max(float(time[-1] - time[0]), 1e-300)
    bin_of = ((time - time[0]) * (bins / span)).long().clamp(0, bins - 1)
    rows = torch.arange(len(time), device="cpu")

    def per_bin(values: Tensor, reduce: str) -> Tensor:
        initial = torch.zeros(bins, dtype=values.dtype, device="cpu")
        return initial.scatter_reduce(0, bin_of, values, reduce, include_self=False)

    chosen = [rows == per_bin(rows, reduce)[bin_of] for reduce in ("amin", "amax")]
    for reduce in ("amin", "amax"):
        extreme = total == per_bin(total, reduce)[bin_of]
        chosen.append(rows == per_bin(rows.where(extreme, len(time)), "amin")[bin_of])
    return torch.stack(chosen).any(0)


def step_of(timeline: Timeline, index: int) -> Timeline:
    """Returns the rows of training step ``index``, with times from 0; none if it is not there."""
    step = timeline.at(timeline.step == index)
    return replace(step, time=step.time - step.time[:1])


def step_peaks(timeline: Timeline) -> Timeline:
    """Returns one row for each step: at the time it begins, with live bytes and phase of its peak.

    This is for pictures of so many steps that the course of each could not be seen. What comes
    before a gap, and the last step, have a second row where they end.
    """
    rows = len(timeline.step)
    begins = torch.ones(rows, dtype=torch.bool, device="cpu")
    begins[1:] = timeline.step[1:] != timeline.step[:-1]
    begins[list(timeline.gaps)] = True  # which may be within a step
    starts = begins.nonzero().flatten().tolist()
    total = timeline.live.sum(1)
    peaks = [a + first_largest(total[a:b]) for a, b in pairwise([*starts, rows])]
    closing = {gap - 1 for gap in timeline.gaps} | {rows - 1}
    chosen = sorted({*starts, *closing})
    at = torch.tensor([peaks[bisect_right(starts, row) - 1] for row in chosen], device="cpu")
    gaps = tuple(chosen.index(gap) for gap in timeline.gaps)
    return replace(timeline.at(at, gaps), time=timeline.time[chosen], step=timeline.step[chosen])


def peak_row(timeline: Timeline) -> int:
    """Returns the first row with the most live bytes.

    Raises:
        ValueError: the timeline is empty.
    """
    if not len(timeline.time):
        raise ValueError("an empty timeline has no peak")
    return first_largest(timeline.live.sum(1))


def first_largest(values: Tensor) -> int:
    """Returns the first index of the largest value; ``argmax`` may return any index of it."""
    return int((values == values.max()).nonzero()[0])
