"""Pictures of benchmark results, drawn from their records."""

from pathlib import Path

import matplotlib

from models import OURS
from readme_tables import TIMES, Record, densenet_caption

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"naive": "#8a8f98"} | dict.fromkeys(OURS, "#d1495b")
PEER = "#7ea6c9"


def plot_densenet(record: Record, path: Path) -> None:
    """Peak memory and time per step of each method, side by side."""
    rows = record["rows"]
    size = (11, 1.6 + 0.5 * len(rows))
    figure, (memory, time) = plt.subplots(1, 2, sharey=True, figsize=size, layout="constrained")
    mebibytes = [row["peak_memory_bytes"] / 2**20 for row in rows]
    _bars(memory, rows, mebibytes, [0.0] * len(rows), "memory_ratio")
    memory.set_xlabel("peak memory (MiB)")
    milliseconds = [row["seconds_per_step"] * 1e3 for row in rows]
    half_iqr = [row["seconds_per_step_iqr"] * 500 for row in rows]
    _bars(time, rows, milliseconds, half_iqr, "time_ratio")
    time.set_xlabel("time per step (ms)")
    memory.invert_yaxis()  # the axes share it: the first row on top
    figure.suptitle(densenet_caption(record), fontsize=9, color="#444444", wrap=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(
    axis: Axes, rows: list[Record], values: list[float], spread: list[float], ratio: str
) -> None:
    labels = [row["label"] for row in rows]
    colours = [COLOURS.get(row["method"], PEER) for row in rows]
    axis.barh(labels, values, color=colours, height=0.62)
    ends = [value + half for value, half in zip(values, spread, strict=True)]
    if any(spread):
        axis.errorbar(values, labels, xerr=spread, fmt="none", color="#333333", capsize=3, lw=1)
    for place, (row, value, end) in enumerate(zip(rows, values, ends, strict=True)):
        text = f"{value:.0f}" + (f"  ({row[ratio]:.2f}{TIMES})" if row[ratio] else "")
        beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(text, (end, place), fontsize=9, **beside)
    axis.set_xlim(0, 1.28 * max(ends))  # room for the figures
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def plot_overhead(record: Record, path: Path) -> None:
    """Overhead per region over the number of saved tensors, a line per peer."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    chains = [row for row in record["rows"] if row["region"].partition(" ")[0].isdigit()]
    for peer in dict.fromkeys(row["peer"] for row in chains):
        mine = [row for row in chains if row["peer"] == peer]
        counts = [int(row["region"].partition(" ")[0]) for row in mine]
        colour = PEER if peer.startswith("torch") else COLOURS["memsave_ext"]
        style = ("-", "--", ":", "-.")[len(axis.lines) % 4]
        axis.plot(counts, [row["overhead_us"] for row in mine], style, marker="o", color=colour)
        axis.annotate(f" {peer}", (counts[-1], mine[-1]["overhead_us"]), fontsize=8, va="center")
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=10)  # an explicit region costs less than nothing
    axis.axhline(0, color="#cccccc", linewidth=0.8)
    axis.margins(y=0.08)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlim(right=axis.get_xlim()[1] * 6)  # room for the names
    axis.set_xlabel("tensors the region saves")
    axis.set_ylabel("overhead per region (\N{MICRO SIGN}s)")
    figure.savefig(path, dpi=150)
    plt.close(figure)
