"""The largest model that trains in a given memory: the deepest ViT and GPT, and the largest batch.

For each budget of bytes and each way to train, the most blocks with a fixed batch, and the largest
batch with a fixed number of blocks, by bisection. Each try makes two steps, the second one with
the optimizer's states there and by the plan of remat's budget. On a CPU a try fits when
the peak of all tensors does; on a GPU the process may take no more than the budget, and a try fits
when it does not run out of memory, with what the allocator of torch itself takes or cannot use.
Then each way trains the deepest model that torch's features allow, in turns, for its time.

    python benchmarks/largest_model.py --save benchmarks/results
    python benchmarks/largest_model.py --device cuda --budget-gb 16 40 80
"""

import argparse
import functools
import gc
import itertools
import statistics
import sys
import warnings
from typing import Any

import torch

from plot import draw
from shared import adam_methods
from shared.adam_methods import IN_BACKWARD
from shared.common import (
    Rows,
    bar,
    figure,
    interleave,
    machine,
    parser_of,
    settings_of,
    show_bars,
    write_record,
)
from shared.largest_ways import (
    COMPILED,
    GPT,
    LOWEST,
    NAIVE,
    OURS,
    THEIRS,
    VIT,
    WAYS,
    Trainer,
    Way,
    parameters,
)
from shared.search import largest
from shared.training import memory_of
from tables import size
from tables.training import largest_model_caption, largest_model_table

Row = dict[str, Any]
STEPS = 2


def steps(kind: str, way: Way, depth: int, batch: int, budget: int, options: Any) -> int:
    """The peak of a few steps in bytes."""
    with memory_of(torch.device(options.device)) as memory:
        trainer = Trainer(kind, way, depth, batch, budget, options)
        try:
            for _ in range(STEPS):
                trainer.step()
        finally:
            trainer.release()
    return int(memory.peak)


def peak_of(
    kind: str, way: Way, depth: int, batch: int, budget: int, options: argparse.Namespace
) -> int | None:
    """None where a GPU's memory did not suffice."""
    try:
        peak: int | None = steps(kind, way, depth, batch, budget, options)
    except torch.OutOfMemoryError:
        peak = None
    # Only now has the exception let go of the model.
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return peak


def search(
    kind: str, name: str, of: str, budget: int, first: int, options: argparse.Namespace
) -> Row:
    """The largest ``of``, "depth" or "batch", of one way; ``first`` is tried first."""

    def peak(n: int) -> int | None:
        depth, batch = (n, options.batch_size) if of == "depth" else (options.depth, n)
        return peak_of(kind, WAYS[name], depth, batch, budget, options)

    most = {"most": options.most_batch} if of == "batch" else {}
    found = largest(peak, budget, first, **most)
    if of == "depth":
        count = found["largest"]
        found["parameters"] = parameters(kind, options, count) if count else 0
    return found


def add_times(rows: list[Row], options: argparse.Namespace) -> None:
    """Seconds of a step of the deepest model that ``THEIRS`` trains, and times theirs."""
    base = next(row for row in rows if row["method"] == THEIRS)
    depth = base["depth"]["largest"]
    if not depth:
        return
    trainers = {
        row["method"]: Trainer(
            base["model"], WAYS[row["method"]], depth, options.batch_size,
            row["budget_bytes"], options,
        )
        for row in rows
        # Compiling what does not fit takes a minute.
        if row["depth"]["largest"] >= depth
        or (options.device == "cpu" and row["method"] != COMPILED)
    }  # fmt: skip

    def step(trainer: Trainer) -> None:
        trainer.step()
        if options.device == "cuda":
            torch.cuda.synchronize()

    taken = interleave(
        {name: functools.partial(step, trainer) for name, trainer in trainers.items()},
        options.rounds, STEPS, options.progress,
    )  # fmt: skip
    for row in rows:
        if row["method"] not in taken:
            continue
        mine, theirs = taken[row["method"]], taken[THEIRS]
        row["seconds"] = statistics.median(mine)
        row["time"] = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    for trainer in trainers.values():
        trainer.release()


def measure(options: argparse.Namespace, found: Rows) -> list[Row]:
    """The rows; every search is printed and written when it has ended."""
    rows: dict[Any, Row] = {}
    firsts: dict[Any, int] = {}
    names = [name for name in WAYS if options.compiled or name != COMPILED]
    budgets = [
        (kind, round(gb * 1e9))
        for kind, of_kind in ((VIT, options.budget_gb), (GPT, options.gpt_budget_gb))
        for gb in of_kind
    ]
    jobs = list(itertools.product(budgets, names, ("depth", "batch")))
    gc.collect()
    gc.freeze()  # what is there already need not be looked through after every try
    for (kind, budget), name, of in bar(jobs, show=options.progress):
        if options.device == "cuda":
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(budget / whole)
        place = {"model": kind, "method": name, "budget_bytes": budget}
        row = rows.setdefault((kind, budget, name), place)
        # The way before is the best guess.
        start = options.depth if of == "depth" else options.batch_size
        first = firsts.get((kind, budget, of)) or start
        row[of] = search(kind, name, of, budget, first, options)
        firsts[kind, budget, of] = row[of]["largest"]
        of_search = {"model": kind, "method": name, "budget_bytes": budget, "searched": of}
        found.append(of_search | row[of])
    gc.unfreeze()
    for kind, budget in budgets:
        add_times([row for key, row in rows.items() if key[:2] == (kind, budget)], options)
    return list(rows.values())


# How much larger than with torch's features together, at no more than their time.
GOALS = {VIT: 1.0, GPT: 1.5}
GOAL_OF_FORMATS = 8.0  # over naive


def bars(rows: list[Row], most_batch: int) -> list[Row]:
    """Over what torch itself offers, at float32 and exact arithmetic."""
    found = []
    of = {(row["model"], row["budget_bytes"], row["method"]): row for row in rows}
    for (kind, budget, name), row in of.items():
        if name != OURS:
            continue
        for other, what in itertools.product((NAIVE, THEIRS), ("depth", "batch")):
            theirs, ours = of[kind, budget, other][what]["largest"], row[what]["largest"]
            # Where both searches ended at their limit nothing is known.
            if theirs and not (what == "batch" and theirs == ours == most_batch):
                label = f"{kind}, {size(budget)}: {what} over {other}"
                found.append((label, ours / theirs, GOALS[kind]))
        if "time" in row:
            label = f"{kind}, {size(budget)}: speed of a step over {THEIRS}"
            found.append((label, 1 / row["time"], 1.0))
        if naive := of[kind, budget, NAIVE]["depth"]["largest"]:
            ratio = of[kind, budget, LOWEST]["depth"]["largest"] / naive
            label = f"{kind}, {size(budget)}: depth of {LOWEST} over {NAIVE}"
            found.append((label, ratio, GOAL_OF_FORMATS))
    return [figure(*each, at_least=True) for each in found]


DEFAULTS = {  # of the options: on a CPU, on a GPU
    "budget_gb": ([0.012], [16.0]),
    "gpt_budget_gb": ([0.112], [16.0]),
    "image": (32, 224),
    "patch": (4, 16),
    "width": (64, 1024),
    "heads": (2, 16),
    "depth": (4, 24),
    "batch_size": (8, 8),
    "vocabulary": (32000, 32000),
    "tokens": (16, 1024),
    "most_batch": (256, 4096),  # where the search for it ends
}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for name in ("--budget-gb", "--gpt-budget-gb"):
        parser.add_argument(name, type=float, nargs="*", help="GB, of the ViT and of the GPT")
    for name, (on_cpu, on_gpu) in itertools.islice(DEFAULTS.items(), 2, None):
        text = f"default {on_cpu}" + (f", on a GPU {on_gpu}" if on_gpu != on_cpu else "")
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    parser.add_argument("--rounds", type=int, default=5, help="steps that are timed")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile's budget")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    for name, values in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[on_cuda])
        given = getattr(options, name)
        if not all(n > 0 for n in (given if isinstance(given, list) else [given])):
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    if on_cuda:
        whole = torch.cuda.get_device_properties(0).total_memory / 1e9
        if max(options.budget_gb + options.gpt_budget_gb) > whole:
            parser.error(f"--budget-gb, --gpt-budget-gb: this GPU has {whole:.1f} GB")
    if why := adam_methods.reason(IN_BACKWARD, options.device):
        parser.error(why)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "remat: the budget")  # of tries that do not fit
    record: dict[str, Any] = {
        "machine": machine(options.device),
        "settings": settings_of(options, *DEFAULTS, "threads"),
    }
    rows = measure(options, Rows(options.save, "largest_model", record, "searches"))
    record |= {"rows": rows, "bars": bars(rows, options.most_batch)}
    print(f"\n{largest_model_table(record)}\n\n{largest_model_caption(record)}\n")
    show_bars(record["bars"])
    path = write_record(options.save, "largest_model", record)
    print(f"{path}\n{draw(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
