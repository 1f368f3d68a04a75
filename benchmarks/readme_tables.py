"""Writes the README's tables from committed results, so that no figure is typed by hand.

    python benchmarks/readme_tables.py            # rewrite what stands between the markers
    python benchmarks/readme_tables.py --check    # exit 1 where the README differs

A table stands between ``<!-- claim:begin -->`` and ``<!-- claim:end -->``. Needs no torch.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, device_name

Record = dict[str, Any]
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


def _times(ratio: float | None) -> str:
    return f" ({ratio:.2f}{TIMES})" if ratio is not None else ""


def densenet_table(record: Record) -> str:
    header = (
        "method",
        "devices",
        "batch",
        "peak memory",
        "time per step",
        "loss",
        "test error",
        "BN updates/step",
        "max Δ running stats",
    )
    rows = []
    for row in record["rows"]:
        milliseconds, half_iqr = row["seconds_per_step"] * 1e3, row["seconds_per_step_iqr"] * 500
        diff = row["running_stats_max_diff"]
        rows.append(
            (
                row["label"],
                str(row["devices"]),
                str(row["batch_size"]),
                f"{row['peak_memory_bytes'] / 2**20:.1f} MiB" + _times(row["memory_ratio"]),
                f"{milliseconds:.1f} ± {half_iqr:.1f} ms" + _times(row["time_ratio"]),
                f"{row['loss']:.4f}",
                f"{row['test_error']:.1%}",
                f"{row['bn_updates_per_step']:g}",
                "-" if diff is None else f"{diff:.2g}",
            )
        )
    return markdown(header, rows)


def densenet_caption(record: Record) -> str:
    s = record["settings"]
    return (
        f"DenseNet-BC, depth {s['depth']}, growth rate {s['growth_rate']}, {s['data']}, "
        f"{s['steps']} steps; median ± half the interquartile range, {TIMES} against naive; "
        f"Δ against the run without checkpoint and with the same BatchNorm. {machine_line(record)}."
    )


def machine_line(record: Record) -> str:
    of = record["machine"]
    threads = record["settings"].get("threads")
    count = f" ({threads} thread{'s' if threads != 1 else ''})" if threads else ""
    parts = [
        device_name(of) + (count if of["device"] == "cpu" else ""),
        f"torch {of['torch']}",
        f"memsave_ext {of['memsave_ext']}" + ("" if of["native"] else " without its native part"),
        f"commit {of['commit']}" + (" with changes" if of["dirty"] else "")
        if of["commit"]
        else None,
    ]
    return ", ".join(part for part in parts if part)


def overhead_table(record: Record) -> str:
    """Peers down, regions across: microseconds a region costs, and the ratio as recorded."""
    cells = {(row["peer"], row["region"]): row for row in record["rows"]}
    regions = list(dict.fromkeys(region for _, region in cells))

    def cell(row: Record | None) -> str:
        return f"{row['overhead_us']:.1f} µs{_times(row['ratio'])}" if row else "-"

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
    goals = "; ".join(f"{b['name']} {b['value']:.2f}, goal {b['bar']:.2f}" for b in missed)
    of = {**record, "settings": {"threads": 1}}
    return (
        f"{TIMES} torch's speed, on one thread; torch's recompute is its forward. Over all rows, "
        f"those of 2 threads and of memory fresh from the system too: "
        f"{f'goals missed: {goals}' if missed else 'all goals met'}. {machine_line(of)}."
    )


def adam_table(record: Record) -> str:
    # The huge job came later than the others.
    columns: dict[str, Callable[[Record], str]] = {
        "per tiny parameter": lambda row: f"{row['us_per_parameter']:.1f} µs",
        "19 M elements": lambda row: f"{row['large_ms']:.1f} ms",
        "1 of 100 M": lambda row: _milliseconds(row.get("huge_ms")),
        "whole step": lambda row: f"{row['real_ms']:.0f} ms",
        "peak over state": lambda row: f"{row['peak_bytes'] / 2**20:.1f} MiB",
    }
    if "huge" not in record["settings"]:
        del columns["1 of 100 M"]
    rows = [(row["method"], *(cell(row) for cell in columns.values())) for row in record["rows"]]
    return markdown(("AdamW", *columns), rows)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def adam_caption(record: Record) -> str:
    firsts = "three" if "huge" in record["settings"] else "two"
    floor = record.get("floor_ms")
    return (
        f"{record.get('parameters', 292)} parameters of a transformer; the first {firsts} columns "
        "over a backward with an empty hook. "
        + (f"The least that 100 M can take is {floor:.2f} ms. " if floor else "")
        + f"Medians of {record['settings']['rounds']} rounds. {machine_line(record)}."
    )


def adam_memory_table(record: Record) -> str:
    base = record["rows"][0]
    columns: dict[str, Callable[[Record], str]] = {
        "peak memory": lambda row: (
            f"{row['peak_bytes'] / 2**30:.2f} GiB" + _times(row["peak_bytes"] / base["peak_bytes"])
        ),
        "time per step": lambda row: (
            f"{row['step_ms']:.0f} ms" + _times(row["step_ms"] / base["step_ms"])
        ),
    }
    if base["step_ms"] is None:
        del columns["time per step"]
    rows = [(row["method"], *(cell(row) for cell in columns.values())) for row in record["rows"]]
    return markdown(("AdamW", *columns), rows)


def adam_memory_caption(record: Record) -> str:
    s = record["settings"]
    return (
        f"ViT-L/16 in float32, batch of {s['batch_size']}; parameters, states, gradients and "
        f"activations. {machine_line(record)}."
    )


TABLES: dict[str, tuple[Callable[[Record], str], Callable[[Record], str]]] = {
    "densenet": (densenet_table, densenet_caption),
    "checkpoint_overhead": (overhead_table, overhead_caption),
    "checkpoint_threads": (threads_table, threads_caption),
    "batch_norm": (batch_norm_table, batch_norm_caption),
    "adam": (adam_table, adam_caption),
    "adam_memory": (adam_memory_table, adam_memory_caption),
}


def section(claim: str, results: Path) -> str | None:
    """The newest run of every machine's file, or None where there is no file."""
    table, caption = TABLES[claim]
    parts = []
    for path in sorted(results.glob(f"{claim}-*.json")):
        newest = json.loads(path.read_text())[-1]
        parts.append(
            f"{table(newest)}\n\n{caption(newest)} Source: `benchmarks/results/{path.name}`."
        )
    return "\n\n".join(parts) or None


def rewrite(readme: str, results: Path) -> tuple[str, list[str]]:
    """The README with its tables renewed, and what was left out."""
    skipped = []
    for claim in TABLES:
        begin, end = f"<!-- {claim}:begin -->", f"<!-- {claim}:end -->"
        pattern = re.compile(f"({re.escape(begin)})(.*?)({re.escape(end)})", re.DOTALL)
        text = section(claim, results)
        if not pattern.search(readme):
            skipped.append(f"{claim}: no {begin} ... {end} in the README")
        elif text is None:
            skipped.append(f"{claim}: no result")
        else:
            readme = pattern.sub(lambda m, text=text: f"{m[1]}\n{text}\n{m[3]}", readme)
    return readme, skipped


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 where the README differs"
    )
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)

    before = args.readme.read_text(encoding="utf-8")
    after, skipped = rewrite(before, args.results)
    for line in skipped:
        print(f"skipped {line}")
    if args.check and after != before:
        print(
            f"{args.readme.name} differs from its results: run python benchmarks/readme_tables.py"
        )
        return 1
    if not args.check:
        args.readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
