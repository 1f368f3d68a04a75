"""What the pictures of the benchmarks look like; plot.py draws them."""

import textwrap
from collections.abc import Callable, Sequence

import matplotlib

from readme_tables import TABLES
from tables import TIMES, Record, size
from tables.real_limit import GIB, grids, outcome, waits
from tables.remat import method_name

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

OURS, PEER, NAIVE, GREY = "#d1495b", "#7ea6c9", "#8a8f98", "#444444"
SHADES = {  # of methods side by side
    "torch": "#4f7cac",
    "torch_reentrant": "#a9c4de",
    "fairscale": "#c9c2a5",
    "memsave_ext": "#d1495b",
    "memsave_ext_checkpoint": "#ec9ca7",
    "memsave_ext_remat": "#8c1c2f",
}


def caption(record: Record) -> str:
    return TABLES[record["claim"]][1](record)


def colour(name: str) -> str:
    if name == "naive" or name.startswith("naive, "):
        return NAIVE
    ours = ("memsave_ext", "checkpoint", "CheckpointFunction", "AdamW", "ours")
    return OURS if name.startswith(ours) and name != "memsave_ext_batch_norm" else PEER


def plot_densenet(record: Record) -> Figure:
    """Peak memory and time per step of each method, side by side."""
    rows = record["rows"]
    extent = (11, 1.6 + 0.5 * len(rows))
    figure, (memory, time) = plt.subplots(1, 2, sharey=True, figsize=extent, layout="constrained")
    mebibytes = [row["peak_memory_bytes"] / 2**20 for row in rows]
    _bars(memory, rows, mebibytes, ratios=[row["memory_ratio"] for row in rows])
    memory.set_xlabel("peak memory (MiB)")
    milliseconds = [row["seconds_per_step"] * 1e3 for row in rows]
    half_iqr = [row["seconds_per_step_iqr"] * 500 for row in rows]
    _bars(time, rows, milliseconds, half_iqr, [row["time_ratio"] for row in rows])
    time.set_xlabel("time per step (ms)")
    memory.invert_yaxis()  # the axes share it: the first row on top
    _caption(figure, record)
    return figure


def _bars(
    axis: Axes,
    rows: Sequence[Record],
    values: Sequence[float],
    spread: Sequence[float] = (),
    ratios: Sequence[float | None] = (),
    form: str = "{:.0f}",
) -> None:
    """A bar for each row, with its figure and ratio beside it."""
    labels = [row.get("label", row["method"]) for row in rows]
    axis.barh(labels, values, color=[colour(row["method"]) for row in rows], height=0.62)
    halves = list(spread) or [0.0] * len(values)
    ends = [value + half for value, half in zip(values, halves, strict=True)]
    if any(halves):
        axis.errorbar(values, labels, xerr=halves, fmt="none", color="#333333", capsize=3, lw=1)
    for place, (value, end) in enumerate(zip(values, ends, strict=True)):
        text = form.format(value)
        if ratios and ratios[place]:
            text += f"  ({ratios[place]:.2f}{TIMES})"
        beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(text, (end, place), fontsize=9, **beside)
    axis.set_xlim(0, 1.32 * max(ends))  # room for the figures
    _tidy(axis)


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _caption(figure: Figure, record: Record) -> None:
    figure.suptitle(caption(record), fontsize=9, color=GREY, wrap=True)


def plot_overhead(record: Record) -> Figure:
    """Overhead per region over the number of saved tensors, a line per peer."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    chains = [row for row in record["rows"] if row["region"].partition(" ")[0].isdigit()]
    for peer in dict.fromkeys(row["peer"] for row in chains):
        mine = [row for row in chains if row["peer"] == peer]
        counts = [int(row["region"].partition(" ")[0]) for row in mine]
        style = ("-", "--", ":", "-.")[len(axis.lines) % 4]
        values = [row["overhead_us"] for row in mine]
        axis.plot(counts, values, style, marker="o", color=colour(peer))
        axis.annotate(f" {peer}", (counts[-1], values[-1]), fontsize=8, va="center")
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=10)  # an explicit region costs less than nothing
    axis.axhline(0, color="#cccccc", linewidth=0.8)
    axis.margins(y=0.08)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlim(right=axis.get_xlim()[1] * 6)  # room for the names
    axis.set_xlabel("tensors the region saves")
    axis.set_ylabel("overhead per region (\N{MICRO SIGN}s)")
    return figure


def plot_data_parallel(record: Record) -> Figure:
    """Memory and time against naive; a diamond is what the original repository had there."""
    rows = [row for row in record["rows"] if row["time_ratio"]]
    places = list(dict.fromkeys((row["devices"], row["batch_size"]) for row in rows))
    shown = [m for m in SHADES if any(row["method"] == m for row in rows)]
    figure, axes = plt.subplots(2, 1, figsize=(11, 6.5), layout="constrained", sharex=True)
    width = 0.8 / max(1, len(shown))
    handles: dict[str, Artist] = {}
    for axis, name in zip(axes, ("memory", "time"), strict=True):
        for i, method in enumerate(shown):
            mine = [row for row in rows if row["method"] == method]
            x = [places.index((row["devices"], row["batch_size"])) for row in mine]
            x = [place + (i + 0.5) * width - 0.4 for place in x]
            bars = axis.bar(x, [row[f"{name}_ratio"] for row in mine], width, edgecolor="white",
                            color=SHADES[method])  # fmt: skip
            handles[mine[0]["label"]] = bars
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
            if name == "time":
                theirs = [row.get("original_time_ratio") or float("nan") for row in mine]
                handles["the original's"] = axis.scatter(
                    x, theirs, marker="D", s=16, facecolor="none", edgecolor="black"
                )
        axis.axhline(1, color=NAIVE, linewidth=1)
        axis.set_ylabel(f"{name}, {TIMES} naive")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_locator(ticker.FixedLocator([1, 2, 5, 10]))
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_locator(ticker.NullLocator())
    ticks = [f"{n} device{'s' if n > 1 else ''}, batch {batch}" for n, batch in places]
    axes[1].set_xticks(range(len(places)), ticks, fontsize=8)
    axes[1].set_ylim(bottom=0.5)
    figure.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, ncols=3,
                  loc="outside lower center")  # fmt: skip
    _caption(figure, record)
    return figure


def plot_largest_model(record: Record) -> Figure:
    """The largest depth and batch of each method, a row of pictures for each model and budget."""
    places = list(dict.fromkeys((row["model"], row["budget_bytes"]) for row in record["rows"]))
    methods = len({row["method"] for row in record["rows"]})
    extent = (11, len(places) * (0.9 + 0.45 * methods) + 0.6)
    figure, axes = plt.subplots(
        len(places), 2, sharey=True, squeeze=False, figsize=extent, layout="constrained"
    )
    for pair, (model, budget) in zip(axes, places, strict=True):
        rows = [
            row for row in record["rows"] if (row["model"], row["budget_bytes"]) == (model, budget)
        ]
        base = rows[0]
        for axis, of, label in (
            (pair[0], "depth", "blocks of the deepest model"),
            (pair[1], "batch", "the largest batch"),
        ):
            values = [row[of]["largest"] for row in rows]
            ratios = [value / base[of]["largest"] if base[of]["largest"] else None
                      for value in values]  # fmt: skip
            _bars(axis, rows, values, ratios=ratios)
            axis.set_xlabel(label)
        pair[0].invert_yaxis()
        pair[0].set_ylabel(f"{model}, {size(budget)}")
    _caption(figure, record)
    return figure


def plot_real_limit(record: Record) -> Figure:
    """A field for each model and method, filled where it has trained, and a grid for each limit."""
    of_limits = grids(record)
    heights = [1.0 + 0.55 * len(methods) for _, methods, _ in of_limits.values()]
    figure, axes = plt.subplots(
        len(heights), 1, squeeze=False, figsize=(12, 0.4 + sum(heights)),
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    on_paper = " (in brackets: on paper)" if any(waits(of) for *_, of in of_limits.values()) else ""
    for axis, (limit, (models, methods, of)) in zip(axes[:, 0], of_limits.items(), strict=True):
        for (model, method), row in of.items():
            x, y = models.index(model), methods.index(method)
            trains = "died" in row and not row["died"]
            shade = NAIVE if method == "plain" else colour(method)
            empty = "#e4e4e4" if "died" in row else "#f7f7f7"
            axis.add_patch(
                Rectangle((x - 0.48, y - 0.44), 0.96, 0.88, color=shade if trains else empty, lw=0)
            )
            text = textwrap.fill(outcome(row), 22)
            color = "white" if trains else "#777777"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
        axis.set_xlim(-0.5, len(models) - 0.5)
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.set_xticks(range(len(models)), models, fontsize=9)
        axis.set_yticks(range(len(methods)), methods, fontsize=9)
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        title = f"trains in {limit / GIB:g} GiB: peak and time of a step{on_paper}"
        axis.set_title(title, fontsize=10)
    return figure


def plot_adam_memory(record: Record) -> Figure:
    rows = record["rows"]
    figure, axis = plt.subplots(figsize=(9, 0.8 + 0.42 * len(rows)), layout="constrained")
    peaks = [row["peak_bytes"] / 2**30 for row in rows]
    _bars(axis, rows, peaks, ratios=[peak / peaks[0] for peak in peaks], form="{:.2f}")
    axis.invert_yaxis()
    axis.set_xlabel("peak memory (GiB)")
    return figure


MEMORY = {  # colours of categories, in the order in which they are stacked
    "parameters": "#4f7cac",
    "optimizer": "#a9c4de",
    "gradients": "#e0a458",
    "activations": "#d1495b",
    "other": "#b9bec5",
}


def plot_memory_account(record: Record) -> Figure:
    """Live bytes by category over the changes of memory, not over time: as long on any machine."""
    rows = record["rows"]
    figure, axes = plt.subplots(
        1, len(rows), sharey=True, squeeze=False, figsize=(12, 4.2), layout="constrained"
    )
    for axis, row in zip(axes[0], rows, strict=True):
        live = {name: [b / 2**20 for b in row["timeline"]["live"][name]] for name in MEMORY}
        x = range(len(live["parameters"]))
        layers = axis.stackplot(x, *live.values(), colors=MEMORY.values(), step="post")
        axis.axhline(row["peak"] / 2**20, color="#333333", linewidth=0.8, linestyle="--")
        axis.set_title(f"{row['loop']}: {row['peak'] / 2**20:.0f} MiB", fontsize=9)
        axis.set_xlabel(f"{len(row['steps'])} steps")
        axis.set_xticks([])
        axis.margins(x=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("live memory (MiB)")
    figure.legend(layers, MEMORY, fontsize=8, frameon=False, ncols=5, loc="outside lower center")
    _caption(figure, record)
    return figure


FRONTIER = "GPT", "ViT", "DenseNet, ours"  # models whose time at memory is drawn
METHODS = {  # how methods whose names begin so are drawn: label, colour, marker, line
    "torch's checkpoint": ("torch's checkpoint", PEER, "s", "none"),
    "torch.compile": ("torch.compile, memory budgets", SHADES["torch"], "^", "--"),
    "remat": ("remat", OURS, "*", "none"),
    "budget": ("remat, memory budgets", OURS, "o", "-"),
}


def plot_remat(record: Record) -> Figure:
    """Time of a step over the activations at its peak, both as shares of the plain step's."""
    models = [model for name in FRONTIER for model in record["models"] if model["model"] == name]
    figure, axes = plt.subplots(
        1, len(models), sharey=True, squeeze=False, figsize=(11, 4.2), layout="constrained"
    )
    handles: dict[str, Artist] = {}
    for axis, model in zip(axes[0], models, strict=True):
        for start, (label, shade, marker, line) in METHODS.items():
            rows = [row for row in model["rows"] if method_name(row["method"]).startswith(start)]
            rows.sort(key=lambda row: row["memory"])
            x, y = [row["memory"] for row in rows], [row["time"] for row in rows]
            size = 13 if marker == "*" else 6
            (handles[label],) = axis.plot(
                x, y, color=shade, marker=marker, linestyle=line, markersize=size
            )
        axis.plot([1], [1], color=NAIVE, marker="D")
        axis.annotate("plain ", (1, 1), ha="right", va="center", fontsize=8, color=NAIVE)
        axis.set_title(model["model"].partition(",")[0], fontsize=10)
        axis.set_xlabel("activations at the peak")
        axis.set_xlim(0.2, 1.05)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"time of a step, {TIMES} plain")
    figure.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, ncols=4,
                  loc="outside lower center")  # fmt: skip
    return figure


def plot_remat_budgets(record: Record) -> Figure:
    """Peaks over what was promised, both as shares of the plain step's activations."""
    rows = [row for row in record["rows"] if "error" not in row]
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(11, 4.2), layout="constrained")
    for axis, number in zip(axes, (1, 2, 10), strict=True):
        axis.plot([0, 1.3], [0, 1.3], color=GREY, linewidth=0.8)
        for kept, shade in ((True, PEER), (False, OURS)):
            shown = [row for row in rows if (row[f"ratio_{number}"] <= 1.02) is kept]
            x, y = (
                [
                    (row[f"{name}_{number}"] - row[f"before_{number}"])
                    / (row["plain"] - row["before_2"])
                    for row in shown
                ]
                for name in ("promised", "peak")
            )
            label = "within 1.02 of it" if kept else "more"
            axis.plot(x, y, ".", color=shade, markersize=5, label=label)
        axis.set_title(f"step {number}", fontsize=10)
        axis.set_xlabel("promised")
        axis.set_xlim(0.2, 1.3)
        axis.set_ylim(0.2, 1.3)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"peak, {TIMES} plain, without what lived before")
    axes[0].legend(fontsize=8, frameon=False)
    _caption(figure, record)
    return figure


SIMULATED = {  # by way: its name and style
    "recompute": ("recomputing alone", NAIVE, "D", ":"),
    "move": ("moving alone", PEER, "s", "--"),
    "both": ("both, one plan", OURS, "o", "-"),
}


def plot_simulated(record: Record) -> Figure:
    """What the simulation adds to a step over the width of its blocks, of each card."""
    cards = [card["name"] for card in record["cards"]]
    share = record["settings"]["shares"][0]
    figure, axes = plt.subplots(
        1, len(cards), sharey=True, squeeze=False, figsize=(11, 4.2), layout="constrained"
    )
    for axis, card in zip(axes[0], cards, strict=True):
        rows = [r for r in record["rows"] if r["card"] == card and r["share"] == share]
        for way, (label, shade, marker, line) in SIMULATED.items():
            shown = [row for row in rows if row[way] is not None]
            x, y = [row["width"] for row in shown], [100 * row[way] for row in shown]
            axis.plot(x, y, color=shade, marker=marker, linestyle=line, markersize=5, label=label)
        axis.set_xscale("log", base=2)
        widths = sorted({row["width"] for row in rows})
        axis.set_xticks(widths, widths, fontsize=7)
        axis.minorticks_off()
        axis.set_title(f"{card}, simulated", fontsize=10)
        axis.set_xlabel("width")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel(f"added to a step at {share} of its activations, %")
    axes[0][-1].legend(fontsize=8, frameon=False)
    return figure


DRAWINGS: dict[str, Callable[[Record], Figure]] = {
    "densenet": plot_densenet,
    "data_parallel": plot_data_parallel,
    "checkpoint_overhead": plot_overhead,
    "adam_memory": plot_adam_memory,
    "largest_model": plot_largest_model,
    "real_limit": plot_real_limit,
    "memory_account": plot_memory_account,
    "remat": plot_remat,
    "remat_budgets": plot_remat_budgets,
    "remat_offload_simulated": plot_simulated,
}
