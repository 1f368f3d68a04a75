"""Draws a step within a budget, and what other budgets would cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..shared.axes import bytes_axis, new_figure, save, seconds_axis
from ..shared.table import format_bytes

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
    largest = max(*curve, figures["budget"], figures["least"], 1)
    axes.set_xlim(0, max(len(curve), 1))
    axes.set_ylim(0, 1.1 * largest)
    for name, color in (("budget", _BUDGET), ("least", _LEAST)):
        if figures[name]:
            axes.axhline(figures[name], color=color, linestyle="--")
            _name_line(axes, "minimum" if name == "least" else name, figures[name], color)
    axes.axvline(forward, color="black", linewidth=0.5)
    axes.set_xlabel(f"operators of forward (until {forward}), then saved tensors in backward")
    axes.set_title(f"peak {format_bytes(figures['peak'])}, dropped {format_bytes(dropped)}")
    bytes_axis(axes.yaxis, largest)


def _name_line(axes: Axes, name: str, height: float, color: str) -> None:
    """Writes at a line: the budget's at the left and above it, the minimum's at the right and,
    where there is room, below it, so that neither hides the other."""
    left = name == "budget"
    above = left or height < 0.1 * axes.get_ylim()[1]
    axes.annotate(
        f"{name} {format_bytes(int(height))}",
        (0 if left else 1, height),
        xycoords=("axes fraction", "data"),
        xytext=(4 if left else -4, 3 if above else -3),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom" if above else "top",
        color=color,
        bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.7},
    )


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
    peak, _ = figures["plan"]
    side = "right" if peak > 0.7 * max(peaks) else "left"
    axes.annotate("  this step  ", figures["plan"], ha=side, va="bottom")
    longest = max(seconds) or 1e-6
    bytes_axis(axes.xaxis, max(peaks), "peak")
    seconds_axis(axes.yaxis, longest, "recomputing")
    # The limits that matplotlib sets itself may be a million units apart where all is one value.
    axes.set_xlim(0, 1.1 * max(*peaks, 1))
    axes.set_ylim(-0.05 * longest, 1.1 * longest)
