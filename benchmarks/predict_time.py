"""How far the predicted time of a technique's step is off the measured one: both over the plain
step's, as memory.fits() shows it.

Each model of predict.py takes its techniques in turns, in one process and one thread. Of each the
shortest step counts, in the processor's time: what else runs on a machine can only make it longer.
There are sixteen images to a step: of fewer, on one thread alone, torch does not give convolutions
with one element to oneDNN, and those of the smallest images take ten times as long. Malloc keeps
what is freed: which steps would have to take pages anew from the system depends on what else the
process has.

    python benchmarks/predict_time.py --every 1 --save benchmarks/results    # all: fifteen minutes
"""

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

import memsave_ext as ms
from batch_norm import set_memory
from memsave_ext.predict.techniques import Techniques
from memsave_ext.shared.table import print_table
from predict import cases
from shared.common import Rows, balanced_order, machine, parser_of, settings_of, write_record
from tables.memory import time_errors

PLAIN = Techniques()
TECHNIQUES = (
    Techniques(optimizer_in_backward=True),
    Techniques(adam_in_backward=True),
    Techniques(loss_head=True),
    Techniques(remat=True),
    Techniques(within_budget=True),
    Techniques(checkpoint=True),
    Techniques(checkpoint=True, adam_in_backward=True),
    Techniques(adam_in_backward=True, state_dtype="8bit"),
    Techniques(checkpoint=True, adam_in_backward=True, state_dtype="4bit"),
)
IMAGES = 16
WARM_UP = 4  # remat without a budget follows its plan from the third step on


def compare(build: Callable[[], Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    plain = ms.memory.predict(build)
    budget = int(options.budget * plain.peak)
    steps: dict[Techniques, Callable[[], object]] = {}
    predicted: dict[Techniques, float] = {PLAIN: plain.seconds}
    with ExitStack() as undo:
        steps[PLAIN] = build()[2]
        for techniques in TECHNIQUES:
            try:
                predicted[techniques] = ms.memory.predict(techniques.applied(build, budget)).seconds
                model, optimizer, step = build()
                techniques.apply(model, optimizer, undo, budget)
            except (ValueError, RuntimeError):  # it does not apply
                predicted.pop(techniques, None)
                continue
            steps[techniques] = step
        gc.collect()
        named = {techniques.name: step for techniques, step in steps.items()}
        measured = timed(named, options.rounds)
    return [
        {
            "technique": techniques.name,
            "predicted": predicted[techniques] / predicted[PLAIN],
            "measured": min(measured[techniques.name]) / min(measured[PLAIN.name]),
            "seconds": min(measured[techniques.name]),
        }
        for techniques in steps
    ]


def timed(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the processor's seconds of each round's steps: other work makes them longer only."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        for name in balanced_order(list(steps), number):
            begin = time.process_time()
            steps[name]()
            if number >= WARM_UP:
                seconds[name].append(time.process_time() - begin)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only models named like this")
    parser.add_argument("--every", type=int, default=7, help="of so many models one is taken")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each technique")
    parser.add_argument("--budget", type=float, default=0.7, help="of the plain step's peak")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    set_memory("reused")
    warnings.filterwarnings("ignore", "remat: the budget of")
    settings = settings_of(options, "only", "every", "rounds", "budget", "threads")
    record: dict[str, Any] = {"machine": machine(), "settings": settings}
    rows = Rows(options.save, "predict_time", record)
    for number, (name, build) in enumerate(cases(IMAGES)):
        if options.only in name and number % options.every == 0:
            torch.manual_seed(0)
            for row in compare(build, options):
                rows.append({"model": name, **row})
    columns = ["technique", "steps", "median error", "worst"]
    print_table("", columns, time_errors(rows))
    print(write_record(options.save, "predict_time", {**record, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
