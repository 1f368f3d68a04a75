"""Draws a comparison: memory over a step, peak against time, what the peaks hold."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...shared.axes import bytes_axis, legend_label, new_figure, save, seconds_axis
from ...shared.table import format_bytes
from ..events import CATEGORIES
from ..measure import Row
from ..series import peak_row
from .timeline import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, as in timeline.py. More variants than colours repeat them with dashes.
_LINES = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vP*"


def plot_comparison(rows: Sequence[Row], path: str | os.PathLike[str], title: str) -> None:
    """Draws ``rows`` into the file ``path``; see :meth:`Comparison.plot`."""
    figure = new_figure((11, 6.4 + 0.28 * len(rows)))
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2 + 0.25 * len(rows)))
    styles = [_style(place) for place in range(len(rows))]
    _draw_courses(figure.add_subplot(grid[0, :]), rows, styles)
    _draw_times(figure.add_subplot(grid[1, 0]), rows, styles)
    _draw_peaks(figure.add_subplot(grid[1, 1]), rows)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    save(figure, path)


def _style(place: int) -> dict[str, Any]:
    turn, place = divmod(place, len(_LINES))
    line = ("-", (0, (4, 1.5)), (0, (1, 1)))[turn % 3]
    return {"color": _LINES[place], "linestyle": line, "marker": _MARKERS[place]}


def _draw_courses(axes: Axes, rows: Sequence[Row], styles: Sequence[dict[str, Any]]) -> None:
    """Draws live bytes over one step as a line for each variant, with its peak marked."""
    longest = 0.0
    for row, style in zip(rows, styles, strict=True):
        if not len(row.timeline.time):
            continue
        seconds, total = row.timeline.time.tolist(), row.timeline.live.sum(1).tolist()
        peak = peak_row(row.timeline)
        label = f"{row.name}: {format_bytes(row.peak)} in {row.peak_phase}"
        label = legend_label(_broken(label, 36))
        line = {**style, "markevery": [peak], "markersize": 6, "linewidth": 1.4}
        axes.step(seconds, total, where="post", label=label, **line)
        longest = max(longest, seconds[-1])
    axes.set_xlim(0, longest or 1)
    axes.set_ylim(0, 1.1 * max(1, *(row.peak for row in rows)))
    bytes_axis(axes.yaxis, axes.get_ylim()[1], "live memory")
    seconds_axis(axes.xaxis, longest or 1, "time in the step with the peak, while tracked")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    _tidy(axes)


def _draw_times(axes: Axes, rows: Sequence[Row], styles: Sequence[dict[str, Any]]) -> None:
    """Draws peak against time per step."""
    slowest, largest = max(row.seconds for row in rows), max(1, *(row.peak for row in rows))
    labels: list[tuple[float, float]] = []
    top = 1.3 * largest
    for row, style in zip(rows, styles, strict=True):
        axes.plot(row.seconds, row.peak, **style, markersize=8)
        left = row.seconds > 0.6 * slowest
        beside: dict[str, Any] = {"xytext": (-8 if left else 8, 0), "textcoords": "offset points"}
        height = row.peak + 0.06 * largest
        apart = 0.09 * largest * (1 + _broken(row.name, 24).count("\n"))
        while any(
            abs(row.seconds - x) < 0.5 * slowest and abs(height - y) < apart for x, y in labels
        ):
            height += 0.01 * largest  # until the label overlaps no other
        top = max(top, height + apart / 2)
        labels.append((row.seconds, height))
        where = {"ha": "right" if left else "left", "va": "center", "color": style["color"]}
        axes.annotate(_broken(row.name, 24), (row.seconds, height), fontsize=9, **where, **beside)
    axes.set_xlim(0, 1.1 * slowest)
    axes.set_ylim(0, top)
    bytes_axis(axes.yaxis, axes.get_ylim()[1], "peak memory")
    seconds_axis(axes.xaxis, axes.get_xlim()[1], "time per step")
    _tidy(axes)


def _draw_peaks(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws what each peak is made of as a bar for each variant."""
    largest = draw_bars(axes, [_broken(row.name, 18) for row in rows], [r.at_peak for r in rows])
    for place, row in enumerate(rows):
        ratio = f" ({row.peak / rows[0].peak:.2f}\N{MULTIPLICATION SIGN})" if rows[0].peak else ""
        axes.text(row.peak, place, f" {format_bytes(row.peak)}{ratio}", fontsize=9, va="center")
    axes.set_xlim(0, 1.6 * largest)  # room for the figures
    bytes_axis(axes.xaxis, largest, "peak memory")
    # Below: beside the axes it would be among the figures of the bars.
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 3}
    axes.legend(frameon=False, fontsize=9, **below)


def draw_bars(axes: Axes, names: Sequence[str], peaks: Sequence[Mapping[str, int]]) -> int:
    """Draws what each peak is made of, in bytes by category, as a bar, the first one on top.

    Returns the bytes of the longest, 1 at least.
    """
    ends = [0] * len(peaks)
    for category in CATEGORIES:
        sizes = [peak.get(category, 0) for peak in peaks]
        if any(sizes):
            style: dict[str, Any] = {"color": COLOURS[category], "label": category, "height": 0.6}
            axes.barh(range(len(peaks)), sizes, left=ends, **style)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _tidy(axes)
    axes.grid(visible=False, axis="y")
    return max(1, *ends)


def _broken(text: str, width: int) -> str:
    """Breaks a long name into lines, so that it takes no room from what is drawn."""
    return "\n".join(textwrap.wrap(text, width)) or text


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
