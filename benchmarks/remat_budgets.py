"""Budgets of remat: peaks that were promised beside those that were measured, over many models.

Each row is a model, a way to call it and a budget, a share of the activations of the plain step. A
new process trains the model for ten steps with torch's AdamW, whose states are made in the first
one. The peaks of steps 1, 2 and 10 are counted from the allocations and frees that torch's profiler
reports, and not by this package. What was promised is the larger of the budget, which is computed
from the plain step's peak, and of the least that the package told. Times are those of steps after
that, without the profiler, in turns with plain ones. A last row of each model has the memory of
torch's checkpoint around every block as its budget, and the time of that beside its own.

    python benchmarks/remat_budgets.py --every 1 --save benchmarks/results  # an hour
    python benchmarks/remat_budgets.py --every 1 --ways block --no-times --no-checkpoint
"""

import argparse
import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import memsave_ext as ms
from shared.budget_models import (
    BLOCK,
    NAMES,
    OWN,
    WAYS,
    WITHOUT_LIBRARIES,
    Subject,
    build,
    checkpoint_blocks,
)
from shared.common import (
    Rows,
    figure,
    interleave,
    machine,
    median_and_spread,
    parser_of,
    show_bars,
    write_record,
)

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
STEPS = (1, 2, 10)
PROMISED, EXCEPTIONS = 1.02, 1.05
CHECKPOINT = "checkpoint"
Row = dict[str, Any]
Case = tuple[str, str, float | None]  # a model, a way to call it, a share


class Training:
    """A model that is trained, in a block or plain."""

    def __init__(self, subject: Subject, way: str, budget: int | float | None) -> None:
        self.model, self.loss = subject.model, subject.loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.budget, self.in_block = budget, way == BLOCK
        self.told: Any = None  # the block or handle that knows of the latest step
        if budget is not None and not self.in_block:
            self.told = ms.remat_module(self.model, budget=budget, optimizer=self.optimizer)

    def run(self) -> None:
        """Forward and backward."""
        with self._block():
            loss = self.loss()
        loss.backward()

    def _block(self) -> AbstractContextManager[Any]:
        if self.budget is None or not self.in_block:
            return contextlib.nullcontext()
        self.told = ms.remat(self.model, budget=self.budget, optimizer=self.optimizer)
        return self.told

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def before(self) -> int:
        """Bytes of parameters, buffers, gradients and states."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def missing(self) -> int:
        """Bytes of gradients that backward will make."""
        params = [p for p in self.model.parameters() if p.requires_grad and p.grad is None]
        return sum(p.nbytes for p in params)

    def measure(self) -> tuple[int, int]:
        """What lived before a step, and the step's peak, which includes it."""
        gc.collect()
        before = self.before()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            self.run()
        events = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
        memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        memory.sort(key=lambda event: event[0])
        changes = [change for _, change in memory]
        return before, before + max(itertools.accumulate(changes), default=0)


def plain_step(name: str, way: str, checkpointed: bool) -> Row | None:
    """What the plain step needs, or one with torch's checkpoints; None: there is no block."""
    subject = build(name, way)
    if checkpointed and checkpoint_blocks(subject.model) == 0:
        return None
    training = Training(subject, way, None)
    missing = training.missing()
    row: Row = {"missing": missing}
    for number in (1, 2):
        row[f"before_{number}"], row[f"peak_{number}"] = training.measure()
        training.step()
    return row


def budget_of(plain: Row, share: float, number: int) -> int:
    """In bytes, with the states of the first step or of later ones."""
    before, peak = plain[f"before_{number}"], plain[f"peak_{number}"]
    return int(before + plain["missing"] + share * (peak - before))


def budgeted_steps(name: str, way: str, budget: int | float) -> Row:
    training = Training(build(name, way), way, budget)
    with ms.remat():  # the first block measures copies of a few MiB, more than a tiny model takes
        pass
    row: Row = {}
    for number in range(1, STEPS[-1] + 1):
        if number in STEPS:
            before, row[f"peak_{number}"] = training.measure()
            row[f"before_{number}"] = before
            row[f"budget_{number}"] = training.told.budget
            row[f"least_{number}"] = training.told.least
        else:
            training.run()
        training.step()
    return row


def times(name: str, way: str, budget: int | float, rounds: int, also: bool) -> Row:
    """Seconds of steps that take turns: plain, in the budget, and torch's checkpoints."""
    trainings = {
        "plain": Training(build(name, way), way, None),
        "remat": Training(build(name, way), way, budget),
    }
    if also:
        subject = build(name, way)
        checkpoint_blocks(subject.model)
        trainings[CHECKPOINT] = Training(subject, way, None)

    def step(training: Training) -> None:
        training.run()
        training.optimizer.zero_grad()

    for training in trainings.values():
        for _ in range(3):
            training.run()
            training.step()
    runs = {key: lambda t=t: step(t) for key, t in trainings.items()}
    seconds = interleave(runs, rounds, 2, False)
    row: Row = {"step_ms": median_and_spread(seconds["plain"])[0] * 1e3}
    for key in list(seconds)[1:]:
        ratios = [a / b for a, b in zip(seconds[key], seconds["plain"], strict=True)]
        row["time" if key == "remat" else f"time_{key}"] = statistics.median(ratios)
    return row


def _answer(sender: Any, threads: int, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    gc.freeze()  # to look through all that has been imported takes longer than a tiny model's steps
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler writes a line at each start and end
    warnings.simplefilter("ignore")  # of a budget that is less than the least
    try:
        sender.send((job(*args), None))
    except BaseException as error:  # pytest's Skipped, for one, where a library is not there
        sender.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Failed(Exception):
    pass


def in_new_process(libraries: bool, threads: int, job: Callable[..., Any], *args: Any) -> Any:
    """Runs a job where torch and, on demand, libraries are imported and nothing else has happened.

    Raises:
        Failed: the job did.
    """
    context = multiprocessing.get_context("forkserver")
    imported = "shared.budget_libraries" if libraries else "shared.budget_models"
    context.set_forkserver_preload([imported])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, threads, job, args))
    # Before Python 3.12 the process that all are forked from has no other way to be told sys.path.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        result, error = None, "the process died"
    process.join()
    if error is not None:
        raise Failed(error)
    return result


def with_promises(row: Row, plain: Row) -> Row:
    """Adds each peak over what was promised, and the package's budget over what it should be."""
    for number in STEPS:
        due = row["budget"] if row["in_bytes"] else budget_of(plain, row["share"], min(number, 2))
        if number == 1 and not row["least_1"]:  # as the next step tells, without the states
            row["planned"] = False
            row["least_1"] = (row["least_2"] or 0) - (row["before_2"] - row["before_1"])
        row[f"promised_{number}"] = promised = max(due, row[f"least_{number}"] or 0)
        row[f"ratio_{number}"] = row[f"peak_{number}"] / promised
        if told := row.pop(f"budget_{number}"):
            row["told"] = max(row.get("told", 1.0), told / due, key=lambda r: abs(r - 1))
    return row


def cases(options: argparse.Namespace) -> list[Case]:
    """In order; every n-th of a random order, where there are to be fewer."""
    budgets: list[float | None] = [*options.budgets, *([None] if options.checkpoint else [])]
    found = list(itertools.product(options.only, options.ways, budgets))
    order = list(range(len(found)))
    random.Random(0).shuffle(order)
    return [found[i] for i in sorted(order[:: options.every])]


class Measurements:
    """Of one case after the other; a plain step is measured once for all budgets."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._plain = functools.cache(self._plain_step)

    def _plain_step(self, name: str, way: str) -> Row:
        return self._run(plain_step, name, way, False)

    def _run(self, job: Callable[..., Any], *args: Any) -> Any:
        libraries = bool({*self._options.only} - {*OWN, *WITHOUT_LIBRARIES})
        return in_new_process(libraries, self._options.threads, job, *args)

    def row(self, name: str, way: str, share: float | None) -> Row | None:
        """``share``: None for as much as torch's checkpoints take; there are not any in all."""
        row: Row = {"model": name, "way": way, "share": share}
        try:
            return self._row(row, name, way, share)
        except Failed as failed:
            return row | {"error": str(failed)}

    def _row(self, row: Row, name: str, way: str, share: float | None) -> Row | None:
        plain = self._plain(name, way)
        if share is None:
            checkpointed = self._run(plain_step, name, way, True)
            if checkpointed is None:
                return None
            budget: int | float = checkpointed["peak_2"]
        else:
            budget = budget_of(plain, share, 2) if self._options.bytes else share
        row |= {"budget": budget, "in_bytes": isinstance(budget, int), "planned": True}
        row |= {"plain": plain["peak_2"], **self._run(budgeted_steps, name, way, budget)}
        row = with_promises(row, plain)
        if self._options.times:
            row |= self._run(times, name, way, budget, self._options.rounds, share is None)
        return row


def line_of(row: Row) -> str:
    share = "ckpt" if row["share"] is None else f"{row['share']:.2f}"
    head = f"{row['model']:20} {row['way']:21} {share}"
    if "error" in row:
        return f"{head} {row['error'].splitlines()[0]}"
    ratios = " ".join(f"{row[f'ratio_{number}']:6.3f}" for number in STEPS)
    text = f"{head} least {(row['least_2'] or 0) / row['plain']:.2f}  {ratios}"
    text += "" if row["planned"] else "  first unplanned"
    if abs(row.get("told", 1.0) - 1) > 0.01:
        text += f"  told {row['told']:.3f}"
    for key in ("time", f"time_{CHECKPOINT}"):
        text += f"  {key} {row[key]:.3f}" if key in row else ""
    return text


def bars(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Shares of rows that kept to it, at least; and the worst ratios, at most."""
    good = [row for row in rows if "error" not in row]
    shares, worst = [], []
    for number in STEPS if good else ():
        ratios = [row[f"ratio_{number}"] for row in good]
        kept = sum(ratio <= PROMISED for ratio in ratios) / len(ratios)
        name = f"step {number}, within {PROMISED} of what was promised"
        shares.append(figure(name, kept, 0.95 if number == 1 else 1.0, at_least=True))
        most = EXCEPTIONS if number == 1 else PROMISED
        worst.append(figure(f"step {number}", max(ratios), most))
    for row in good:
        if f"time_{CHECKPOINT}" not in row:
            continue
        value = row["time"] / row[f"time_{CHECKPOINT}"]
        name = f"{row['model']}: time over that of checkpoints with the same memory"
        worst.append(figure(name, value, 1.0))
    return shares, worst


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="MODEL", default=[*NAMES])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--budgets", nargs="+", type=float, metavar="SHARE", default=[*SHARES])
    parser.add_argument("--every", type=int, default=20, metavar="N", help="only every Nth row")
    parser.add_argument("--bytes", action="store_true", help="give budgets as bytes, not as shares")
    parser.add_argument("--rounds", type=int, default=8, help="of times")
    parser.add_argument("--no-times", dest="times", action="store_false")
    parser.add_argument("--no-checkpoint", dest="checkpoint", action="store_false")
    parser.add_argument("--quick", action="store_true", help="one model, budget and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    if options.quick:
        options.only, options.budgets, options.rounds = [*WITHOUT_LIBRARIES], [0.6], 1
        options.every = 1
    settings = {k: v for k, v in vars(options).items() if k not in ("quick", "save", "progress")}
    record: Row = {"machine": machine(), "settings": settings}
    rows = Rows(options.save, "remat_budgets", record, line=line_of)
    measurements = Measurements(options)
    for case in cases(options):
        if (row := measurements.row(*case)) is not None:
            rows.append(row)
    shares, worst = bars(rows)
    show_bars(shares)
    show_bars(worst, digits=3)
    record |= {"rows": rows, "bars": [*shares, *worst]}
    print(write_record(options.save, "remat_budgets", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
