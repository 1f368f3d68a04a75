"""Writes a timeline as a page for a browser, which says what is under the pointer."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...shared.axes import bytes_unit
from ...shared.table import format_bytes
from ..account import Timeline
from ..events import CATEGORIES, PHASES
from ..figures import Figures
from ..series import peak_row
from . import timeline as picture
from .timeline import COLOURS, MOVED, PHASE_STYLES, phase_name, places, plot_track, reduced, runs

_STRIP = 0.06  # height of the strip of phases, as a fraction of the peak
# As format_bytes writes them.
_AS_BYTES = """
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
let unit = 0;
if (value >= 1024) {
  do { value /= 1024; unit += 1; } while (value >= 999.5 && unit < 4);
  value = value.toPrecision(3);
}
return value + " " + units[unit];
"""


def draw_track(track: Figures, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draws the timeline of ``track`` into the file ``path``: a page where it ends in ``.html``,
    else a picture in the format that its suffix names.

    Raises:
        ImportError: bokeh, which pages need, or matplotlib, which pictures need, is not installed.
        ValueError: matplotlib cannot write that format.
    """
    if Path(path).suffix.lower() in (".html", ".htm"):
        write_page(track, path, title=title)
    else:
        plot_track(track, path, title=title)


def write_page(track: Figures, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Writes one file with all that it needs, bokeh's script, too: it is read without a network."""
    embed, resources = _bokeh("embed"), _bokeh("resources")
    title = picture.title_of(track) if title is None else title
    page: str = embed.file_html(figure_of(track, title), resources.INLINE, title)
    Path(path).write_text(page, encoding="utf-8")


def _bokeh(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"bokeh.{name}")
    except ImportError as error:
        raise ImportError(
            f"memsave_ext: a page needs bokeh, which cannot be imported ({error}); "
            "pip install bokeh"
        ) from error


def figure_of(track: Figures, title: str) -> Any:
    """Returns bokeh's figure: stacked areas, phases below them, steps, gaps and the peak."""
    plotting, models = _bokeh("plotting"), _bokeh("models")
    figure = plotting.figure(
        title=title,
        sizing_mode="stretch_both",
        tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
        active_scroll="xwheel_zoom",
        x_axis_label="time since tracking began (s)" if track.timed else "allocations and frees",
    )
    if not len(track.timeline.time):
        figure.title.text += ": nothing was allocated"
        figure.scatter([], [])
        return figure
    timeline = reduced(track.timeline)
    edges = places(timeline)
    peak = peak_row(timeline)
    unit, size = bytes_unit(int(timeline.live[peak].sum()))
    figure.yaxis.axis_label = f"live memory ({unit})"
    live = timeline.live.double() / size
    top = float(live[peak].sum()) or 1.0
    most = max(top, float(timeline.moved.max()) / size)
    _draw_areas(figure, timeline, live, edges, peak, 1 / size)
    _draw_phases(figure, timeline, edges, top)
    _mark(figure, models, timeline, edges, peak, top)
    figure.add_tools(_hover(figure, models, timeline, edges, live, track.timed))
    figure.add_tools(models.CrosshairTool(dimensions="height"))
    figure.legend.click_policy = "hide"
    figure.add_layout(figure.legend[0], "right")
    figure.y_range.start, figure.y_range.end = -1.5 * _STRIP * top, 1.15 * most
    figure.x_range.start, figure.x_range.end = edges[0], edges[-1]
    return figure


def _draw_areas(
    figure: Any, timeline: Timeline, live: Tensor, edges: list[float], peak: int, scale: float
) -> None:
    ends = torch.cat([live, live[-1:]]).cumsum(1)  # the last row also has an end
    for column in reversed(range(len(CATEGORIES))):  # the legend has the uppermost first
        if not timeline.live[:, column].any():
            continue
        category, at_peak = CATEGORIES[column], int(timeline.live[peak, column])
        figure.varea_step(
            x=edges,
            y1=ends[:, column - 1].numpy() if column else [0.0] * len(edges),
            y2=ends[:, column].numpy(),
            step_mode="after",
            color=COLOURS[category],
            legend_label=f"{category}: {format_bytes(at_peak)} at the peak",
            name=category,
        )
    if timeline.moved.any():
        figure.step(
            x=edges,
            y=torch.cat([timeline.moved, timeline.moved[-1:]]).double().mul(scale).numpy(),
            mode="after",
            line_color=MOVED,
            line_dash="dashed",
            legend_label=f"moved elsewhere: {format_bytes(int(timeline.moved[peak]))} at the peak",
            name="moved",
        )


def _hover(
    figure: Any,
    models: ModuleType,
    timeline: Timeline,
    edges: list[float],
    live: Tensor,
    timed: bool,
) -> Any:
    """Returns what says what lives where the pointer is, of columns that are not seen."""
    data: dict[str, Any] = {
        "left": edges[:-1],
        "right": edges[1:],
        "top": live.sum(1).numpy(),
        "step": timeline.step.numpy().astype("int32"),
        "phase": [phase_name(PHASES[phase]) for phase in timeline.phase.tolist()],
        "all": timeline.live.double().sum(1).numpy(),  # a browser counts in doubles
    }
    shown = [("step", "@step"), ("phase", "@phase"), ("all", "@all{custom}")]
    if timed:
        data["seconds"] = timeline.time.numpy()
        shown.insert(0, ("time", "@seconds{0.000000} s"))
    there = [c for at, c in enumerate(CATEGORIES) if timeline.live[:, at].any()]
    for category in reversed(there):
        data[category] = timeline.live[:, CATEGORIES.index(category)].double().numpy()
        shown.append((category, f"@{category}{{custom}}"))
    if timeline.moved.any():
        there.append("moved")
        data["moved"] = timeline.moved.double().numpy()
        shown.append(("moved elsewhere", "@moved{custom}"))
    columns = figure.quad(
        left="left", right="right", bottom=0, top="top", alpha=0, name="rows", source=data
    )
    as_bytes = models.CustomJSHover(code=_AS_BYTES)
    formatters = {f"@{name}": as_bytes for name in ("all", *there)}
    return models.HoverTool(
        renderers=[columns], tooltips=shown, formatters=formatters, mode="vline"
    )


def _draw_phases(figure: Any, timeline: Timeline, edges: list[float], top: float) -> None:
    spans: dict[str, list[tuple[float, float]]] = {}
    for phase, start, end in runs(timeline, edges):
        spans.setdefault(phase, []).append((start, end))
    for phase in PHASES:
        if phase in spans:
            left, right = zip(*spans[phase], strict=True)
            style = PHASE_STYLES[phase]
            figure.quad(
                left=left,
                right=right,
                bottom=-1.3 * _STRIP * top,
                top=-0.3 * _STRIP * top,
                color=style["facecolor"],
                line_color=style["edgecolor"],
                legend_label=phase_name(phase),
            )


def _mark(
    figure: Any,
    models: ModuleType,
    timeline: Timeline,
    edges: list[float],
    peak: int,
    top: float,
) -> None:
    size = int(timeline.live[peak].sum())
    left = edges[peak] < (edges[0] + edges[-1]) / 2
    figure.scatter([edges[peak]], [top], color="black", size=7, name="peak")
    figure.add_layout(
        models.Label(
            x=edges[peak],
            y=top,
            x_offset=8 if left else -8,
            y_offset=4,
            text=f"peak {format_bytes(size)} in {phase_name(PHASES[int(timeline.phase[peak])])}",
            text_align="left" if left else "right",
            text_font_size="12px",
        )
    )
    dotted = {"line_color": "#333333", "line_dash": "dotted", "line_width": 1}
    begins = (timeline.step[1:] != timeline.step[:-1]).nonzero().flatten().tolist()
    for row in begins if len(begins) < picture.MOST_STEPS else ():
        figure.add_layout(models.Span(location=edges[row + 1], dimension="height", **dotted))
    for gap in timeline.gaps:
        figure.add_layout(
            models.BoxAnnotation(
                left=edges[gap - 1], right=edges[gap], fill_color="white", fill_alpha=1
            )
        )
