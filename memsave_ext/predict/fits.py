"""Finds what makes a training step fit into a budget, and how large its batch can be; also as
``python -m memsave_ext.memory fits MODULE:FUNCTION --budget 24GB``."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..adam.clip_guard import NothingToClip
from ..dry_run.child import Child
from ..fakes.mode import NotPredicted
from ..memory.account import TensorAtPeak
from ..memory.measure import Build
from ..memory.subjects import UsageError, load
from ..remat.offload import Offload, check_offload
from ..shared.budgets import read_budget
from ..shared.checks import check_count, checked_device
from ..shared.progress import Progress
from .batch import FromBatch
from .devices import FitsOnDevices, counts_of, search_devices
from .found import Fit, Fits, lowest
from .predict import (
    NoResult,
    PredictedStep,
    StepRecord,
    check_timeout,
    result_of,
    start,
)
from .ranks import Ranks, Shard, ranks_of
from .techniques import ALL, Techniques, place_elsewhere

_NOTHING_TO_CLIP = "the step clips gradients, or looks at them, and a step in backward leaves none"
_MOST = 1 << 20  # the largest batch that is asked for
_SMALLER_BUDGETS = 3  # that are tried for a remat
_HELP = """
FUNCTION returns a tuple (model, optimizer or None, step), where step, without arguments, makes one
training step. FUNCTION takes no arguments, or a batch size first, which has no default or is named
batch or batch_size; then the largest that fits is found.
Nothing is allocated: FUNCTION and step run on fake tensors.
"""


def fits(
    build: Build | Callable[[int], Any],
    budget: str | int,
    *,
    batch: int | None = None,
    device: torch.device | str = "cuda",
    every: bool = False,
    offload: Offload | None = None,
    devices: int | Sequence[int] | None = None,
    shard: Shard | None = None,
    progress: bool | None = None,
    timeout: float | None = None,
) -> Fits | Any:  # Any: the other class is found only where it is asked for
    """Predicts which techniques make a training step fit into ``budget``, the cheapest first, and
    stops at the first that does.

    The techniques are memsave_ext's: the optimizer stepped in backward, ``remat``, also within the
    budget, checkpointing the model's blocks, its Adam in backward in place of torch's, its 8-bit
    and 4-bit states, for language models of Hugging Face the loss without logits, and last
    weights and states elsewhere: see :func:`memsave_ext.weights_on`. They are applied to what
    ``build`` made, in fakes alone; see :func:`predict` for how exact the peaks are.
    A row whose step fails has the error as its reason.
    On CUDA what fits is what the caching allocator reserves, with what fragmentation costs, for
    which ``remat`` keeps to less where it has to: a simulation of torch's allocator, of one stream,
    as no card is asked. Leave room beside the budget for what the context and libraries take.

    Args:
        build: a function as :func:`predict` takes it; or one of a batch size, of which the largest
            that fits is found for each combination.
        budget: bytes, or a text such as ``"24GB"`` (10^9 bytes each) or ``"22.5GiB"`` (2^30).
        batch: the batch size whose peaks are shown, for a ``build`` that takes one: whose first
            argument has no default, or is named ``batch`` or ``batch_size``. None: its default, or
            1 where it has none.
        device: the device to predict for.
        every: whether what costs more than the first that fits is tried, too.
        offload: as of :func:`remat`, a folder or, on CUDA, ``"cpu"``: techniques that move memory
            there are tried, too. Bytes that lie there and the time of copies, on CUDA at PCIe 4's
            25 GB/s, are told beside the peak.
        devices: how many devices there are, each with a process of the step: a number or several.
            Of a range, such as ``range(1, 65)``, numbers are tried until the smallest that fits is
            found. ``budget`` and ``batch`` are those of one device.
        shard: with ``devices``: ``"fsdp2"`` shards the blocks of the model and the rest by
            ``fully_shard``, ``"ddp"`` wraps it in DistributedDataParallel, with their defaults.
            None where ``build`` does either itself, of any mesh and with any options.
        progress: whether to show on stderr what is tried now, with a bar where tqdm is installed;
            None: where it is a terminal.
        timeout: the most seconds that each prediction may take, as of :func:`predict`.

    Returns:
        :class:`Fits`, or :class:`FitsOnDevices` where ``devices`` is given.

    Raises:
        TypeError, ValueError: an argument, or what ``build`` returned, is not as said above.
        RuntimeError: the step as it is built cannot be predicted; see :func:`predict`.
    """
    limit = read_budget("fits", budget, parts=False).bytes
    if batch is not None:
        check_count("fits: batch", batch, 1)
    check_timeout("fits", timeout)
    chosen = checked_device("fits", device)
    if isinstance(build, nn.Module):
        raise TypeError(
            "fits: build must be a function that returns (model, optimizer or None, step), got a "
            f"model ({type(build).__name__}): each technique is tried with a new model, which "
            "build makes"
        )
    if not callable(build):
        raise TypeError(f"fits: build must be a function, got {type(build).__name__}")
    size = _size(build, batch)
    offload = check_offload("fits", offload, None, True, None)

    def on(ranks: Ranks | None) -> Fits:
        return search(
            build, limit, device=chosen, batch=size, every=every, place=offload, ranks=ranks,
            progress=progress, timeout=timeout,
        )  # fmt: skip

    if devices is None:
        return on(ranks_of("fits", None, shard))
    counts = counts_of(devices)
    ranks = {count: ranks_of("fits", count, shard) for count in counts}
    found, failed = search_devices(counts, lambda count: on(ranks[count]), every)
    return FitsOnDevices(found, limit, shard, failed)


def search(
    build: Any,
    budget: int,
    *,
    device: torch.device,
    batch: int | None = None,
    every: bool = False,
    among: Sequence[Techniques] = ALL,
    refused: str = "",
    method: str = "forward",
    place: Offload | None = None,
    others: int = 0,
    ranks: Ranks | None = None,
    progress: bool | None = None,
    timeout: float | None = None,
) -> Fits:
    """As :func:`fits`, of checked arguments.

    Args:
        batch: None where ``build`` takes none.
        among: what is tried.
        refused: why no optimizer may step in backward; empty where it may.
        method, place: as of :meth:`Techniques.apply`. Without a place, what needs one is left out
            where it is not all that is to be tried.
        others: the least that other models take.
        ranks: the processes of which the step is one; None for a step of one process.
    """
    if place is None and len(among) > 1:
        among = [techniques for techniques in among if not techniques.offload]
    rows, tops, skipped = [], {}, False
    to = None if place is None else os.fspath(place)
    if len(among) > 1 and ranks is not None:
        among = [techniques for techniques in among if not techniques.keeps_elsewhere]
    has_place = place_elsewhere(device.type == "cuda", place) is not None
    instead = {t: t.for_loops_that_clip() if has_place else None for t in among}
    tried = [instead[t] if refused and t.steps_in_backward else t for t in among]
    with (
        Progress("fits", len(among), progress) as shown,
        _Predictions(
            build,
            budget,
            device,
            method,
            place,
            timeout,
            batch,
            [*filter(None, tried)],
            others,
            ranks,
        ) as predictions,
    ):

        def add(techniques: Techniques) -> _Tried:
            made = _row(techniques, predictions, budget, batch)
            tops[techniques.name] = made.top
            # Most models have no such head.
            if made.row.peak is not None or not techniques.loss_head or len(among) == 1:
                rows.append(made.row)
            elif techniques == Techniques(loss_head=True):
                predictions.leave_out_heads()
            return made

        for techniques in among:
            shown.next(techniques.name)
            if predictions.leaves_out(techniques):
                continue
            if refused and techniques.steps_in_backward:
                made = _Tried(Fit(*techniques.row, reason=refused), leaves_nothing_to_clip=True)
                rows.append(made.row)
            else:
                made = add(techniques)
            other = instead[techniques] if made.leaves_nothing_to_clip else None
            if other is not None:
                made = add(other)
            if made.row.fits and not every:
                skipped = techniques is not among[-1]
                break
    count = None if ranks is None else ranks.count
    if not any(row.peak is not None for row in rows):  # the only one that was tried does not apply
        return Fits(rows, budget, str(device), batch, [], [], to, devices=count)
    top = tops[lowest(rows).name]
    others = predictions.others
    return Fits(
        rows, budget, str(device), batch, top.largest, top.hints, to, others, count, skipped
    )


def evaluation_peak(
    build: FromBatch,
    budget: int,
    techniques: Techniques,
    *,
    device: torch.device,
    method: str,
    place: Offload | None,
    others: int,
    ranks: Ranks | None,
    timeout: float | None,
) -> int | None:
    """Returns what an evaluation of the batch needs after a step; None where that is not known.

    Args:
        techniques: that the step has.
        method, place: as of :meth:`Techniques.apply`.
        others: the least that other models take.
        ranks: as of :func:`search`.
    """
    with _Predictions(
        build, budget, device, method, place, timeout, None, (), others, ranks
    ) as predictions:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a row of the search has had them
                return predictions.needed(predictions.of_evaluation(techniques))
        except Exception:  # a model may do anything in eval mode
            return None


class _Predictions:
    """Predicts techniques, the next ones at the same time as one that is asked for. The first one
    runs alone: the others know from it what operators do.

    Args:
        batch: the size that is asked for first; None where ``build`` takes none.
        order: in which techniques are asked for.

    Attributes:
        others: the bytes that other models take, as far as they are known.
        as_built: seconds that the step takes as it is built; 0 where that was not predicted.
    """

    def __init__(
        self,
        build: Any,
        budget: int,
        device: torch.device,
        method: str,
        place: Offload | None,
        timeout: float | None,
        batch: int | None,
        order: Sequence[Techniques],
        others: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._build, self._budget, self._device = build, budget, device
        self.others, self.as_built = others, 0.0
        self._method, self._place, self._timeout = method, place, timeout
        self._batch, self._ranks = batch, ranks
        self._waiting = list(order)
        self._running: dict[Techniques, Child[StepRecord]] = {}
        self._remat_budgets: dict[tuple[Techniques, int | None], int] = {}
        self._at_once, self._most_at_once = 1, _free_cores()  # those that run load them, too
        self._heads = True

    def __enter__(self) -> _Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._running.values():
            child.stop()

    def leave_out_heads(self) -> None:
        """From now on, as what does not apply alone does not apply with other means."""
        self._heads = False
        self._waiting = [each for each in self._waiting if not each.loss_head]

    def leaves_out(self, techniques: Techniques) -> bool:
        return techniques.loss_head and not self._heads

    def first(self, techniques: Techniques) -> PredictedStep:
        """Predicts a step of the batch that is asked for first."""
        if techniques not in self._running:
            if techniques in self._waiting:
                self._waiting.remove(techniques)
            self._running[techniques] = self._start(techniques, self._batch)
        while self._waiting and len(self._running) < self._at_once:
            try:
                self._running[self._waiting[0]] = self._start(self._waiting[0], self._batch)
            except RuntimeError:  # no more processes can be made now: it is not this one's error
                self._most_at_once = max(len(self._running), 1)
                break
            del self._waiting[0]
        self._at_once = self._most_at_once
        known = self.others
        step = self._result(self._running.pop(techniques))
        if techniques.within_budget and self.others > known:  # which it left no room for
            return self.of_batch(techniques, self._batch)
        return self._within(techniques, self._batch, step)

    def of_batch(self, techniques: Techniques, size: int | None) -> PredictedStep:
        return self._within(techniques, size, self._result(self._start(techniques, size)))

    def of_evaluation(self, techniques: Techniques) -> PredictedStep:
        """Predicts an evaluation after a step."""
        return self._result(self._start(techniques, None, evaluates=True))

    def peak(self, step: PredictedStep) -> int:
        """Returns a step's peak, with what other models take."""
        return step.peak - step.others + self.others

    def needed(self, step: PredictedStep) -> int:
        """Returns the same of what has to be within the budget: on CUDA, what is reserved."""
        most = step.peak if step.reserved is None else step.reserved
        return most - step.others + self.others

    def remat_budget(self, techniques: Techniques) -> int | None:
        """Returns a smaller budget for the remat of these techniques, where one was found."""
        return self._remat_budgets.get((techniques, self._batch))

    def _within(
        self, techniques: Techniques, size: int | None, step: PredictedStep
    ) -> PredictedStep:
        """Returns the step, or one whose remat has a smaller budget, where it keeps to the budget
        and reserves more than that."""
        given, tried = self._budget, step
        for _ in range(_SMALLER_BUDGETS if techniques.within_budget else 0):
            over = self.needed(tried) - self._budget
            if over <= 0:
                return tried
            given -= max(over, self._budget // 25)
            if given <= 0 or self.peak(tried) > 1.02 * self._budget:  # its minimum is more
                break
            self._remat_budgets[techniques, size] = given
            tried = self._result(self._start(techniques, size))
        if self.needed(tried) <= self._budget:
            return tried
        self._remat_budgets.pop((techniques, size), None)
        return step

    def _start(
        self, techniques: Techniques, size: int | None, *, evaluates: bool = False
    ) -> Child[StepRecord]:
        made = self._build if size is None else functools.partial(self._build, size)
        uses = made if isinstance(made, FromBatch) else None
        budget = self._remat_budgets.get((techniques, size), self._budget)
        budget = max(budget - self.others, 1)
        if self._ranks is not None:
            made = self._ranks.before(made)
        made = techniques.applied(made, budget, self._method, self._place)
        if self._ranks is not None:
            made = self._ranks.after(made)
        return start(
            made, self._device, uses=uses, ranks=self._ranks, evaluates=evaluates,
            timeout=self._timeout,
        )  # fmt: skip

    def _result(self, child: Child[StepRecord]) -> PredictedStep:
        with warnings.catch_warnings():
            # That it cannot keep to the budget is what the row says.
            warnings.filterwarnings("ignore", "remat: the budget of")
            step = PredictedStep(result_of(child), self._device)
        self.others = max(self.others, step.others)
        return step


def _free_cores() -> int:
    """Returns how many predictions may run at once, at least one: as many as this process has cores
    on which nothing else runs, and no more than its container's limit of time lets run."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux, where the first prediction says so
        return 1
    free = len(os.sched_getaffinity(0)) - round(os.getloadavg()[0])
    with suppress(OSError, ValueError):  # no such group, or no limit: "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        free = min(free, round(int(quota) / int(period)))
    return max(free, 1)


class _Top(NamedTuple):
    largest: list[TensorAtPeak]
    hints: list[str]


class _Tried(NamedTuple):
    """What came of techniques."""

    row: Fit
    top: _Top = _Top([], [])
    leaves_nothing_to_clip: bool = False  # to a loop that clips, or that may


def _row(
    techniques: Techniques, predictions: _Predictions, budget: int, batch: int | None
) -> _Tried:
    try:
        step = predictions.first(techniques)
        peak, needed, largest = predictions.peak(step), predictions.needed(step), None
        if techniques == ALL[0]:
            predictions.as_built = step.seconds
        if batch is not None:
            straight = not techniques.within_budget
            other = functools.partial(_needed, predictions, techniques)
            with suppress(RuntimeError):  # of a process that was killed, for example
                largest = _largest(other, budget, batch, needed, straight)
    except Exception as error:  # the user's step may raise anything once something is changed
        if techniques == ALL[0]:
            raise
        if isinstance(error, NothingToClip):
            row = Fit(*techniques.row, reason=_NOTHING_TO_CLIP)
            return _Tried(row, leaves_nothing_to_clip=True)
        is_unpredicted = isinstance(error, NotPredicted)
        row = Fit(*techniques.row, reason=_reason(error), is_unpredicted=is_unpredicted)
        return _Tried(row)
    # A disk, or the bus to gradients and states, is not asked how fast it is.
    is_known = predictions.as_built and not techniques.keeps_elsewhere
    row = Fit(
        *techniques.row, peak, step.at_peak, needed <= budget, largest,
        moved=step.most_moved or None, bus_seconds=step.bus_seconds or None,
        reserved=None if step.reserved is None else needed,
        remat_budget=predictions.remat_budget(techniques),
        time=step.seconds / predictions.as_built if is_known else None,
    )  # fmt: skip
    return _Tried(row, _Top(step.top(3), step.remedies()))


def _needed(predictions: _Predictions, techniques: Techniques, size: int) -> int | None:
    """Returns what a batch needs that nobody has asked for; None where its step fails, as that of
    a batch norm with a batch of 1."""
    try:
        return predictions.needed(predictions.of_batch(techniques, size))
    except NoResult:
        raise  # of the process, not of this batch
    except Exception:  # the user's step may raise anything
        return None


def _reason(error: Exception) -> str:
    """Returns the first line of an error, with its class where it is not ours."""
    text = str(error).partition("\n")[0]
    if not isinstance(error, (ValueError, RuntimeError)):
        text = f"the step raises {type(error).__name__}: {text}".rstrip(": ")
    return textwrap.shorten(text, 480, placeholder=" ...")


def _largest(
    peak: Callable[[int], int | None], budget: int, batch: int, its_peak: int, straight: bool
) -> int | None:
    """Returns the largest batch whose peak is within ``budget``, 0 for none; None where none was
    found, but it is not known of all.

    Args:
        peak: of a batch; None where it is not known. Smaller batches than one that was asked for
            are then left out, and larger ones are taken to need too much.
        straight: whether peaks grow nearly linearly with the batch, which those of a step that
            keeps to the budget do only where it cannot.
    """
    known = {batch: its_peak}
    low, high = (batch, _MOST + 1) if its_peak <= budget else (0, batch)
    found: int | None = low
    for attempt in range(64):
        if high - low <= 1:
            break
        line = _where_a_line_meets(known, budget, low, high, straight)
        if not low and 1 not in known:
            size = 1  # often it is none, and a line needs another size
        elif high > _MOST:
            size = min(4 * low if line is None else line, _MOST)
        else:
            size = (low + high) // 2 if line is None or attempt % 3 == 2 else line
        needed = peak(size)
        if needed is not None:
            known[size] = needed
            if needed <= budget:
                found = low = size
            else:
                high = size
        elif size > batch:
            high = size
        else:
            low, found = size, found or None
    return found


def _where_a_line_meets(
    known: dict[int, int], budget: int, low: int, high: int, straight: bool
) -> int | None:
    """Returns the size, above ``low`` and below ``high``, at which a line through two known peaks
    meets the budget; None where there is none, as where two sizes need the same."""
    near = sorted(known, key=lambda size: abs(known[size] - budget))
    over = sorted(size for size in known if known[size] > budget)
    around = [size for size in (low, high) if size in known]
    for pair in (near[:2], around) if straight else (over[:2],):
        if len(pair) < 2 or known[min(pair)] >= known[max(pair)]:
            continue
        a, b = sorted(pair)
        size = a + (budget - known[a]) * (b - a) // (known[b] - known[a])
        if low <= size < high:
            return max(size, low + 1)
    return None


def _size(build: Callable[..., Any], batch: int | None) -> int | None:
    """Returns the batch size to predict; None where ``build`` is called without one.

    Raises:
        ValueError: a batch was asked for, and ``build`` takes none.
    """
    try:
        parameters = list(inspect.signature(build).parameters.values())
    except ValueError:  # it has no signature that Python knows
        parameters = []
    first = parameters[0] if parameters else None
    if first is not None and first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        first = None
    if first is not None and first.default is first.empty:
        return 1 if batch is None else batch
    if first is not None and first.name in ("batch", "batch_size"):
        is_size = type(first.default) is int and first.default > 0
        return (first.default if is_size else None) if batch is None else batch
    if batch is not None:
        raise ValueError(
            f"fits: batch={batch} was given, but build takes no batch size: its first argument "
            "must have no default, or be named batch or batch_size"
        )
    return None


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program} fits",
        description="Predict what makes a training step fit into a budget of memory.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="the function that builds the training step, such as train:build",
    )
    parser.add_argument(
        "--budget",
        required=True,
        metavar="SIZE",
        help="the memory that the step may use, such as 24GB or 22.5GiB",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="the batch size of the table's peaks, if FUNCTION takes one (default: that of "
        "FUNCTION, or 1)",
    )
    parser.add_argument(
        "--device",
        default="cuda",
        metavar="NAME",
        help="the device to predict for, cuda (default) or cpu",
    )
    parser.add_argument(
        "--every",
        action="store_true",
        help="also try techniques that cost more than the cheapest that fits",
    )
    parser.add_argument(
        "--offload",
        metavar="PLACE",
        help="also try techniques that move memory: to files in this folder or, from a CUDA "
        "device, to the host's memory (cpu)",
    )
    parser.add_argument(
        "--devices",
        type=_devices,
        metavar="N",
        help="how many devices there are, such as 8, 1-64 (find the smallest) or 1,2,4",
    )
    parser.add_argument(
        "--shard",
        choices=["ddp", "fsdp2"],
        help="with --devices: what wraps the model, if FUNCTION does not",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser


def _devices(text: str) -> Sequence[int]:
    first, dash, last = text.partition("-")
    if dash:
        least, most = sorted((int(first), int(last)))
        return range(least, most + 1)
    return [int(part) for part in text.split(",")]


_devices.__name__ = "number of devices"  # argparse's messages show it


def run_command(options: argparse.Namespace) -> int:
    """Prints what fits; returns the exit status, 1 if nothing does.

    Raises:
        UsageError: an argument, or what the function returned, is wrong.
    """
    build: Any = load(options.function, "MODULE:FUNCTION")
    try:
        found = fits(
            build,
            options.budget,
            batch=options.batch,
            device=options.device,
            every=options.every,
            offload=options.offload,
            devices=options.devices,
            shard=options.shard,
        )
    except (TypeError, ValueError) as error:
        if not str(error).startswith(("fits:", "predict:")):
            raise
        raise UsageError(str(error)) from None
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        print(found.report())
    return 0 if found.cheapest else 1
