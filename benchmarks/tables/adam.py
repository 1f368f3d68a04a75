"""The tables of the benchmarks of Adam."""

from collections.abc import Callable

from tables import TIMES, Pair, Record, machine_line, markdown, times


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
            f"{row['peak_bytes'] / 2**30:.2f} GiB" + times(row["peak_bytes"] / base["peak_bytes"])
        ),
        "time per step": lambda row: (
            f"{row['step_ms']:.0f} ms" + times(row["step_ms"] / base["step_ms"])
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


def training_table(record: Record) -> str:
    """Modes down, models across: the loss, and how far it is from the base's, of the same seeds."""
    base = record["rows"][0]["tasks"]

    def cell(of: Record, spread: float) -> str:
        change = f" ({of['change'] / spread:+.1f})" if spread and of["change"] else ""
        return f"{of['mean']:.4f} ± {of['spread']:.4f}{change}"

    rows = [
        (
            row["method"],
            f"{row['stored']:.2f}",
            *(cell(of, base[name]["spread"]) for name, of in row["tasks"].items()),
        )
        for row in record["rows"]
    ]
    return markdown(("AdamW", "bytes", *(f"{name}'s loss" for name in base)), rows)


def training_caption(record: Record) -> str:
    s = record["settings"]
    steps = " and ".join(f"{count} steps of the {name}" for name, count in s["steps"].items())
    return (
        f"Loss on what was not learned, after {steps}; mean and deviation of {s['seeds']} "
        "seeds, and the distance from torch's with the same seeds, in torch's deviations. No loss "
        f"of the GPT's can be below {s['least']:.2f}. {machine_line(record)}."
    )


KINDS = ("in backward", "after")
REMOVED = ("fp32, accumulate(fold=True)",)  # modes of earlier records


def _rows_with(record: Record, result: str) -> list[Record]:
    """Of the modes that there are, those that have this result."""
    rows = (row for row in record["rows"] if row["method"] not in REMOVED)
    return [row for row in rows if result in row]


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
        for r in _rows_with(record, "loss")
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
        for r in _rows_with(record, "measured")
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
        return f"{taken['ms']:.1f} ms{times(taken['ratio'])}" if taken else "-"

    rows = [
        (row["method"], *(cell(row, job, kind) for job in jobs for kind in KINDS))
        for row in _rows_with(record, "one")
    ]
    header = [f"{name}, {kind}" for name in jobs.values() for kind in KINDS]
    return markdown(("time of a step", *header), rows)


def modes_time_caption(record: Record) -> str:
    s = record["settings"]
    missing = ", ".join(f"{name} ({reason})" for name, reason in record["left_out"].items())
    return (
        f"{s['elements'] / 1e6:.0f} M elements, in 1 tensor and in the 296 of a ViT, over a "
        f"backward with an empty hook; {TIMES} fp32's, of accumulate() its own. Medians of "
        f"{s['rounds']} rounds. "
        + (f"Left out: {missing}. " if missing else "")
        + f"{machine_line(record)}."
    )


def modes_page(page: str) -> Pair:
    return lambda record: modes_distance_table(record, page), modes_distance_caption
