"""Writes the tables of README and docs from committed results: no figure is typed by hand.

    python benchmarks/readme_tables.py            # rewrite what stands between the markers
    python benchmarks/readme_tables.py --check    # exit 1 where a page differs

A table stands between ``<!-- claim:begin -->`` and ``<!-- claim:end -->``, or, one of several from
the same results, ``<!-- claim:table:begin -->``. Needs no torch.
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


KINDS = ("in backward", "after")


def modes_distance_table(record: Record, page: str) -> str:
    """Of the modes of one page of docs/adam, below the core."""
    rows = [r for r in record["rows"] if r["page"] == page or r["method"] == "fp32"]
    snrs = list(next(r["distance"] for r in rows if "distance" in r))

    def distance(row: Record, snr: str) -> str:
        return f"{row['distance'][snr]:.1g}" if "distance" in row else "-"

    def loss(row: Record) -> str:
        return f"{row['loss']:.4f} ± {row['loss_spread']:.4f}" if "loss" in row else "-"

    lines = [
        (row["method"], *(distance(row, snr) for snr in snrs), loss(row))
        for row in rows
        if "distance" in row or "loss" in row
    ]
    return markdown(("distance from exact Adam", *(f"snr {s}" for s in snrs), "ViT's loss"), lines)


def modes_distance_caption(record: Record) -> str:
    s = record["settings"]
    theirs = next(row for row in record["rows"] if row["method"] == "torch, fp32")
    return (
        f"Distance after {s['steps']} steps at signal/noise (snr); loss of a small ViT on digits, "
        f"mean of its last 50 of {s['loss_steps']} steps, ± deviation between {s['seeds']} seeds "
        f"(torch's AdamW: {theirs['loss']:.4f} ± {theirs['loss_spread']:.4f}). "
        f"{machine_line(record)}."
    )


def modes_loss_table(record: Record) -> str:
    def change(value: float) -> str:
        return f"{value:+.4f}" if abs(value) >= 5e-5 else "0"

    rows = [
        (r["method"], f"{r['loss']:.4f}", f"{r['loss_spread']:.4f}", change(r["loss_change"]))
        for r in record["rows"]
        if "loss" in r
    ]
    header = ("AdamW", "loss", "between seeds", "over torch's with the same seeds")
    return markdown(header, rows)


def modes_loss_caption(record: Record) -> str:
    s = record["settings"]
    return (
        f"A small ViT learns the digits: mean loss of the last 50 of {s['loss_steps']} steps, "
        f"{s['seeds']} seeds; modes that clip beside torch's that clips likewise. "
        f"{machine_line(record)}."
    )


def modes_bytes_table(record: Record) -> str:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        (r["method"], *map(figure, (r["stored"], r["measured"], *map(r["peak"].get, KINDS))))
        for r in record["rows"]
        if "measured" in r
    ]
    header = ("bytes for each parameter", "arithmetic", "measured", "peak, stepped in backward",
              "peak, stepped after")  # fmt: skip
    return markdown(header, rows)


def modes_bytes_caption(record: Record) -> str:
    s = record["settings"]
    return (
        "Parameter and states; at the peak of a step, gradients too, of a model of "
        f"{s['layers']} equal layers. {machine_line(record)}."
    )


def modes_time_table(record: Record) -> str:
    jobs = {"one": "1 tensor", "vit": "ViT"}

    def cell(row: Record, job: str, kind: str) -> str:
        taken = row.get(job, {}).get(kind)
        return f"{taken['ms']:.1f} ms{_times(taken['ratio'])}" if taken else "-"

    rows = [
        (row["method"], *(cell(row, job, kind) for job in jobs for kind in KINDS))
        for row in record["rows"]
        if "one" in row
    ]
    header = [f"{name}, {kind}" for name in jobs.values() for kind in KINDS]
    return markdown(("time of a step", *header), rows)


def modes_time_caption(record: Record) -> str:
    s = record["settings"]
    missing = ", ".join(f"{name} ({reason})" for name, reason in record["left_out"].items())
    return (
        f"{s['elements'] / 1e6:.0f} M elements, in 1 tensor and in the 296 of a ViT, over a "
        f"backward with an empty hook; {TIMES} fp32's, of folding accumulate()'s. Medians of "
        f"{s['rounds']} rounds. "
        + (f"Left out: {missing}. " if missing else "")
        + f"{machine_line(record)}."
    )


def _modes_page(page: str) -> tuple[Callable[[Record], str], Callable[[Record], str]]:
    return lambda record: modes_distance_table(record, page), modes_distance_caption


def distributed_table(record: Record) -> str:
    rows = record["rows"]
    naive = {(r["network"], r["engine"]): r for r in rows if r["method"] == "naive"}
    lines = []
    for row in rows:
        base = naive[row["network"], row["engine"]]
        seconds, peak = row["seconds_per_step"], row["peak_memory_bytes"]
        lines.append(
            (
                f"{row['network']}, {row['engine']}: {row['method']}",
                f"{seconds * 1e3:.0f} ms" + _times(seconds / base["seconds_per_step"]),
                f"{peak / 2**20:.1f} MiB" + _times(peak / base["peak_memory_bytes"]),
                str(row["collectives"]),
                f"{row['bytes_sent'] / 2**20:.2f} MiB",
            )
        )
    header = ("one step of one process", "time", "peak memory", "collectives", "sent")
    return markdown(header, lines)


def distributed_caption(record: Record) -> str:
    s = record["settings"]
    return (
        f"{s['ranks']} processes, {s['backend']}; DenseNet-BC of depth {s['depth']} with "
        f"SyncBatchNorm, {s['batch']} images each; ViT of width {s['vit_width']} and depth "
        f"{s['vit_depth']}, {s['vit_batch']} images each. Medians of {s['rounds']} interleaved "
        f"rounds, {TIMES} against naive. {machine_line(record)}."
    )


TABLES: dict[str, tuple[Callable[[Record], str], Callable[[Record], str]]] = {
    "densenet": (densenet_table, densenet_caption),
    "checkpoint_overhead": (overhead_table, overhead_caption),
    "checkpoint_threads": (threads_table, threads_caption),
    "batch_norm": (batch_norm_table, batch_norm_caption),
    "adam": (adam_table, adam_caption),
    "adam_memory": (adam_memory_table, adam_memory_caption),
    "distributed": (distributed_table, distributed_caption),
    "adam_modes:bytes": (modes_bytes_table, modes_bytes_caption),
    "adam_modes:time": (modes_time_table, modes_time_caption),
    "adam_modes:loss": (modes_loss_table, modes_loss_caption),
    **{
        f"adam_modes:{page}": _modes_page(page)
        for page in ("clipping", "loss_scaling", "bfloat16", "states", "folding")
    },
}


def section(claim: str, results: Path) -> str | None:
    """The newest run of every machine's file, or None where there is no file."""
    table, caption = TABLES[claim]
    parts = []
    for path in sorted(results.glob(f"{claim.partition(':')[0]}-*.json")):
        newest = json.loads(path.read_text())[-1]
        parts.append(
            f"{table(newest)}\n\n{caption(newest)} Source: `benchmarks/results/{path.name}`."
        )
    return "\n\n".join(parts) or None


def rewrite(page: str, results: Path) -> tuple[str, set[str], list[str]]:
    """The page with its tables renewed, the claims that it has, and those without a result."""
    found: set[str] = set()
    without = []
    for claim in TABLES:
        begin, end = f"<!-- {claim}:begin -->", f"<!-- {claim}:end -->"
        pattern = re.compile(f"({re.escape(begin)})(.*?)({re.escape(end)})", re.DOTALL)
        if not pattern.search(page):
            continue
        found.add(claim)
        text = section(claim, results)
        if text is None:
            without.append(claim)
        else:
            page = pattern.sub(lambda m, text=text: f"{m[1]}\n{text}\n{m[3]}", page)
    return page, found, without


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 where a page differs"
    )
    parser.add_argument("--readme", type=Path, help="one page instead of README and docs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)

    everywhere: set[str] = set()
    differs = False
    for path in [args.readme] if args.readme else pages():
        before = path.read_text(encoding="utf-8")
        after, found, without = rewrite(before, args.results)
        everywhere |= found
        for claim in without:
            print(f"skipped {claim}: no result")
        if args.check and after != before:
            differs = True
            print(f"{path.name} differs from its results: run python benchmarks/readme_tables.py")
        elif after != before:
            path.write_text(after, encoding="utf-8")
    for claim in sorted(TABLES.keys() - everywhere):
        print(f"skipped {claim}: <!-- {claim}:begin --> ... <!-- {claim}:end --> is in no page")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
