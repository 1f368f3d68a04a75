"""Blocks around modules whose parameters are sharded (FSDP2) or whose gradients are reduced (DDP),
on two gloo ranks: the bits of the same training without blocks."""

import contextlib
import functools
import gc
import random
import warnings

import pytest
import sampling
import torch
import torch.distributed as dist
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mlp(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class NormAndSine(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        y = self.norm(x)
        return y, y.sin()


class SavedAgain(nn.Module):
    """What the first part saves and drops, the second saves when it cannot be computed again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = fully_shard(NormAndSine()), fully_shard(nn.Linear(16, 16))

    def forward(self, x):
        y, z = self.first(x)
        return self.second(y) + z


class ReadsBeforeItsGradient(nn.Module):
    """The gradient of ``late`` is there before its product is computed again."""

    def __init__(self):
        super().__init__()
        self.first, self.late = nn.Linear(16, 16), nn.Parameter(torch.rand(16))

    def forward(self, x):
        y = self.first(x) * (x * self.late.detach()).sin()
        return y + self.late.mean()


def blocks(norm=nn.LayerNorm):
    return nn.Sequential(*(Mlp(norm) for _ in range(3)), nn.Linear(16, 1))


def layers():
    """Of which each is sharded alone: what a norm is computed from is gone when it is saved."""
    return nn.Sequential(
        *(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64)),
        *(nn.GELU(), nn.Linear(64, 1)),
    )


def sharded(model, **options):
    for module in model:
        if list(module.parameters()):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def each_in_a_bucket(model):
    return DistributedDataParallel(model, bucket_cap_mb=1e-5)


def reduce_at_once(group, bucket):
    """A step in backward is not made later than here, then."""
    dist.all_reduce(bucket.buffer(), group=group)
    future = torch.futures.Future()
    future.set_result([bucket.buffer().div_(dist.get_world_size())])
    return future


MODELS = {
    "fsdp": lambda: sharded(blocks()),
    "fsdp, bfloat16": lambda: sharded(blocks(), mp_policy=BF16),
    "fsdp, not resharded": lambda: sharded(blocks(), reshard_after_forward=False),
    "fsdp, saved again": lambda: fully_shard(SavedAgain()),
    "ddp": lambda: DistributedDataParallel(blocks()),
    "ddp, batch norm": lambda: DistributedDataParallel(blocks(nn.BatchNorm1d)),
    "ddp, reads late": lambda: each_in_a_bucket(ReadsBeforeItsGradient()),
    "ddp, ours": lambda: DistributedDataParallel(blocks(ms.SyncBatchNorm)),
}


def train(build, block, in_backward):
    torch.manual_seed(0)
    model = build()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    if in_backward:
        optimizer = ms.Adam(model.parameters(), in_backward=True, lr=0.1, small_bytes=0)
        if isinstance(model, DistributedDataParallel):
            at_once = isinstance(model.module, ReadsBeforeItsGradient)
            optimizer.attach(model, hook=reduce_at_once if at_once else None)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        with block():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*whole(model.parameters()), *model.buffers()]


def compare(build, in_backward, **options):
    blocks = []

    def block():
        blocks.append(ms.remat(**(options or {"_everything": True})))
        return blocks[-1]

    plain = train(build, contextlib.nullcontext, in_backward)
    ours = train(build, block, in_backward)
    if options:
        followed = blocks[-1].least is not None  # a plan; whether it drops depends on the peak
    else:
        followed = any(block.figures().dropped_bytes for block in blocks)
    return all(map(torch.equal, plain, ours)) and followed


def compare_all(**options):
    return {
        (name, in_backward): compare(build, in_backward, **options)
        for name, build in MODELS.items()
        for in_backward in (False, True)
    }


def everything():
    return compare_all()


def within_a_budget():
    warnings.simplefilter("ignore", UserWarning)  # it is less than the least
    return compare_all(budget=0.01)


def wide_blocks():
    torch.manual_seed(0)
    parts = ((nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU()) for _ in range(6))
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))


def peaks(build, whole_module, share, spare=0):
    """Of each step, less ``spare`` bytes, by what was promised; None where nothing was."""
    ms._native.module.remat_forget()
    model, x = build(), torch.randn(512, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ms.remat_module(model, budget=share) if whole_module else None
    found = []
    for _ in range(4):
        gc.collect()
        with ms.memory.track(model) as track:
            block = handle or ms.remat(model, budget=share)
            with contextlib.nullcontext() if handle else block:
                loss = model(x).square().mean()
            loss.backward()
            del loss
            peak = track.peak
        found.append(block.least and (peak - spare) / max(block.budget, block.least))
        optimizer.step()
        optimizer.zero_grad()
    return found


def budgets_under_ddp():
    """From the first step on, also in the second one, in which DDP makes its buckets anew."""
    warnings.simplefilter("ignore", UserWarning)
    builds = {"ddp": {}, "in views": {"gradient_as_bucket_view": True}}
    found = {
        (name, whole_module, share): peaks(
            lambda options=options: DistributedDataParallel(wide_blocks(), **options),
            whole_module,
            share,
        )
        for name, options in builds.items()
        for whole_module in (False, True)
        for share in (0.8, 0.5, 0.3)
    }
    return {
        (*key, *steps): None not in steps and max(steps) <= 1.02 for key, steps in found.items()
    }


def budgets_under_fsdp():
    """Nothing tells of what only emptied parameters could make again before a step has run."""
    warnings.simplefilter("ignore", UserWarning)
    # Where its threads are late, gloo still has what was gathered or reduced of one block.
    late = sum(p.nbytes for p in wide_blocks()[0].parameters())
    found = {
        share: peaks(lambda: sharded(wide_blocks()), False, share, spare=late)
        for share in (0.8, 0.5, 0.3)
    }
    return {(key, *steps): max(steps[1:]) <= 1.02 for key, steps in found.items()}


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def random_layer(rng):
    layer = rng.choice(
        [
            lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU()),
            lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(inplace=True)),
            lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.SiLU(), nn.Linear(32, 16)),
            lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True),
        ]
    )()
    return Residual(layer) if rng.random() < 0.5 else layer


def random_training(seed, sharding, within):
    """Four steps of a random model, with other batches, budgets and lengths in each process.

    Both accumulate and evaluate at the same places, as collectives ask. Returns the parameters at
    the end, and the bytes that were dropped.
    """
    common, own = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    torch.manual_seed(seed)
    model = nn.Sequential(*(random_layer(common) for _ in range(common.randint(2, 5))))
    model = sharded(model) if sharding else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dropped = 0
    for i in range(4):
        micro_batches, evaluates = common.randint(1, 2), common.random() < 0.3
        for _ in range(micro_batches):
            x = torch.randn(own.choice([2, 5]), own.choice([8, 24]), 16)
            share, drawn = own.choice([0.2, 0.5, 0.8]), own.getrandbits(40)
            block = ms.remat(model, budget=share) if within else contextlib.nullcontext()
            torch.manual_seed(drawn)
            with block:
                loss = model(x).square().mean()
            loss.backward()
            dropped += block.figures().dropped_bytes if within else 0
        if evaluates:
            with torch.no_grad():
                model(torch.ones(2, 8, 16))
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)
    return whole(model.parameters()), dropped


def random_programs(count):
    """Each process follows plans of its own."""
    warnings.simplefilter("ignore", UserWarning)
    found = {}
    for seed in range(count):
        sharding = seed % 2 == 1
        plain, _ = random_training(seed, sharding, within=False)
        ours, dropped = random_training(seed, sharding, within=True)
        found[seed, sharding, dropped] = all(map(torch.equal, plain, ours)) and dropped > 0
    return found


def layer_by_layer():
    return {in_backward: compare(lambda: sharded(layers()), in_backward) for in_backward in (0, 1)}


def an_error_while_a_step_waits():
    model = each_in_a_bucket(ReadsBeforeItsGradient())
    optimizer = ms.Adam(model.parameters(), in_backward=True, lr=0.1, small_bytes=0)
    optimizer.attach(model, hook=reduce_at_once)

    def loss():
        with ms.remat(_everything=True):
            return model(torch.ones(8, 16)).square().mean()

    for _ in range(2):  # DDP makes the buckets anew after the first backward
        loss().backward()
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    failing = model.module.first.bias.register_hook(lambda grad: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss().backward()
    failing.remove()
    same = all(map(torch.equal, before, model.parameters()))
    try:
        optimizer.step()
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"nothing was stepped": same, refused: "after 1 " in refused}


FUNCTIONS = [everything, within_a_budget, budgets_under_ddp, budgets_under_fsdp, layer_by_layer,
             random_programs, an_error_while_a_step_waits]  # fmt: skip


def with_nothing_known(function):
    with warnings.catch_warnings():
        ms._native.module.remat_forget()
        return function()


@pytest.fixture(scope="module")
def results():
    functions = {f.__name__: f for f in FUNCTIONS}
    functions["random_programs"] = functools.partial(random_programs, 8 if sampling.full else 3)
    return run_ranks(
        2, {name: functools.partial(with_nothing_known, f) for name, f in functions.items()}
    )


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.skipif(not ms._native.available, reason="remat records natively")
@pytest.mark.parametrize("name", [function.__name__ for function in FUNCTIONS])
def test_two_ranks(results, name):
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        assert [key for key, same in rank.items() if not same] == []
