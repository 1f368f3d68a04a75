"""The tables of models of real size under a limit of the operating system."""

import statistics
from collections.abc import Iterable, Sequence

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
_EXPLAINED = """\
- Plain: fused AdamW, cross-entropy over logits.
- torch's features: each block (layer of a transformer) checkpointed, the loss in checkpointed chunks, the tutorial's fused AdamW in backward.
- Exact: `remat(budget="auto")`, which recomputes no more than the limit asks for; the loss without logits; `AdamW(in_backward=True)`. Results differ from the plain run's by rounding alone: the loss is summed in another order, and moments are float32.
- Formats: as exact, with the most exact [parameters](docs/adam/bfloat16.md) (stochastic: rounded at random; split8: with 8 bits more) and [states](docs/adam/states.md) that fit: the second table names them.
- Moving: as exact, with states and activations in files, and where the second table says so, weights."""  # noqa: E501


def typical(of_steps: Sequence[float]) -> float:
    """Of a row's steps without the first one, which makes plans and states."""
    return statistics.median(of_steps[1:] or of_steps)


def seconds(row: Record) -> float:
    """Processor time of a step."""
    return typical(row["cpu_seconds"])


def duration(row: Record) -> str:
    """Processor time of a step, and where waiting adds more than a tenth, the wall's."""
    wall = typical(row["seconds"])
    waiting = f" (wall {wall:.0f} s)" if wall > 1.1 * seconds(row) else ""
    return f"{seconds(row):.0f} s{waiting}"


def on_disk(row: Record) -> float | None:
    """Seconds that the disk needs for what a step has it read and write, by the speed that was
    measured before the row; None for rows that move nothing."""
    if not row.get("disk_speed"):
        return None
    return typical(
        [
            sum(moved / speed for moved, speed in zip(step, row["disk_speed"], strict=True))
            for step in row["disk_bytes"]
        ]
    )


def grids(record: Record) -> dict[int, tuple[list[str], list[str], dict[tuple[str, str], Record]]]:
    """For each limit its models, its methods and what there is of each two: a row that has run, or
    what was expected of it."""
    known = [*record.get("on_paper", ()), *record["rows"]]
    found = {}
    for limit in sorted({row["limit_bytes"] for row in known}, reverse=True):
        rows = [row for row in known if row["limit_bytes"] == limit]
        rows.sort(key=lambda row: (not row["model"].startswith("GPT-2"), row["parameters"]))
        models = list(dict.fromkeys(row["model"] for row in rows))
        methods = [method for method in METHODS if any(row["method"] == method for row in known)]
        of = {(row["model"], row["method"]): row for row in known if row["limit_bytes"] == limit}
        found[limit] = models, methods, of
    return found


def waits(of: dict[tuple[str, str], Record]) -> bool:
    """Whether a row of a limit that is expected has not run."""
    return any("died" not in row for row in of.values())


def outcome(row: Record) -> str:
    """Whether a row trains, in a few words; in brackets where it has not run."""
    form = "" if row["format"] in OWN else f", {row['format']}"
    needed = row["needs_bytes"] / GIB
    if "died" not in row:
        fits = row["needs_bytes"] <= row["limit_bytes"]
        return f"({needed:.1f} GiB{form})" if fits else f"({needed:.1f} GiB: no room)"
    if row["died"]:
        return "not finished" if row["died"].startswith("not finished") else "no room"
    return f"{row['peak_bytes'] / GIB:.1f} GiB, {seconds(row):.0f} s{form}"


def real_limit_short(record: Record) -> str:
    """For each limit the largest model that a method trains; the time of each model's step within
    the first limit."""
    largest, times = [], []
    for limit, (models, methods, of) in grids(record).items():
        size = f"{limit / GIB:g} GiB"
        largest.append((size, *(_largest(of, method) for method in methods)))
        for model in models if len(largest) == 1 else ():
            cells = [of.get((model, method)) for method in methods]
            times.append((model, *(time(row) if row else "-" for row in cells)))
    tables = [
        markdown(("the largest that trains in", *methods), largest),
        markdown((f"a step in {largest[0][0]}", *methods), times),
    ]
    return "\n\n".join([*tables, _EXPLAINED])


def _largest(of: dict[tuple[str, str], Record], method: str) -> str:
    rows = [row for (_, name), row in of.items() if name == method and not row.get("died", True)]
    if not rows:
        return "none"
    row = max(rows, key=lambda row: row["parameters"])
    return f"{row['model']}, {duration(row)}"


def time(row: Record) -> str:
    """The time of a row's step, and what its parameters and states are kept in where that is not
    the model's own; in brackets what is expected of one that has not run."""
    if row.get("died", True):
        return outcome(row)
    return duration(row) + ("" if row["format"] in OWN else f", {row['format']}")


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
                f"{typical(row['seconds']):.1f} s" if trains else "-",
                _disk(row) if trains else "-",
                _losses(row["losses"]) if trains else _death(row),
            )
        )
    header = (
        *("model", "limit", "method", "kept in", "needs on paper", "peak, resident"),
        *("step: processor", "wall", "disk", "losses"),
    )
    return markdown(header, lines)


def _disk(row: Record) -> str:
    least = on_disk(row)
    if least is None:
        return "-"
    moved = typical([sum(step) for step in row["disk_bytes"]])
    return f"{moved / 1e9:.1f} GB, {least:.1f} s"


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
    *_, of = next(iter(grids(record).values()))  # whose times are shown
    brackets = "In brackets: has not run; what it needs by arithmetic. " if waits(of) else ""
    return (
        "Each run is a process, limited to that much private memory (`RLIMIT_DATA`), Python "
        "included; random weights. Peak: resident bytes (`VmHWM`), also of libraries' files, which "
        "the limit does not count. Time: of the processor for a step, median of the second and "
        "third; *wall*, in brackets where it is more than a tenth longer, includes waits for the "
        f"disk and other work of the machine. {brackets}"
        f"{'; '.join(batches)}.{mixed} {machine_line(record)}."
    )
