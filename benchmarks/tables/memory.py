"""The tables of the benchmarks of memory.track()."""

import statistics
from collections.abc import Sequence
from typing import Any

from tables import TIMES, Record, machine_line, markdown

MIB = 2**20


def account_table(record: Record) -> str:
    """Loops down; the peak, when it was and what it was made of across."""
    rows = [
        (
            row["loop"],
            f"{row['peak'] / MIB:.1f} MiB",
            row["peak_phase"],
            *(f"{bytes_ / MIB:.1f}" for bytes_ in row["at_peak"].values()),
        )
        for row in record["rows"]
    ]
    header = ("loop", "peak", "in", *(f"{name}, MiB" for name in record["rows"][0]["at_peak"]))
    return markdown(header, rows)


def account_caption(record: Record) -> str:
    of = record["settings"]
    scaled = "" if record["machine"]["device"] == "cuda" else ", the tutorial's model scaled down"
    return (
        f"A vision transformer of width {of['width']}, depth {of['depth']}{scaled}, patches of 16; "
        f"{of['image']} {TIMES} {of['image']}, batch {of['batch_size']}, AdamW in float32, "
        f"{of['steps']} steps. {machine_line(record)}."
    )


def account_text(record: Record) -> str:
    """The account in sentences, each with its number."""
    ordinary, in_backward, checkpointed = record["rows"]

    def mib(row: Record, name: str) -> str:
        return f"{row['at_peak'][name] / MIB:.1f} MiB"

    def fall(row: Record, than: Record) -> str:
        return f"{100 * (1 - row['peak'] / than['peak']):.0f} %"

    others = ordinary["at_peak"]["other"] / ordinary["at_peak"]["parameters"]
    in_flight = in_backward["at_peak"]["gradients"] / in_backward["at_peak"]["parameters"]
    begun = _share_of_backward(in_backward)
    return "\n".join(
        [
            f"- The ordinary loop peaks in the phase *{ordinary['peak_phase']}* at "
            f"{ordinary['peak'] / MIB:.1f} MiB: parameters {mib(ordinary, 'parameters')}, their "
            f"gradients {mib(ordinary, 'gradients')}, Adam's two states "
            f"{mib(ordinary, 'optimizer')}, and {mib(ordinary, 'other')} of intermediates, "
            f"{others:.2f} {TIMES} the parameters, which the foreach step makes. Activations are "
            f"down to {mib(ordinary, 'activations')} by then.",
            f"- With the step in backward the peak is in the phase *{in_backward['peak_phase']}*, "
            f"{100 * begun:.0f} % of the way through it, at {in_backward['peak'] / MIB:.1f} MiB, "
            f"{fall(in_backward, ordinary)} lower: gradients in flight are "
            f"{mib(in_backward, 'gradients')}, {100 * in_flight:.0f} % of the parameters, and no "
            f"intermediates are made. What is left beside parameters and states is "
            f"{mib(in_backward, 'activations')} of activations.",
            f"- With checkpointing added activations at the peak fall to "
            f"{mib(checkpointed, 'activations')}, and the peak to "
            f"{checkpointed['peak'] / MIB:.1f} MiB, {fall(checkpointed, ordinary)} below the "
            f"ordinary loop. {_regions(checkpointed)}",
        ]
    )


def _share_of_backward(row: Record) -> float:
    """How far into its backward the peak is, 0 to 1, by time."""
    timeline = row["timeline"]
    backward = timeline["phases"].index("backward")
    times = [
        time
        for time, phase, step in zip(
            timeline["time"], timeline["phase"], timeline["step"], strict=True
        )
        if phase == backward and step == row["peak_step"]
    ]
    return (row["peak_time"] - times[0]) / (times[-1] - times[0])


def _regions(row: Record) -> str:
    regions = row["regions"]
    saved = max(region["saved_bytes"] for region in regions) / MIB
    seconds = sum(region["seconds"] for region in regions) / len(row["steps"])
    step = sum(step["seconds"] for step in row["steps"]) / len(row["steps"])
    return (
        f"Each of its {len(regions)} regions brings back {saved:.1f} MiB when its turn comes, "
        f"and all recomputes together are {100 * seconds / step:.0f} % of the step's time."
    )


def overhead_table(record: Record) -> str:
    rows = [
        (
            row["case"],
            f"{row['step_ms']:.1f} ± {row['spread_ms'] / 2:.1f} ms",
            f"{row['ratio']:.3f}{TIMES}",
            str(row["changes"] or "-"),
        )
        for row in record["rows"]
    ]
    return markdown(("step of a DenseNet", "time", "ratio", "allocations and frees"), rows)


def overhead_caption(record: Record) -> str:
    of = record["settings"]
    return (
        f"DenseNet-BC, depth {of['depth']}, growth rate {of['growth_rate']}, batch "
        f"{of['batch_size']}; medians ± half the interquartile range of "
        f"{of['rounds'] * of['steps']} interleaved steps. {machine_line(record)}."
    )


def predict_table(record: Record) -> str:
    """Models down; the error of each mode's predicted peak across."""
    modes = record["settings"]["modes"]
    models = dict.fromkeys(row["model"] for row in record["rows"])
    errors = {
        (row["model"], row["mode"]): f"{100 * (row['predicted'] / row['tracked'] - 1):+.2f} %"
        for row in record["rows"]
        if "tracked" in row
    }
    rows = [(model, *(errors.get((model, mode), "-") for mode in modes)) for model in models]
    return markdown(("predicted peak against tracked", *modes), rows)


def predicted_table(record: Record) -> str:
    """Methods of stepping a large model down; its predicted peak beside the measured one."""
    rows = [
        (
            row["method"],
            f"{row['predicted_bytes']:,}",
            f"{row['peak_bytes']:,}",
            f"{100 * (row['predicted_bytes'] / row['peak_bytes'] - 1):+.3f} %",
        )
        for row in record["rows"]
        if row.get("predicted_bytes") is not None
    ]
    return markdown(("AdamW", "predicted", "measured", "error"), rows) if rows else ""


def predict_caption(record: Record) -> str:
    errors = [
        abs(row["predicted"] / row["tracked"] - 1) for row in record["rows"] if "tracked" in row
    ]
    within = {limit: 100 * sum(e <= limit / 100 for e in errors) / len(errors) for limit in (2, 5)}
    return (
        f"{len(errors)} steps at small sizes, {within[2]:.0f} % of them within 2 % and "
        f"{within[5]:.0f} % within 5 %; the goal is 95 % and all. -: not predicted; the file says "
        f"why. {machine_line(record)}."
    )


def predict_time_table(record: Record) -> str:
    """Techniques down; how far their predicted times are off."""
    columns = ("time over the plain step's", "models", "median error", "worst")
    return markdown(columns, time_errors(record["rows"]))


def predict_time_caption(record: Record) -> str:
    rows = [row for row in record["rows"] if row["technique"] != "as built"]
    errors = list(map(_time_error, rows))
    within = 100 * sum(error <= 0.1 for error in errors) / len(errors)
    return (
        f"{len(rows)} steps at small sizes in one thread, {within:.0f} % of them within 0.1 of the "
        "measured ratio; the processor's time of the shortest step, on a machine that ran other "
        f"work, too. {machine_line(record)}."
    )


def time_errors(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns of each technique how many steps there are, by how much the median of them is off,
    and which of them is off most."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["technique"] != "as built":
            by_name.setdefault(row["technique"], []).append(row)
    found = []
    for name, of_name in by_name.items():
        worst = max(of_name, key=_time_error)
        told = f"{worst['model']}: {worst['predicted']:.2f}x, measured {worst['measured']:.2f}x"
        found.append(
            (name, str(len(of_name)), f"{statistics.median(map(_time_error, of_name)):.2f}", told)
        )
    return found


def _time_error(row: dict[str, Any]) -> float:
    return float(abs(row["predicted"] - row["measured"]))
