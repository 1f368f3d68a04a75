"""Draws a step within a budget, and what other budgets would cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..memory.pictures.axes import bytes_axis, new_figure, save, seconds_axis
from ..memory.table import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEP, _BUDGET, _LEAST = "#4477aa", "#cc3311", "#777777"


def draw_budget(
    figures: dict[str, Any], forward: int, dropped: int, path: str | os.PathLike[str]
) -> None:
    """Draws a recorder's figures of a budget.

    Args:
        figures: what :meth:`Recorder.budget` returns.
        forward: how many of the moments of its ``curve`` are in forward.
        dropped: bytes that were dropped.
        path: the picture's; its suffix names the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure((11, 4))
    over_step, over_budgets = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_step(over_step, figures, forward, dropped)
    _draw_plans(over_budgets, figures)
    save(figure, path)


def _draw_step(axes: Axes, figures: dict[str, Any], forward: int, dropped: int) -> None:
    curve = figures["curve"]
    axes.fill_between(range(len(curve)), curve, step="mid", color=_STEP, alpha=0.5)
    for name, color in (("budget", _BUDGET), ("least", _LEAST)):
        if figures[name]:
            axes.axhline(figures[name], color=color, linestyle="--")
            axes.annotate(f"{name} {format_bytes(figures[name])}", (0, figures[name]), color=color)
    axes.axvline(forward, color="black", linewidth=0.5)
    axes.set_xlabel(f"operators of forward (until {forward}), then saved tensors in backward")
    axes.set_title(f"peak {format_bytes(figures['peak'])}, dropped {format_bytes(dropped)}")
    bytes_axis(axes.yaxis, max(*curve, figures["budget"], figures["least"]))
    axes.set_xlim(0, len(curve))
    axes.set_ylim(0)


def _draw_plans(axes: Axes, figures: dict[str, Any]) -> None:
    """Draws the seconds of recomputing that are planned for each peak."""
    axes.set_title("what other budgets would cost")
    plans = figures["plans"]
    if not plans:
        axes.text(0.5, 0.5, "known from the second step on", ha="center", va="center")
        return
    peaks, seconds = zip(*plans, strict=True)
    axes.step(peaks, seconds, where="post", color=_STEP)
    axes.plot(*figures["plan"], "o", color=_BUDGET)
    axes.annotate(" this step", figures["plan"])
    bytes_axis(axes.xaxis, max(peaks), "peak")
    seconds_axis(axes.yaxis, max(seconds) or 1e-6, "recomputing")
