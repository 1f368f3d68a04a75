"""The tables of the benchmarks, as Markdown, and what stands below them; needs no torch."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from shared.common import device_name

Record = dict[str, Any]
Pair = tuple[Callable[[Record], str], Callable[[Record], str]]  # a table and its caption
TIMES = "\N{MULTIPLICATION SIGN}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads in a terminal too: columns of equal width, figures to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join((first, *rest))} |"

    rule = [":" + "-" * (w - 1) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def times(ratio: float | None) -> str:
    return f" ({ratio:.2f}{TIMES})" if ratio is not None else ""


def size(bytes_: int) -> str:
    """As it is given to devices: in powers of ten."""
    return f"{bytes_ / 1e9:g} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:g} MB"


def machine_name(of: Record) -> str:
    """With the instruction set, in which machines of one name may differ."""
    instructions = of.get("instructions") if of["device"] == "cpu" else None
    return device_name(of) + (f", {instructions}" if instructions else "")


def machine_line(record: Record) -> str:
    of = record["machine"]
    threads = record["settings"].get("threads")
    count = f" ({threads} thread{'s' if threads != 1 else ''})" if threads else ""
    parts = [
        machine_name(of) + (count if of["device"] == "cpu" else ""),
        f"torch {of['torch']}",
        None if of["native"] else "without the native part",
        # Which says of which version it is, too.
        f"commit {of['commit']}" + (" with changes" if of["dirty"] else "")
        if of["commit"]
        else f"memsave_ext {of['memsave_ext']}",
    ]
    return ", ".join(part for part in parts if part)


def overhead_table(record: Record) -> str:
    """Peers down, regions across: microseconds a region costs, and the ratio as recorded."""
    cells = {(row["peer"], row["region"]): row for row in record["rows"]}
    regions = list(dict.fromkeys(region for _, region in cells))

    def cell(row: Record | None) -> str:
        return f"{row['overhead_us']:.1f} µs{times(row['ratio'])}" if row else "-"

    rows = [
        (peer, *(cell(cells.get((peer, region))) for region in regions))
        for peer in dict.fromkeys(peer for peer, _ in cells)
    ]
    return markdown(("overhead per region", *regions), rows)


def overhead_caption(record: Record) -> str:
    return (
        f"Minima of {record['settings']['rounds']} interleaved rounds, {TIMES} against torch, "
        f"use_reentrant=False. {machine_line(record)}."
    )


def threads_table(record: Record) -> str:
    """Peers down, threads across: microseconds per region and thread."""
    counts = list(dict.fromkeys(row["threads"] for row in record["rows"]))
    rows = []
    for peer in dict.fromkeys(row["peer"] for row in record["rows"]):
        mine = {row["threads"]: row["us"] for row in record["rows"] if row["peer"] == peer}
        rows.append((peer, *(f"{mine[n]:.0f} µs" for n in counts)))
    header = [f"{n} thread{'s' if n != 1 else ''}" for n in counts]
    return markdown(("step of a region, per thread", *header), rows)


def threads_caption(record: Record) -> str:
    of = {**record, "settings": {}}
    return f"8 saved tensors; median of {record['settings']['rounds']} rounds. {machine_line(of)}."


def batch_norm_table(record: Record) -> str:
    """Shapes down; speed against torch, of one thread and memory that is used again."""
    rows = [r for r in record["rows"] if r["threads"] == 1 and r["memory"] == "reused"]
    kinds = list(dict.fromkeys((r["dtype"], r["layout"]) for r in rows))

    def cell(row: Record) -> str:
        ms = row["ms"]
        pairs = ("torch forward", "forward"), ("torch forward", "reuse"), ("torch step", "step")
        return " / ".join(f"{ms[a] / ms[b]:.1f}{TIMES}" for a, b in pairs)

    lines = []
    for shape in dict.fromkeys(tuple(r["shape"]) for r in rows):
        of = {(r["dtype"], r["layout"]): cell(r) for r in rows if tuple(r["shape"]) == shape}
        lines.append((TIMES.join(map(str, shape)), *(of[kind] for kind in kinds)))
    return markdown(("forward / recompute / step", *(" ".join(k) for k in kinds)), lines)


def batch_norm_caption(record: Record) -> str:
    missed = [bar for bar in record["bars"] if not bar["ok"]]
    goals = "; ".join(f"{b['name']} {b['value']:.2f} (goal {b['bar']:.2f})" for b in missed)
    of = {**record, "settings": {"threads": 1}}
    return (
        f"{TIMES} torch's speed, on one thread; torch's recompute is its forward. Over all rows, "
        "also those of 2 threads and of memory fresh from the system, "
        f"{f'these goals were not reached: {goals}' if missed else 'all goals were reached'}. "
        f"{_in_place_abn(record)}"
        f"{machine_line(of)}."
    )


def _in_place_abn(record: Record) -> str:
    """The mean speed of a peer, over the rows that it has a part in."""
    rows = [row["ms"] for row in record["rows"] if "InPlace-ABN step" in row["ms"]]
    if not rows:
        return ""
    means = [
        statistics.geometric_mean(ms[f"torch {what}"] / ms[f"{theirs}{what}"] for ms in rows)
        for theirs in ("InPlace-ABN ", "")
        for what in ("forward", "step")
    ]
    forward, step, our_forward, our_step = (f"{mean:.2f}{TIMES}" for mean in means)
    return (
        f"InPlace-ABN in float32: forward {forward}, step {step} on average, where ours has "
        f"{our_forward} and {our_step}. "
    )
