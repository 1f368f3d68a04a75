"""The tables of what only a GPU runs: kernels beside their floor, and what recomputing costs."""

from tables import TIMES, Record, machine_line, markdown, times


def kernel_cell(row: Record) -> str:
    speed = row["torch_us"] and row["torch_us"] / row["ours_us"]
    return f"{row['ours_us']:.0f} µs, {row['floor_us'] / row['ours_us']:.0%}{times(speed)}"


def kernel_caption(record: Record) -> str:
    return f"Medians of {record['settings']['rounds']} rounds. {machine_line(record)}."


def batch_norm_cuda_table(record: Record) -> str:
    """Shapes down, passes across: microseconds, share of the floor, times torch's speed."""
    rows = record["rows"]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    of = {(tuple(r["shape"]), r["dtype"], r["layout"], r["pass"]): r for r in rows}

    lines = [
        (f"{TIMES.join(map(str, shape))} {dtype} {layout}",
         *(kernel_cell(of[shape, dtype, layout, name]) for name in passes))
        for shape, dtype, layout in dict.fromkeys(key[:3] for key in of)
    ]  # fmt: skip
    return markdown(("batch norm on a GPU", *passes), lines)


def batch_norm_cuda_caption(record: Record) -> str:
    return (
        "Time, share of the floor (each tensor moved once at the speed of a copy), and times "
        f"torch's speed. {kernel_caption(record)}"
    )


def adam_cuda_table(record: Record) -> str:
    """Modes down, elements across: microseconds, share of the floor, times torch's speed."""
    of = {(row["mode"], row["elements"]): row for row in record["rows"]}
    modes, sizes = (list(dict.fromkeys(each)) for each in zip(*of, strict=True))
    lines = [(mode, *(kernel_cell(of[mode, size]) for size in sizes)) for mode in modes]
    return markdown(("step of Adam on a GPU", *map(_elements, sizes)), lines)


def _elements(count: int) -> str:
    return f"{count / 1e6:.0f} M" if count >= 1e6 else f"{count:,}"


def adam_cuda_caption(record: Record) -> str:
    return (
        "Time of a step of one tensor, share of the floor (each byte that must move, once, at the "
        f"speed of a copy), and times the speed of torch's fused AdamW. {kernel_caption(record)}"
    )


def checkpoint_cuda_table(record: Record) -> str:
    """Methods down, batches across: what the host does, a step, and replicas in threads."""
    batches = list(dict.fromkeys(row["batch"] for row in record["overhead"]))
    steps = {(row["method"], row["batch"]): row for row in record["overhead"]}
    replicas = {(row["method"], row["batch"]): row for row in record["replicas"]}

    def cells(method: str, batch: int) -> tuple[str, str, str]:
        row, threads = steps[method, batch], replicas.get((method, batch))
        return (
            f"{row['host_ms']:.1f} ms",
            f"{row['step_ms']:.1f} ms{times(row['step_ratio'])}",
            f"{threads['together_ms']:.1f} ms{times(threads['ratio'])}" if threads else "-",
        )

    count = record["settings"]["threads"]
    header = [
        f"{what}, batch {batch}"
        for batch in batches
        for what in ("host", "step", f"{count} replicas")
    ]
    lines = [
        (record["labels"][method], *(cell for batch in batches for cell in cells(method, batch)))
        for method in dict.fromkeys(method for method, _ in steps)
    ]
    return markdown(("DenseNet on a GPU", *header), lines)


def checkpoint_cuda_caption(record: Record) -> str:
    of = record["settings"]
    return (
        f"DenseNet-BC {of['depth']}, growth rate {of['growth']}, one step without an optimizer. "
        f"Host: until all of it is queued. Step: until the device is done, {TIMES} that of naive. "
        f"Replicas: as many threads on one device, {TIMES} the sum of their times alone. "
        f"{kernel_caption(record)}"
    )
