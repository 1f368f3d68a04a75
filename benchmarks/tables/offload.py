"""The tables of what is moved elsewhere: measured, and simulated."""

from tables import Record, machine_line, markdown

METHODS = {
    "remat": "remat alone, at its least",
    "remat, offload": "remat, offload",
    "every tensor to a file": "hooks, every tensor to a file",
    "save_on_cpu": "torch's save_on_cpu (copies nothing on a CPU)",
    "ms.checkpoint(offload)": "ms.checkpoint(offload), each block (as without)",
    "checkpoint": "torch's checkpoint, each block",
}


def offload_table(record: Record) -> str:
    """Models one below the other, methods down."""
    rows = []
    for model in record["models"]:
        of = {row["method"]: row for row in model["rows"]}
        for method, row in of.items():
            if method == "plain":
                continue
            rows.append(
                (
                    model["model"],
                    METHODS[method],
                    f"{row['memory']:.2f}",
                    f"{row['time']:.2f}",
                    f"{row['processor']:.2f}",
                    f"{row['waited_ms'] / of['plain']['step_ms']:.2f}",
                    f"{row['moved'] / of['plain']['bytes']:.2f}",
                )
            )
    columns = ("", "", "activations", "time", "processor", "waited", "moved")
    return markdown(columns, rows)


def offload_caption(record: Record) -> str:
    settings, load = record["settings"], record["load"][0]
    return (
        f"Budget {settings['share']} of the activations, files in the page cache. Activations at "
        "the peak, time of a step, processor time of all threads, time for which the step waited "
        "for copies, and bytes moved, as shares of the plain step's time and activations (medians "
        f"of {settings['rounds']} rounds in turns, on a machine with a load of {load}). "
        f"{machine_line(record)}."
    )


def simulated_table(record: Record) -> str:
    """Cards and widths down; for each share the overheads of the three ways."""
    shares = record["settings"]["shares"]
    ways = ("recompute", "move", "both")
    found = {(r["card"], r["width"], r["share"]): r for r in record["rows"]}
    rows = []
    for card, width in dict.fromkeys((card, width) for card, width, _ in found):
        cells = []
        for share in shares:
            row = found[card, width, share]
            cells += ["-" if row[way] is None else f"{100 * row[way]:.1f} %" for way in ways]
        rows.append((card, str(width), *cells))
    columns = [f"{way}, {share}" for share in shares for way in ways]
    return markdown(("card", "width", *columns), rows)


def simulated_caption(record: Record) -> str:
    settings = record["settings"]
    flops, memory, bus = record["reached"]
    return (
        "A simulation: no card has run it. Time that recomputing and waiting for copies adds to a "
        f"step of {settings['layers']} blocks of a GPT in bfloat16 on {settings['tokens']} tokens, "
        f"at {' and '.join(map(str, settings['shares']))} of its activations, by recomputing "
        "alone, moving alone and both; -: that does not go so far. Operators on fake tensors take "
        f"{flops} of the arithmetic or {memory} of the memory's rate that the maker names, what is "
        f"longer, and 5 µs; copies take {bus} of the bus's rate each way; a backward takes two "
        f"forwards. {_cards(record)}. Planned by the planner that remat runs with."
    )


def elsewhere_table(record: Record) -> str:
    """Cards, models and formats of states down."""
    rows = []
    for row in record["rows"]:
        rows.append(
            (
                row["card"],
                row["model"],
                row["states"],
                f"{row['host_bytes'] / 2**30:.0f} GiB",
                f"{row['arithmetic']:.1f} s",
                f"{row['step']:.1f} s",
                str(row["sequences"]),
                f"{row['saved_bytes'] / 2**30:.1f} GiB",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['flops'] / 1e12:.0f} TFLOP/s",
            )
        )
    columns = (
        "card", "Llama of", "states", "in the host's memory", "one sequence: arithmetic", "step",
        "copies hidden from", "a block saves then", "tokens/s", "",
    )  # fmt: skip
    return markdown(columns, rows)


def elsewhere_caption(record: Record) -> str:
    flops, memory, bus = record["reached"]
    return (
        "A simulation: no card has run it. Training steps of Llamas in bfloat16 on sequences of "
        f'{record["settings"]["tokens"]} tokens, with `weights_on(model, "cpu")`, Adam in '
        'backward with `states_on="cpu"`, and a checkpoint around each block whose input is moved. '
        "*Copies hidden from*: so many sequences in a step, with which it takes at most 5 % more "
        "than its arithmetic; what follows is with these. TFLOP/s: six for each parameter and "
        f"token. Operators on fake tensors take {flops} of the arithmetic or {memory} of the "
        "memory's rate that the maker names, what is longer, and 5 µs; copies take "
        f"{bus} of the bus's rate each way; a block takes as long as the longest of its "
        f"arithmetic and its copies in and out. {_cards(record)}."
    )


def _cards(record: Record) -> str:
    return "; ".join(
        f"{card['name']}: {card['flops'] / 1e12:.0f} TFLOP/s, {card['memory'] / 1e12:.1f} TB/s, "
        f"{card['bus'] / 1e9:.0f} GB/s each way ({card['source']})"
        for card in record["cards"]
    )
