"""Tensor parallelism by parallelize_module and pipelines, on two gloo ranks: checkpoints, remat and
Adam in backward give the bits of the same training without them."""

import functools
import itertools
import os
import tempfile
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import errors_of_ranks, run_ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import memsave_ext as ms

native = ms._native.available
FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit
WIDTH, CLASSES, TOKENS = 32, 101, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, target):
        hidden = self.norm(self.blocks(x))
        return ms.linear_log_probs(hidden, self.head.weight, target, self.head.bias).mean()


def parallelized(sequence):
    """``sequence``: hidden states between layers are DTensors whose tokens are sharded."""
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    plan, around = {"up": ColwiseParallel(), "down": RowwiseParallel()}, {"head": ColwiseParallel()}
    if sequence:
        plan["norm"] = around["norm"] = SequenceParallel()
        plan["down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, around)


def data(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, TOKENS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (4, TOKENS), generator=generator)


WRAPS = {
    "plain": lambda model: None,
    "checkpoint": lambda model: ms.checkpoint_modules(model, Block),
}
if native:
    WRAPS["remat"] = lambda model: ms.remat_module(model, budget="1GB")
    WRAPS["remat, too small"] = lambda model: ms.remat_module(model, budget=1)


OPTIMIZERS = {
    "after": {},
    "in backward": {"in_backward": True},
    "clipped": {"max_grad_norm": 0.01},
    "in backward, clipped": {"in_backward": True, "max_grad_norm": 0.01},
    "elsewhere": {"grads_on": "a folder"},
}


def adam(kind, module):
    options = dict(OPTIMIZERS[kind])
    if "grads_on" in options:
        options["grads_on"] = tempfile.mkdtemp(dir=os.environ[FOLDER])
    return ms.AdamW(module.parameters(), lr=1e-2, **options)


def train(sequence, wrap, kind):
    """Losses and parameters, whether gradients were left, how often a layer ran, and a report."""
    model, runs = parallelized(sequence), []
    model.blocks[0].up.register_forward_pre_hook(lambda *_: runs.append(0))
    handle = WRAPS[wrap](model)
    optimizer = adam(kind, model)
    losses, left = [], False
    for step in range(3):
        x, target = data(step)
        if sequence:
            x = distribute_tensor(x, model.head.weight.device_mesh, [Shard(1)])
        loss = model(x, target)
        loss.backward()
        left = left or any(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    report = handle.report() if "remat" in wrap else ""
    return losses + whole(model.parameters()), left, len(runs), report


CASES = {
    case: functools.partial(train, *case)
    for case in itertools.product((False, True), WRAPS, OPTIMIZERS)
    if case[1] == "plain" or case[2] in ("after", "in backward")
}


class Stage(nn.Sequential):
    """Half of a model without tensor parallelism."""

    def __init__(self, rank):
        torch.manual_seed(rank)
        super().__init__(*(Block() for _ in range(2)), nn.Dropout(0.1))


def scheduled(schedule, wrap, optimizer, budget=None):
    """Losses of the last stage with this stage's parameters, and bytes that remat dropped."""
    rank = dist.get_rank()
    module = Stage(rank)
    torch.manual_seed(0)
    handle = None
    if wrap == "remat":
        handle = ms.remat_module(module, budget=budget)
    elif wrap == "checkpoint":
        ms.checkpoint_modules(module, Block)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    run = schedule(stage, n_microbatches=4, loss_fn=F.mse_loss)
    opt = adam(optimizer, module)
    losses, found = [], []
    for step in range(4):
        x, _ = data(step)
        x = x.flatten(0, 1)
        with opt.accumulate() if optimizer == "in backward" else nullcontext():
            if rank == 0:
                run.step(x)
            else:
                run.step(target=x.sin(), losses=losses)
        found += [loss.detach() for loss in losses]
        opt.step()
        opt.zero_grad()
    dropped = 0 if handle is None else handle.figures().dropped_bytes
    return found + [p.detach() for p in module.parameters()], dropped


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
PIPELINES = {
    (name, wrap, optimizer, budget): functools.partial(
        scheduled, SCHEDULES[name], wrap, optimizer, budget
    )
    for name in SCHEDULES
    for wrap, optimizer, budget in (
        ("plain", "after", None),
        ("plain", "in backward", None),
        ("plain", "elsewhere", None),
        ("checkpoint", "in backward", None),
        *((("remat", "in backward", b) for b in ("1GB", 1, "300KB")) if native else ()),
    )
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("gradients"))
    yield run_ranks(2, CASES | PIPELINES)
    del os.environ[FOLDER]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensor_parallel_has_the_bits_of_plain(results, case):
    sequence, wrap, kind = case
    if sequence and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 does not multiply what is sharded over its positions")
    other = "clipped" if "clipped" in kind else "after"
    for rank, plain in zip(results[case], results[sequence, "plain", other], strict=True):
        assert isinstance(rank, tuple), rank
        values, left, runs, report = rank
        assert same(values, plain[0])
        assert left == ("in backward" not in kind)
        assert runs == (6 if wrap == "checkpoint" else 3)  # in three steps
        assert ("inside of DTensors (tensor parallelism)" in report) == ("remat" in wrap)


def test_clipping_changes_the_parameters(results):
    (clipped, *_), _ = results[False, "plain", "clipped"]
    (free, *_), _ = results[False, "plain", "after"]
    assert not same(clipped, free)


@pytest.mark.parametrize("case", PIPELINES, ids=str)
def test_pipelines_have_the_bits_of_plain(results, case):
    schedule, _, _, budget = case
    for rank, plain in zip(results[case], results[schedule, "plain", "after", None], strict=True):
        assert isinstance(rank, tuple), rank
        values, dropped = rank
        assert same(values, plain[0])
        assert (dropped > 0) == (budget in (1, "300KB"))


class ReadsTheNext(nn.Module):
    """Reads the next one's weight past autograd, too: a recompute of it needs that unchanged."""

    def __init__(self, mesh):
        super().__init__()
        self.w, self.v = (
            nn.Parameter(distribute_tensor(torch.randn(128, 64) / 8, mesh, [Shard(0)]))
            for _ in range(2)
        )

    def forward(self, x, other):
        x = (x + other.to_local().detach()).sin().exp()
        return x + F.gelu(F.gelu(F.linear(x, self.w.to_local())).sin() @ self.v.to_local())


class ReadNext(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.blocks = nn.ModuleList(ReadsTheNext(mesh) for _ in range(4))

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x, self.blocks[(i + 1) % 4].w)
        return x


def steps_what_a_recompute_needs():
    torch.manual_seed(0)
    net = ReadNext(init_device_mesh("cpu", (2,)))
    ms.remat_module(net, budget=1)
    modes = {"in_backward": True, "max_grad_norm": 0.01, "bucket_bytes": 20_000}
    opt = ms.AdamW(net.parameters(), lr=0.01, **modes)
    for _ in range(3):
        net(torch.randn(64, 64)).square().mean().backward()
        opt.step()


@pytest.mark.skipif(not ms._native.available, reason="remat keeps everything")
def test_shards_that_a_recompute_still_needs_are_no_reason_to_wait():
    """All processes clip the same gradients together: one that left some out is waited for."""
    errors = errors_of_ranks(2, steps_what_a_recompute_needs)
    assert all(errors) and any("is to be computed again" in error for error in errors)
