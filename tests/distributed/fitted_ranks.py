"""What fit() does on ranks: tests import it there."""

import contextlib
import functools
import io
import warnings

import torch
import torch.distributed as dist
from ranks import whole
from sharded_steps import ROWS, WIDTH, network, pauses, sharded, stepped
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms
from memsave_ext.predict.techniques import Techniques
from memsave_ext.remat import ahead

DEPTH = 2


def square(result):
    return result.square().mean()


def wrapped(kind):
    torch.manual_seed(0)
    return DistributedDataParallel(network(DEPTH)) if kind == "ddp" else sharded(depth=DEPTH)


def _steps(model, optimizer, batches):
    losses = []
    for x in batches:
        loss = square(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(kind, technique=None, budget="1GB", rows=ROWS):
    """Trains three steps, with what fit applies; returns what was applied, losses and weights."""
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    batches = [torch.randn(rows, WIDTH) for _ in range(3)]
    fitted = None
    if technique != "plain":
        with warnings.catch_warnings(record=True) as told:
            fitted = ms.fit(
                model, optimizer, batches[0], budget=budget, loss=square, technique=technique
            )
        assert not [one for one in told if "memsave_ext" in str(one.message)]
    losses = _steps(model, optimizer, batches)
    name = None if fitted is None else (fitted.technique, fitted.predicted)
    if fitted is not None:
        fitted.undo()
    return name, losses, whole(model.parameters())


def uneven(unused, technique=None):
    """Trains inside of join() with fewer batches on rank 1: two epochs with what fit applies, and
    one without."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network(DEPTH), find_unused_parameters=unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    batches = [torch.randn(ROWS, WIDTH) for _ in range(_of_rank_1(1, 3))]
    fitted = None if technique is None else _fit(model, optimizer, batches[0], technique=technique)
    losses = []
    for epoch in range(3):
        if epoch == 2 and fitted is not None:
            fitted.undo()
        with model.join():
            losses += _steps(model, optimizer, batches)
    steps = {state["step"].item() for state in optimizer.state.values()}
    return steps, losses, whole(model.parameters())


def least_rows():
    """Rank 1 has twice the batch, and a budget that as built would do for the smaller one."""
    rows = ROWS * (1 + dist.get_rank())
    model = wrapped("fsdp2")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(rows, WIDTH)
    peaks = [None, None]
    dist.all_gather_object(peaks, ms.memory.predict(model, optimizer, x, loss=square).peak)
    return peaks, train("fsdp2", budget=max(peaks) - 1, rows=rows)[0]


def nothing_fits():
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, 4))
    budget = "1KB" if dist.get_rank() else "1GB"
    try:
        ms.fit(model, None, torch.randn(4, WIDTH), budget=budget, loss=square)
    except torch.OutOfMemoryError as error:
        return str(error)


def one_fails():
    class Odd(torch.nn.Module):
        def forward(self, x):
            if dist.get_rank():
                raise KeyError("of rank 1")
            return x

    model = DistributedDataParallel(torch.nn.Sequential(network(), Odd()))
    try:
        ms.fit(model, None, torch.randn(4, WIDTH), budget="1GB", loss=square)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def first_step_planned():
    """Of a step within a budget: what planned it, the first peaks beside the budget, losses."""
    plans, plan = [], ahead._run

    def counted(*args):
        plans.append(plan(*args))
        return plans[-1]

    ahead._run = counted
    try:
        return plans, _steps_within("17.5MB"), _steps_within(None)
    finally:
        ahead._run = plan


def _steps_within(budget):
    x = torch.randn(8 * ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    tracked = ms.memory.track()
    with tracked, pauses():
        model = wrapped("fsdp2")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        handle = None if budget is None else ms.remat_module(model, budget=budget)
        peaks, losses = [], []
        for _ in range(3):
            tracked.reset_peak()
            loss = square(model(x))
            loss.backward()
            peaks.append(tracked.peak - x.nbytes)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if handle is None:
        return peaks, losses
    return peaks, losses, handle.figures().recomputed_operators, " ".join(handle.report().split())


def _fit(*args, **options):
    return ms.fit(*args, **{"budget": "1GB", "loss": square, "verbose": False} | options)


def _of_rank_1(value, others):
    return value if dist.get_rank() else others


def _wrong(model=None, optimizer=None, batch=None, **options):
    model = wrapped("ddp") if model is None else model
    return _fit(model, optimizer, torch.randn(4, WIDTH) if batch is None else batch, **options)


def _fitted_twice():
    model = wrapped("ddp")
    _wrong(model.module)
    _wrong(model)


def _one_cannot_apply():
    """What raises on one rank after all have agreed."""
    model, apply = wrapped("ddp"), Techniques.apply
    if dist.get_rank():

        def fails(*args, **options):
            if ms.is_dry_run():
                return apply(*args, **options)
            raise RuntimeError("here alone")

        Techniques.apply = fails
    try:
        _wrong(model, technique="checkpoint by block")
    finally:
        Techniques.apply = apply
        assert not any("forward" in vars(m) for m in model.modules())


def _made_before_sharding():
    model = network(DEPTH)
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    _wrong(model, optimizer)


_BY_ONE = "fit: rank 1 has raised "
_OTHERS = {
    "a budget": lambda: _wrong(budget=_of_rank_1("24 G B", "1GB")),
    "no model": lambda: _wrong(_of_rank_1([], wrapped("ddp"))),
    "no batch": lambda: _wrong(batch=_of_rank_1("text", torch.randn(4, WIDTH))),
    "a technique": lambda: _wrong(technique=_of_rank_1("as built", None)),
    "no technique": lambda: _wrong(technique=_of_rank_1("magic", None)),
    "in_backward": lambda: _wrong(in_backward=_of_rank_1(False, True)),
    "twice": lambda: _wrong(DistributedDataParallel(wrapped("ddp"))),
    "fitted twice": _fitted_twice,
    "applied nowhere": _one_cannot_apply,
    "made before": _made_before_sharding,
}
_TWICE = "the model is wrapped twice: DistributedDataParallel is around DistributedDataParallel"
_ALREADY = "a technique is applied to this DistributedDataParallel, or within it, already"
_BEFORE = "not in model: it was made before fully_shard(), whose shards it must step"
WRONG = {
    "a budget": (_BY_ONE + "ValueError: fit: budget must be", "ValueError: fit: budget must be"),
    "no model": (_BY_ONE + "TypeError: fit: model must be", "got list"),
    "no batch": (_BY_ONE + "TypeError: fit: batch must be", "got str"),
    "a technique": ("fit: technique must be the same in all processes, got None on rank 0",) * 2,
    "no technique": (_BY_ONE + "ValueError: fit: technique must be None or one of", "magic"),
    "in_backward": ("fit: in_backward must be the same in all processes, got True on rank 0",) * 2,
    "twice": (_TWICE, _TWICE),
    "fitted twice": (_ALREADY, _ALREADY),
    "applied nowhere": (_BY_ONE + "ValueError: apply: ", "apply: checkpoint by block does not"),
    "made before": (_BEFORE, _BEFORE),
}


def wrong(name):
    try:
        _OTHERS[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def found(kind):
    """Steps of a wrapped model with what memory.fits found; each rank has the same."""
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    batches = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    fits = ms.memory.fits(lambda: stepped(network(DEPTH)), "1GB", devices=2, shard=kind)
    applied = fits.by_devices[2].apply(model, optimizer, "optimizer in backward")
    losses = _steps(model, optimizer, batches)
    steps = applied.steps_in_backward and all(p.grad is None for p in model.parameters())
    applied.undo()
    return steps, losses, whole(model.parameters())


def budgets_differ():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model, budget = wrapped("ddp"), _of_rank_1("100MB", "1GB")
        fitted = _fit(model, None, torch.randn(4, WIDTH), budget=budget, verbose=True)
    return printed.getvalue(), fitted.of_ranks


KINDS = ("ddp", "fsdp2")
UNEVEN = ("checkpoint by block", "optimizer in backward")
TECHNIQUES = (
    "plain",
    None,
    "optimizer in backward",
    "checkpoint by block, Adam in backward",
    "remat within the budget",
)
RUNS = {
    f"{kind}: {technique}": functools.partial(train, kind, technique)
    for kind in KINDS
    for technique in TECHNIQUES
} | {one.__name__: one for one in (least_rows, nothing_fits, one_fails, first_step_planned)}
RUNS |= {"budgets_differ": budgets_differ}
RUNS |= {f"wrong: {name}": functools.partial(wrong, name) for name in WRONG}
RUNS |= {f"found: {kind}": functools.partial(found, kind) for kind in KINDS}
RUNS |= {
    f"uneven: {technique}: {unused}": functools.partial(uneven, unused, technique)
    for technique in (None, *UNEVEN)
    for unused in (False, True)
}
