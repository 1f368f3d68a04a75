"""The tables of the benchmarks that train networks."""

from collections.abc import Callable

from tables import TIMES, Record, machine_line, markdown, size, times


def densenet_table(record: Record) -> str:
    header = (
        "method",
        "devices",
        "batch",
        "peak memory",
        "time per step",
        "loss",
        "BN updates/step",
        "max Δ running stats",
    )
    rows = []
    # Of the runs without checkpoint, one for each batch norm.
    plain = {row["loss"] for row in record["rows"] if row["running_stats_max_diff"] is None}
    for row in record["rows"]:
        milliseconds, half_iqr = row["seconds_per_step"] * 1e3, row["seconds_per_step_iqr"] * 500
        diff = row["running_stats_max_diff"]
        rows.append(
            (
                row["label"],
                str(row["devices"]),
                str(row["batch_size"]),
                f"{row['peak_memory_bytes'] / 2**20:.1f} MiB" + times(row["memory_ratio"]),
                f"{milliseconds:.1f} ± {half_iqr:.1f} ms" + times(row["time_ratio"]),
                "-" if diff is None else "the same" if row["loss"] in plain else "another",
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
        "loss and Δ against the run without checkpoint and with the same BatchNorm, bit for bit. "
        f"{machine_line(record)}."
    )


def data_parallel_rows(record: Record) -> str:
    """As the original's README has them, a row for each method, number of devices and batch."""
    header = ("method", "devices", "batch", "peak memory", "time per step", "the original's")
    rows = []
    for row in sorted(record["rows"], key=_place_of_method(record)):
        rows.append(
            (
                row["label"],
                str(row["devices"]),
                str(row["batch_size"]),
                _mebibytes(row) + times(row["memory_ratio"]),
                _milliseconds(row) + times(row["time_ratio"]),
                _original(row),
            )
        )
    return markdown(header, rows)


def _place_of_method(record: Record) -> Callable[[Record], int]:
    order = list(dict.fromkeys(row["method"] for row in record["rows"]))
    return lambda row: order.index(row["method"])


def _mebibytes(row: Record) -> str:
    peak = row["peak_memory_bytes"]
    return "out of memory" if peak is None else f"{peak / 2**20:.1f} MiB"


def _milliseconds(row: Record) -> str:
    seconds = row["seconds_per_step"]
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ± {row['seconds_per_step_iqr'] * 500:.1f} ms"


def _original(row: Record) -> str:
    if not row.get("original_seconds"):
        return "-"
    figures = f"batch {row['original_batch']}: {row['original_gb']} G, {row['original_seconds']} s"
    return figures + times(row["original_time_ratio"])


README_METHODS = (
    "naive",
    "torch",
    "memsave_ext",
    "memsave_ext_checkpoint",
    "memsave_ext_remat",
)


def data_parallel_table(record: Record) -> str:
    """Devices and batches down, some methods across."""
    of = {(r["devices"], r["batch_size"], r["method"]): r for r in record["rows"]}
    methods = [m for m in README_METHODS if any(m == method for _, _, method in of)]
    labels = {row["method"]: row["label"] for row in record["rows"]}

    def cell(row: Record | None) -> str:
        if row is None or row["seconds_per_step"] is None:
            return "out of memory" if row else "-"
        return (
            f"{_mebibytes(row)}, {row['seconds_per_step'] * 1e3:.0f} ms{times(row['time_ratio'])}"
        )

    lines = [
        (
            f"{devices} device{'s' if devices > 1 else ''}, batch {batch}",
            *(cell(of.get((devices, batch, method))) for method in methods),
        )
        for devices, batch in dict.fromkeys((d, b) for d, b, _ in of)
    ]
    return markdown(("peak memory, time per step", *(labels[m] for m in methods)), lines)


def data_parallel_caption(record: Record) -> str:
    s = record["settings"]
    kinds = dict.fromkeys(row["device_is"] for row in record["rows"])
    of = {**record, "settings": {}}
    return (
        f"DenseNet-BC, depth {s['depth']}, growth rate {s['growth_rate']}, SGD, images of 32 "
        f"{TIMES} 32; a device is {' or '.join(kinds)}, the batch is that of all devices, memory "
        f"that of the one that needs most; medians of {s['rounds']} interleaved rounds, {TIMES} "
        f"against naive. {machine_line(of)}."
    )


def largest_model_table(record: Record) -> str:
    """Methods down, for each model and budget: the deepest with its parameters, and the batch."""
    places = list(dict.fromkeys((row["model"], row["budget_bytes"]) for row in record["rows"]))
    of = {(row["model"], row["budget_bytes"], row["method"]): row for row in record["rows"]}
    base, most = record["rows"][0]["method"], record["settings"].get("most_batch")
    header = ["trains with"]
    for model, budget in places:
        header += [f"{model} in {size(budget)}: blocks", "batch", "time"]
    lines = []
    for method in dict.fromkeys(row["method"] for row in record["rows"]):
        cells = [method]
        for place in places:
            row, first = of[(*place, method)], of[(*place, base)]
            for what in ("depth", "batch"):
                ended = what == "batch" and row[what]["largest"] == most
                count = f"{'≥ ' if ended else ''}{row[what]['largest']}"
                cells.append(f"{count}{_over(row[what], first[what])}")
            cells.append(f"{row['time']:.2f}" if "time" in row else "-")
        lines.append(cells)
    return markdown(header, lines)


def _over(one: Record, base: Record) -> str:
    return times(one["largest"] / base["largest"] if base["largest"] else None)


def _most_in_float32(record: Record) -> str:
    """Blocks whose parameters and states alone fill each budget, at Adam's 12 bytes a parameter."""
    most = []
    for model, budget in dict.fromkeys((r["model"], r["budget_bytes"]) for r in record["rows"]):
        known = {
            row["depth"]["largest"]: row["depth"]["parameters"]
            for row in record["rows"]
            if row["model"] == model and row["depth"]["largest"]
        }
        if len(known) > 1:
            few, many = min(known), max(known)
            each = (known[many] - known[few]) / (many - few)
            most.append(f"{int(few + (budget / 12 - known[few]) / each)} ({model}, {size(budget)})")
    if not most:
        return ""
    return f" Float32 parameters and states alone fill the memory at {' and '.join(most)} blocks."


def largest_model_caption(record: Record) -> str:
    s = record["settings"]
    ended = f" (at most {s['most_batch']} is tried)" if "most_batch" in s else ""
    return (
        f"Blocks of width {s['width']}: a ViT on images of {s['image']} {TIMES} {s['image']}; a "
        f"GPT of {s['tokens']} tokens and a vocabulary of {s['vocabulary']}. The most blocks with "
        f"a batch of {s['batch_size']}, the largest batch with {s['depth']} blocks{ended}, found "
        f"by bisection, {TIMES} the naive ones; time of a step of the deepest model that torch's "
        "features (checkpoint each block, fused AdamW of the tutorial in backward, the loss in "
        f"chunks) allow, as a share of theirs.{_most_in_float32(record)} {machine_line(record)}."
    )


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
                f"{seconds * 1e3:.0f} ms" + times(seconds / base["seconds_per_step"]),
                f"{peak / 2**20:.1f} MiB" + times(peak / base["peak_memory_bytes"]),
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
