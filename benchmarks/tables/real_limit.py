"""The tables of models of real size under a limit of the operating system."""

import statistics
from collections.abc import Iterable

from tables import TIMES, Record, machine_line, markdown

GIB = 2**30
METHODS = (
    "plain",
    "torch's features",
    "memsave_ext, exact",
    "memsave_ext, formats",
    "memsave_ext, moving",
)
OWN = ("float32", "bfloat16")  # formats that a model has without being told


def seconds(row: Record) -> float:
    """Processor time of a step; the first one makes plans and states."""
    return statistics.median(row["cpu_seconds"][1:] or row["cpu_seconds"])


def models_in(record: Record, limit: int) -> list[str]:
    """The models that have a row with a limit, in the order of their kinds and sizes."""
    rows = [row for row in record["rows"] if row["limit_bytes"] == limit]
    rows.sort(key=lambda row: (not row["model"].startswith("GPT-2"), row["parameters"]))
    return list(dict.fromkeys(row["model"] for row in rows))


def real_limit_short(record: Record) -> str:
    """For each limit and model: what each method needs, or that it does not train."""
    of = {(row["model"], row["limit_bytes"], row["method"]): row for row in record["rows"]}
    methods = [m for m in METHODS if any(m == method for *_, method in of)]

    def cell(row: Record | None) -> str:
        if row is None:
            return "-"
        if row["died"]:
            return "not finished" if row["died"].startswith("not finished") else "no room"
        form = "" if row["format"] in OWN else f" ({row['format']})"
        return f"{row['peak_bytes'] / GIB:.1f} GiB, {seconds(row):.0f} s{form}"

    lines = [
        (f"{model} in {limit / GIB:g} GiB", *(cell(of.get((model, limit, m))) for m in methods))
        for limit in sorted({limit for _, limit, _ in of}, reverse=True)
        for model in models_in(record, limit)
    ]
    return markdown(("peak and time of a step", *methods), lines)


def real_limit_table(record: Record) -> str:
    """A line for each row, with what was expected."""
    lines = []
    for row in record["rows"]:
        trains = not row["died"]
        lines.append(
            (
                row["model"],
                f"{row['limit_bytes'] / GIB:g} GiB",
                row["method"],
                row["format"],
                f"{row['needs_bytes'] / GIB:.2f} GiB",
                f"{row['peak_bytes'] / GIB:.2f} GiB" if row["peak_bytes"] else "-",
                f"{seconds(row):.1f} s" if trains else "-",
                f"{statistics.median(row['seconds'][1:]):.1f} s" if trains else "-",
                _losses(row["losses"]) if trains else _death(row),
            )
        )
    header = (
        *("model", "limit", "method", "kept in", "needs on paper", "peak, resident"),
        *("step: processor", "wall", "losses"),
    )
    return markdown(header, lines)


def _losses(losses: Iterable[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def _death(row: Record) -> str:
    """Where it died, and of what kind of error."""
    kind = row["died"].partition(":")[0]
    where = f"in step {len(row['losses']) + 1}" if row["built"] else "when it was made"
    return kind if kind.startswith("not finished") else f"died {where}: {kind}"


def real_limit_caption(record: Record) -> str:
    batches = []
    for row in {row["model"]: row for row in record["rows"]}.values():
        tokens = f"{row['batch']} {TIMES} {row['tokens']} tokens"
        batch = f"{row['batch']} images" if "ViT" in row["model"] else tokens
        batches.append(f"{row['model']}: {batch}")
    commits = sorted({row["commit"] for row in record["rows"] if row.get("commit")})
    mixed = " Rows of several commits, which the file names." if len(commits) > 1 else ""
    return (
        "Random weights; each row is a process that may have so many bytes of private memory "
        "(`RLIMIT_DATA`), Python and libraries among them. Peak: resident bytes (`VmHWM`), in "
        "which pages of libraries are; time: of the processor, median of the second and third "
        "step. Plain: fused AdamW, cross-entropy over logits. torch's features: a checkpoint of "
        "each block, the loss in checkpointed chunks, fused AdamW of the tutorial in backward. "
        'memsave_ext, exact: `remat(budget="auto")`, the loss without logits, '
        "`AdamW(in_backward=True)`; formats: besides, the most exact parameters and states that "
        "fit on paper, named in brackets; moving: besides the exact, states and activations in "
        "files, and where weights do not fit, halves of them. What has no row has not run. "
        f"{'; '.join(batches)}.{mixed} {machine_line(record)}."
    )
