"""Draws a timeline: live bytes by category over time, phases below, the peak marked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...shared.axes import below, bytes_axis, distance, new_figure, save, seconds_unit
from ...shared.table import format_bytes
from ..account import Timeline
from ..events import CATEGORIES, PHASES
from ..figures import Figures
from ..series import peak_row, step_peaks, thin

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart too. Vermillion and reddish
# purple are kept for recomputes.
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#56B4E9",
    "other": "#BBBBBB",
}
MOVED = "#000000"  # a dashed line, as it is no memory of the device
# Phases differ in lightness, and recomputes in their hatching.
PHASE_STYLES: dict[str, dict[str, Any]] = {
    "other": {"facecolor": "#F4F4F4", "edgecolor": "#BBBBBB"},
    "forward": {"facecolor": "#D5D5D5", "edgecolor": "#D5D5D5"},
    "backward": {"facecolor": "#7F7F7F", "edgecolor": "#7F7F7F"},
    "recompute": {"facecolor": "#D55E00", "edgecolor": "#FFFFFF", "hatch": "////"},
    "optimizer": {"facecolor": "#3A3A3A", "edgecolor": "#3A3A3A"},
    "rematerialize": {"facecolor": "#CC79A7", "edgecolor": "#FFFFFF", "hatch": "\\\\\\\\"},
}
_LIGHT = ("other", "forward")
_POINTS = 4000  # more than a picture has pixels across
MOST_STEPS = 30  # more steps than this are drawn as one bar each
_GAP = 0.02  # width of a gap, as a fraction of the time that is drawn
_STRIP = 0.05  # height of the strip of phases, as a fraction of that of the axes


def plot_track(track: Figures, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draws the timeline of ``track`` into the file ``path``; its suffix names the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``path`` ends in ``.html`` or ``.htm``, or matplotlib cannot write that format.
    """
    if Path(path).suffix.lower() in (".html", ".htm"):
        raise ValueError(
            f"path must name a picture file, such as 'timeline.png', got {os.fspath(path)!r}. For "
            "a browser, snapshot('snapshot.pickle'), which works on CUDA only, writes a file that "
            "torch's viewer, https://pytorch.org/memory_viz, shows."
        )
    figure = new_figure((11, 5))
    axes = figure.add_subplot()
    draw_timeline(axes, track.timeline, timed=track.timed)
    axes.set_title(title_of(track) if title is None else title, loc="left", fontsize=11)
    save(figure, path)


def title_of(track: Figures) -> str:
    steps = len(track.steps)
    over = f", {steps} training step{'' if steps == 1 else 's'}" if steps else ""
    return f"Live memory on {track.device}{over}"


def draw_timeline(
    axes: Axes,
    timeline: Timeline,
    *,
    legend: bool = True,
    top: float | None = None,
    timed: bool = True,
) -> None:
    """Draws a timeline into matplotlib axes: stacked areas, phases below them, the peak marked.

    Args:
        axes: where to draw. Their y data are bytes, their x data the seconds of ``timeline.time``
            without the time that gaps leave out.
        timeline: what to draw. Of very many rows only those that can be seen are drawn. If there
            are more than 30 steps, each is drawn as one bar of the height of its peak, as its
            course could not be seen.
        legend: whether to name the categories, with their bytes at the peak, and the phases beside
            the axes.
        top: bytes at the upper end of the axes, to give several pictures the same scale. None: the
            peak and room for its label.
        timed: whether ``timeline.time`` is a time; if not, the axis only names an order.
    """
    if not len(timeline.time):
        axes.text(0.5, 0.5, "nothing was allocated", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    many = has_many_steps(timeline)
    timeline = reduced(timeline)
    time = places(timeline)
    peak = peak_row(timeline)
    axes.set_xlim(time[0], time[-1])
    most = max(int(timeline.live[peak].sum()), int(timeline.moved.max()), 1)
    axes.set_ylim(0, top or 1.2 * most)
    axes.spines[["top", "right"]].set_visible(False)
    bytes_axis(axes.yaxis, axes.get_ylim()[1])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    areas = _draw_areas(axes, timeline, time, peak)
    phases = _draw_phases(axes, timeline, time, timed)
    _mark_peak(axes, timeline, time, peak)
    _mark_steps(axes, timeline, time, lines=not many)
    _mark_gaps(axes, timeline, time)
    if legend:
        axes.legend(
            handles=[*areas, *phases],
            title="each step at its peak" if many else None,
            loc="upper left",
            bbox_to_anchor=(1.01, 1),
            frameon=False,
            fontsize=9,
        )


def has_many_steps(timeline: Timeline) -> bool:
    """Whether the course of each step could not be seen."""
    return len(timeline.step.unique()) > MOST_STEPS


def reduced(timeline: Timeline) -> Timeline:
    """Returns the rows that are drawn: those that can be seen, or one for each of many steps."""
    return step_peaks(timeline) if has_many_steps(timeline) else thin(timeline, _POINTS)


def places(timeline: Timeline) -> list[float]:
    """Returns where each row begins on the x axis, and where the last one ends.

    A row begins at its time, less the time that gaps before it leave out. When a timeline ends is
    not known, so its last row gets a hundredth of the width.
    """
    time = timeline.time.clone()
    missing = [float(time[gap] - time[gap - 1]) for gap in timeline.gaps]
    span = float(time[-1] - time[0]) - sum(missing)
    for gap, seconds in zip(timeline.gaps, missing, strict=True):
        time[gap:] -= seconds - _GAP * span
    return [*time.tolist(), float(time[-1]) + (0.01 * span or 1e-6)]


def _draw_areas(axes: Axes, timeline: Timeline, time: list[float], peak: int) -> list[Artist]:
    """Draws the stacked areas of the categories that there are; returns them for the legend."""
    live = torch.cat([timeline.live, timeline.live[-1:]])
    upper = live.cumsum(1)
    areas: list[Artist] = []
    for column, category in enumerate(CATEGORIES):
        if not live[:, column].any():
            continue
        ends = (upper[:, column] - live[:, column]).tolist(), upper[:, column].tolist()
        label = f"{category}: {format_bytes(int(live[peak, column]))} at the peak"
        colour = COLOURS[category]
        areas.append(
            axes.fill_between(time, *ends, step="post", color=colour, linewidth=0, label=label)
        )
    axes.step(time, upper[:, -1].tolist(), where="post", color="#333333", linewidth=0.6)
    if timeline.moved.any():
        moved = torch.cat([timeline.moved, timeline.moved[-1:]]).tolist()
        label = f"moved elsewhere: {format_bytes(int(timeline.moved[peak]))} at the peak"
        areas += axes.step(
            time,
            moved,
            where="post",
            color=MOVED,
            linestyle=(0, (3, 1)),
            linewidth=1.2,
            label=label,
        )
    return areas[::-1]  # the uppermost area first


def _draw_phases(axes: Axes, timeline: Timeline, time: list[float], timed: bool) -> list[Artist]:
    """Draws phases in a strip below, and recomputes also behind the areas.

    Returns the patches for the legend.
    """
    from matplotlib.patches import Patch

    strip = below(axes, _STRIP)
    spans: dict[str, list[tuple[float, float]]] = {}
    for phase, start, end in runs(timeline, time):
        spans.setdefault(phase, []).append((start, end - start))
    for phase, of_phase in spans.items():
        style = PHASE_STYLES[phase]
        strip.broken_barh(of_phase, (0, 1), linewidth=0, label=phase, **style)
        for start, width in of_phase:
            if width > 0.07 * (time[-1] - time[0]):
                strip.text(
                    start + width / 2,
                    0.45,
                    phase,
                    color="black" if phase in _LIGHT else "white",
                    bbox={"facecolor": style["facecolor"], "edgecolor": "none", "pad": 1},
                    fontsize=8,
                    ha="center",
                    va="center",
                )
    for phase in ("recompute", "rematerialize"):
        axes.broken_barh(
            spans.get(phase, []),
            (0, 1),
            transform=axes.get_xaxis_transform(),
            facecolor=PHASE_STYLES[phase]["facecolor"],
            linewidth=0,
            alpha=0.12,
            zorder=0.5,
        )
    if timed:
        _name_times(strip, timeline, time)
    else:
        strip.set_xticks([], [])
        strip.set_xlabel("allocations and frees, in their order")
    return [
        Patch(**PHASE_STYLES[phase], label=phase_name(phase)) for phase in PHASES if phase in spans
    ]


def phase_name(phase: str) -> str:
    return "no phase" if phase == "other" else phase  # "other" is also the name of a category


def runs(timeline: Timeline, time: list[float]) -> Iterator[tuple[str, float, float]]:
    """Yields each run of a phase with its start and end on the x axis; gaps belong to no phase."""
    phase = timeline.phase.tolist()
    gaps = set(timeline.gaps)
    start = 0
    for row in range(1, len(phase) + 1):
        if row == len(phase) or row in gaps or phase[row] != phase[start]:
            yield PHASES[phase[start]], time[start], time[row - 1 if row in gaps else row]
            start = row


def _name_times(strip: Axes, timeline: Timeline, time: list[float]) -> None:
    """Puts ticks at round times. After a gap their labels include the time left out."""
    name, size = seconds_unit(float(timeline.time[-1]))
    span = time[-1] - time[0]
    every = distance(span / size, 8) * size
    places: list[float] = []
    labels: list[str] = []
    rows = len(timeline.time)
    for first, after in pairwise([0, *timeline.gaps, rows]):
        left_out = float(timeline.time[first]) - time[first]
        count = math.ceil(float(timeline.time[first]) / every)
        while (place := count * every - left_out) <= time[rows if after == rows else after - 1]:
            if not places or place - places[-1] > 0.04 * span:
                places.append(place)
                labels.append(f"{count * every / size:.6g}")
            count += 1
    strip.set_xticks(places, labels)
    strip.set_xlabel(f"time since tracking began ({name})")


def _mark_peak(axes: Axes, timeline: Timeline, time: list[float], peak: int) -> None:
    size = int(timeline.live[peak].sum())
    text = f"peak {format_bytes(size)}"
    phase = PHASES[int(timeline.phase[peak])]
    text += f"\nin {phase}" if phase != "other" else ""
    if len(timeline.step.unique()) > 1:
        text += f" of step {int(timeline.step[peak])}"
    left = time[peak] < (time[0] + time[-1]) / 2
    axes.plot(time[peak], size, "o", color="black", markersize=4, zorder=6, gid="peak")
    axes.annotate(
        text,
        (time[peak], size),
        xytext=(10 if left else -10, 6),
        textcoords="offset points",
        ha="left" if left else "right",
        bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1},
        fontsize=9,
        zorder=6,
    )


def _mark_steps(axes: Axes, timeline: Timeline, time: list[float], *, lines: bool) -> None:
    """Draws a line where each step begins, and the numbers of about 10 of the steps at most."""
    step = timeline.step.tolist()
    begins = [row for row in range(len(step)) if row == 0 or step[row] != step[row - 1]]
    if len(begins) < 2:
        return
    every = math.ceil(len(begins) / 10)
    for count, row in enumerate(begins):
        if lines and row and row not in timeline.gaps:
            axes.axvline(time[row], color="#333333", linewidth=0.6, linestyle=":")
        if count % every == 0 and (not row or time[row] < 0.95 * time[-1] + 0.05 * time[0]):
            axes.text(
                time[row],
                1.0,
                f" step {step[row]}",
                transform=axes.get_xaxis_transform(),
                va="top",
                color="#555555",
                fontsize=8,
                zorder=6,
            )


def _mark_gaps(axes: Axes, timeline: Timeline, time: list[float]) -> None:
    """Draws a white band for each gap, which says which steps are left out."""
    for gap in timeline.gaps:
        start, end = time[gap - 1], time[gap]
        first, last = int(timeline.step[gap - 1]) + 1, int(timeline.step[gap]) - 1
        steps = f"step {first}" if first == last else f"steps {first}\N{EN DASH}{last}"
        steps = steps if first <= last else f"a part of step {int(timeline.step[gap])}"
        axes.axvspan(start, end, facecolor="white", linewidth=0, zorder=4, gid="gap")
        for edge in (start, end):
            axes.axvline(edge, color="#333333", linewidth=0.8, linestyle=(0, (2, 2)), zorder=4)
        axes.text(
            (start + end) / 2,
            0.5,
            f"{steps} left out",
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="center",
            fontsize=7,
            zorder=5,
        )
