"""Draws which techniques make a step fit: a bar for each, the budget, and what each costs."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..memory.pictures.comparison import draw_bars
from ..shared.axes import bytes_axis, new_figure, save
from ..shared.table import format_bytes

_NARROW = 34  # characters of a line beside the bars


def plot_fits(rows: Sequence[Any], budget: int, path: str | os.PathLike[str], title: str) -> None:
    """Draws the ``rows`` of ``Fits`` into the file ``path``; see :meth:`Fits.plot`."""
    names = [textwrap.fill(row.name, _NARROW) for row in rows]
    beside = [textwrap.fill(_beside(row), _NARROW + 8) for row in rows]
    texts = zip(names, beside, strict=True)
    lines = sum(1 + max(name.count("\n"), text.count("\n")) for name, text in texts)
    figure = new_figure((11, 1.5 + 0.22 * lines + 0.12 * len(rows)))
    axes = figure.add_subplot()
    none: Mapping[str, int] = {}
    largest = draw_bars(axes, names, [row.at_peak or none for row in rows])
    for place, (row, text) in enumerate(zip(rows, beside, strict=True)):
        if row.peak is not None:
            weight = "bold" if row.fits else "normal"
            label = f" {format_bytes(row.peak)}"
            text_of = axes.text(row.peak, place, label, fontsize=9, va="center", fontweight=weight)
            text_of.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})
        where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
        where["fontsize"] = 8
        axes.text(1.02, place, text, color="black" if row.peak is not None else "#777777", **where)
    # A budget far beyond the bars would leave no room for them.
    shown = budget <= 2 * largest
    right = max(largest, budget if shown else 0)
    label = f"budget: {format_bytes(budget)}{'' if shown else ', far to the right'}"
    style: dict[str, Any] = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 1.4}
    if shown:
        axes.axvline(budget, label=label, gid="budget", **style)
    else:
        axes.plot([], [], label=label, **style)
    axes.set_xlim(0, 1.25 * right)  # room for the figures
    bytes_axis(axes.xaxis, right, "predicted peak of a step")
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=6)
    axes.set_title(title, loc="left", fontsize=11)
    save(figure, path)


def _beside(row: Any) -> str:
    if row.peak is None:
        what = "not predicted" if row.is_unpredicted else "does not apply"
        return f"{what}: {textwrap.shorten(row.reason, 76, placeholder=' ...')}"
    batch = "" if row.largest_batch is None else f"; batch {row.largest_batch}"
    cost = "nothing" if row.cost == "none" else row.cost
    moved = "" if row.moved is None else f"; {format_bytes(row.moved)} elsewhere"
    time = row.times and f"; {row.times} the time"
    return f"{'fits' if row.fits else 'does not fit'}{batch}; costs {cost}{time}{moved}"
