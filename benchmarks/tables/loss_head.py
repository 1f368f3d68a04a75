"""The tables of the benchmarks of the loss head."""

from tables import Record, machine_line, markdown


def loss_head_table(record: Record) -> str:
    """Cases down, for each shape; peak, time and its ratio across."""
    rows = [
        (
            f"{row['tokens']}, {row['features']}, {row['classes']}: {row['case']}",
            f"{row['of_weight']:.2f}",
            f"{row['seconds'] * 1e3:.0f} ms",
            f"{row['of_plain']:.2f}",
        )
        for row in record["rows"]
    ]
    header = ("tokens, features, classes", "peak / weight", "time", "/ torch's")
    return markdown(header, rows)


def loss_head_caption(record: Record) -> str:
    return (
        "Forward and backward in float32; the peak is above inputs, weight and states. Where rows "
        "are stepped, the time includes Adam's step, which the others do without. Medians of "
        f"{record['settings']['rounds']} rounds in turns; the last column is the median of each "
        f"round's ratio. {machine_line(record)}."
    )


def kl_table(record: Record) -> str:
    """Losses down, by who computes them, for each shape; peak, time and its ratio across."""
    rows = [
        (
            f"{row['tokens']}, {row['features']}, {row['classes']}: {row['loss']}, {row['case']}",
            f"{row['of_logits']:.2f}",
            f"{row['seconds'] * 1e3:.0f} ms",
            f"{row['of_torchs']:.2f}",
        )
        for row in record["rows"]
    ]
    return markdown(("tokens, features, classes", "peak / logits", "CPU time", "/ torch's"), rows)


def kl_caption(record: Record) -> str:
    return (
        "Forward and backward in float32 on one thread; the peak is above inputs and weights, as a "
        "multiple of one head's logits, and includes the weight's gradient. Medians of "
        f"{record['settings']['rounds']} rounds in turns. {machine_line(record)}."
    )
