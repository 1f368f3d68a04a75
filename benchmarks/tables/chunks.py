"""The table of the benchmark of a wide layer in chunks."""

from tables import TIMES, Record, machine_line, markdown


def chunks_table(record: Record) -> str:
    """Cases down; peak and time across, each with its ratio to the region without chunks."""
    rows = [
        (
            row["case"],
            f"{row['peak_bytes'] / 2**20:.1f} MiB",
            f"{row['peak_of_whole']:.2f}{TIMES}",
            f"{row['seconds'] * 1e3:.0f} ms",
            f"{row['of_whole']:.2f}{TIMES}",
        )
        for row in record["rows"]
    ]
    return markdown(("forward and backward", "peak", "", "time", ""), rows)


def chunks_caption(record: Record) -> str:
    of = record["settings"]["shape"]
    layer = f"{of['width']} → {of['hidden']} → {of['width']}"
    return (
        f"An MLP {layer} with GELU over {of['rows']} rows in float32; {TIMES} of checkpoint "
        "without chunks. The peak is above the input, the output and the gradients of both; those "
        f"of parameters count. Medians of {record['settings']['rounds']} rounds in turns; "
        f"{TIMES} is the median of each round's ratio. {machine_line(record)}."
    )
