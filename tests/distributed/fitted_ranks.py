"""What fit() does on ranks: tests import it there."""

import functools
import warnings

import torch
import torch.distributed as dist
from ranks import whole
from sharded_steps import ROWS, WIDTH, network, pauses, sharded
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms
from memsave_ext.remat import ahead

DEPTH = 2


def square(result):
    return result.square().mean()


def wrapped(kind):
    torch.manual_seed(0)
    return DistributedDataParallel(network(DEPTH)) if kind == "ddp" else sharded(depth=DEPTH)


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
    losses = []
    for x in batches:
        loss = square(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    name = None if fitted is None else (fitted.technique, fitted.predicted)
    if fitted is not None:
        fitted.undo()
    return name, losses, whole(model.parameters())


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


KINDS = ("ddp", "fsdp2")
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
