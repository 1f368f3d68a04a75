"""The tables of the benchmark of remat()."""

from collections.abc import Sequence

from tables import TIMES, Record, machine_line, markdown

TRANSFORMERS = ("GPT", "BERT", "ViT", "LSTM")  # and what has no batch norms
NETS = ("DenseNet, ours", "ResNet, ours", "U-Net, ours", "DenseNet", "ResNet", "U-Net")
NAMES = {"recorded": "recording alone", "checkpoint": "torch's checkpoint, each block"} | {
    f"checkpoint, {how}": f"torch's checkpoint, {how}" for how in ("every second", "selective")
}
NAMES |= {
    f"compile, budget {share}": f"torch.compile, budget {share}" for share in (0.5, 0.4, 0.25)
}


def method_name(method: str) -> str:
    return NAMES.get(method, method)


def _table(record: Record, names: Sequence[str]) -> str:
    """Methods down, models across: shares of the plain step's activations and time."""
    models = [model for name in names for model in record["models"] if model["model"] == name]
    cells = [{row["method"]: row for row in model["rows"]} for model in models]

    def cell(row: Record | None) -> str:
        return f"{row['memory']:.2f} / {row['time']:.2f}" if row else "-"

    rows = [
        (method_name(method), *(cell(of.get(method)) for of in cells))
        for method in max(cells, key=len)
        if method != "plain"
    ]
    return markdown(("", *(model["model"] for model in models)), rows)


def remat_table(record: Record) -> str:
    return _table(record, TRANSFORMERS)


def remat_nets_table(record: Record) -> str:
    return _table(record, NETS)


def remat_caption(record: Record) -> str:
    return (
        "Activations at the peak / time of a step, as shares of the plain step's (medians of "
        f"{record['settings']['rounds']} rounds in turns). {machine_line(record)}."
    )


def remat_host_table(record: Record) -> str:
    """Ways down, programs across: microseconds of the host for an operator."""
    hosts = record["host"]
    ways = hosts[0]["us"]
    rows = [(method_name(way), *(f"{host['us'][way]:.1f} µs" for host in hosts)) for way in ways]
    names = (f"{host['program']}, {host['plain_us']:.1f} µs each" for host in hosts)
    return markdown(("", *names), rows)


def remat_host_caption(record: Record) -> str:
    return (
        "Processor time of a step with tensors of 16 elements over the plain one's, forward and "
        "backward, for each operator of the forward."
    )


def instructions_table(record: Record) -> str:
    """Ways down; for each program thousands of instructions for an operator, and once a step."""
    rows = record["rows"]
    cells = [
        (
            method_name(way),
            *(f"{row[what][way] / 1e3:.1f}" for row in rows for what in ("operator", "step")),
        )
        for way in rows[0]["operator"]
        if way != "plain"
    ]
    names = [
        (f"{row['program']}, {row['operator']['plain'] / 1e3:.1f} each", "and once a step")
        for row in rows
    ]
    return markdown(("", *(name for pair in names for name in pair)), cells)


def instructions_caption(record: Record) -> str:
    short, long = record["settings"]["lengths"]
    return (
        "The same in thousands of instructions, as callgrind counts them: for an operator, and "
        f"what is once a step, of steps of {short} and {long} layers."
    )


def remat_picture_caption(record: Record) -> str:
    return (
        "Activations at the peak and time of a step, as shares of the plain step's: lower and "
        f"further left is better. {machine_line(record)}."
    )


def remat_nets_caption(record: Record) -> str:
    return f"*ours*: with this package's BatchNorm; else torch's. Shares {TIMES} plain, as above."


def budgets_table(record: Record) -> str:
    """Budgets down, steps across: how many rows kept the promise, and the worst one."""
    good = [row for row in record["rows"] if "error" not in row]

    def name(row: Record) -> str:
        return "of torch's checkpoints" if row["share"] is None else f"{row['share']:.2f}"

    def cells(title: str, rows: Sequence[Record]) -> tuple[str, ...]:
        found = [title, str(len(rows))]
        for number in (1, 2, 10):
            ratios = [row[f"ratio_{number}"] for row in rows]
            kept = sum(ratio <= 1.02 for ratio in ratios) / len(ratios)
            found.append(f"{100 * kept:.0f} % / {max(ratios):.2f}")
        for key in ("time", "time_checkpoint"):
            times = sorted(row[key] for row in rows if key in row)
            found.append(f"{times[len(times) // 2]:.2f}" if times else "-")
        return tuple(found)

    names = sorted({name(row) for row in good}, reverse=True)
    lines = [cells(each, [row for row in good if name(row) == each]) for each in names]
    steps = [f"step {number}" for number in (1, 2, 10)]
    return markdown(("budget", "rows", *steps, "time", "time of checkpoints"), lines)


def budgets_caption(record: Record) -> str:
    rows = record["rows"]
    failed = sum("error" in row for row in rows)
    models = {row["model"] for row in rows}
    return (
        f"{len(models)} models, {len(record['settings']['ways'])} ways to call them; in each cell "
        "the rows within 1.02 of what was promised, and the worst peak over it. Times of a step "
        f"over the plain one, medians. {f'{failed} rows failed. ' if failed else ''}"
        f"{machine_line(record)}."
    )
