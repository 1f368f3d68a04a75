"""Draws a snapshot: which code held how much of a CUDA device's memory at which time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...shared.axes import bytes_axis, legend_label, seconds_axis
from ...shared.table import format_bytes
from ..series import first_largest, telling_rows
from ..snapshot_file import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, as in timeline.py, for lines of code; all other lines are grey.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#F0E442", "#D55E00")
_OTHERS = "#BBBBBB"
_POINTS = 4000  # more than a picture has pixels across


def draw_history(axes: Axes, history: History) -> None:
    """Draws stacked areas of the lines of code that hold most at the peak, and what was reserved.

    The y data of ``axes`` are bytes. The x data are seconds, or events if no times were recorded.
    """
    rows = len(history.allocated)
    time = (
        torch.arange(rows, dtype=torch.float64, device="cpu")
        if history.time is None
        else history.time
    )
    shown = torch.ones(rows, dtype=torch.bool, device="cpu")
    if rows > _POINTS:
        shown = telling_rows(time, history.allocated, _POINTS)
        shown |= telling_rows(time, history.reserved, _POINTS)
    places: list[float] = time[shown].tolist()
    places.append(places[-1] + (0.01 * (places[-1] - places[0]) or 1e-3))  # the last row's end
    _draw_lines(axes, history, shown, places)
    most = format_bytes(int(history.reserved.max()))
    style: dict[str, Any] = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 1.2}
    reserved = _course(history.reserved, shown)
    axes.step(places, reserved, where="post", label=f"reserved: at most {most}", **style)
    for row, size in history.out_of_memory:
        label = f"out of memory: {format_bytes(size)} asked for"
        axes.axvline(float(time[row]), color="#8B0000", linewidth=2, label=label)
    peak = first_largest(history.allocated)
    middle = (places[0] + places[-1]) / 2
    _mark_peak(axes, (float(time[peak]), int(history.allocated[peak])), middle)
    axes.set_xlim(places[0], places[-1])
    axes.set_ylim(0, 1.15 * max(1, int(history.allocated.max()), int(history.reserved.max())))
    bytes_axis(axes.yaxis, axes.get_ylim()[1])
    if history.time is None:
        axes.set_xlabel("event")
    else:
        seconds_axis(axes.xaxis, places[-1], "time since the trace begins")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(f"CUDA memory, cuda:{history.device}", loc="left", fontsize=11)
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False}
    axes.legend(fontsize=8, reverse=True, **beside)


def _draw_lines(axes: Axes, history: History, shown: torch.Tensor, places: list[float]) -> None:
    peak = first_largest(history.allocated)
    rest = int(history.allocated[peak])
    level = torch.zeros_like(history.allocated)
    low = [0] * len(places)
    for (line, size), colour in zip(history.by_line(peak).items(), _COLOURS, strict=False):
        level += history.of_line(line)
        high, rest = _course(level, shown), rest - size
        label = legend_label(f"{line}: {format_bytes(size)} at the peak")
        axes.fill_between(places, low, high, step="post", color=colour, linewidth=0, label=label)
        low = high
    if bool((history.allocated != level).any()):
        high = _course(history.allocated, shown)
        label = f"all other lines: {format_bytes(rest)} at the peak"
        axes.fill_between(places, low, high, step="post", color=_OTHERS, linewidth=0, label=label)


def _course(values: torch.Tensor, shown: torch.Tensor) -> list[int]:
    """Returns the values of the rows that are drawn, the last one twice as it also has an end."""
    course: list[int] = values[shown].tolist()
    return [*course, course[-1]]


def _mark_peak(axes: Axes, peak: tuple[float, int], middle: float) -> None:
    left = peak[0] < middle
    beside: dict[str, Any] = {"xytext": (8 if left else -8, 5), "textcoords": "offset points"}
    text = f"peak {format_bytes(peak[1])}"
    axes.plot(*peak, "o", color="black", markersize=4, zorder=6, gid="peak")
    axes.annotate(text, peak, fontsize=9, ha="left" if left else "right", **beside)
