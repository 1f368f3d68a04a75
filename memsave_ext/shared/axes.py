"""Shared by the pictures: figures made without ``pyplot``, axes of bytes and of seconds.

matplotlib is imported only when something is drawn. Without pyplot no window opens, and the user's
figures and backend stay as they are.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SECONDS = {"\N{MICRO SIGN}s": 1e-6, "ms": 1e-3, "s": 1.0}


def new_figure(size: tuple[float, float]) -> Figure:
    """Returns an empty figure of ``size`` inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "memsave_ext: a picture needs matplotlib, which cannot be imported "
            f"({error}); pip install matplotlib"
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def legend_label(text: str) -> str:
    """Returns a label that a legend shows: those that begin with an underscore it leaves out."""
    return f" {text}" if text.startswith("_") else text


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes ``figure`` to ``path`` in the format that its suffix names.

    Raises:
        ValueError: matplotlib cannot write that format.
    """
    figure.savefig(path, dpi=150)


def bytes_axis(axis: Axis, largest: float, label: str = "memory") -> None:
    """Labels an axis of bytes up to ``largest`` in a suitable unit."""
    _axis(axis, _BYTES, largest, label, 5)


def seconds_axis(axis: Axis, longest: float, label: str = "time") -> None:
    """Labels an axis of seconds up to ``longest`` in a suitable unit."""
    _axis(axis, _SECONDS, longest, label, 8)


def seconds_unit(longest: float) -> tuple[str, float]:
    """Returns a suitable unit for times up to ``longest`` seconds, and its length in seconds."""
    return _unit(_SECONDS, longest)


def distance(span: float, ticks: int) -> float:
    """Returns 1, 2 or 5 times a power of ten, so that at most ``ticks`` of it fill ``span``."""
    least = span / ticks
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def below(axes: Axes, height: float) -> Axes:
    """Returns a strip under ``axes``, which takes over the labels of their x axis.

    ``height`` is a fraction of the height of ``axes``.
    """
    strip = axes.inset_axes((0, -1.3 * height, 1, height), sharex=axes)
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    strip.spines[:].set_visible(False)
    axes.tick_params(labelbottom=False, bottom=False)
    return strip


def _unit(units: dict[str, float], largest: float) -> tuple[str, float]:
    fitting = [(name, size) for name, size in units.items() if largest >= 2 * size]
    return fitting[-1] if fitting else next(iter(units.items()))


def _axis(axis: Axis, units: dict[str, float], largest: float, label: str, ticks: int) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    name, size = _unit(units, largest)
    axis.set_major_locator(MultipleLocator(distance(largest / size, ticks) * size))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
    axis.set_label_text(f"{label} ({name})")
