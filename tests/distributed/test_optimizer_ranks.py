"""SGD, Lion and optimizers that in_backward() has taken, under DDP and FSDP2, on gloo ranks.

Each is compared, to the bit, with a step after backward under the same parallelism: torch's of SGD.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

STEPS = 4
FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit

MAKES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
DAMPENED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
# SGD and Lion in backward, and what they are compared with.
PAIRS = {
    "SGD": (ms.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (ms.SGD, torch.optim.SGD, MOMENTUM),
    "dampening": (ms.SGD, torch.optim.SGD, DAMPENED),
    "Lion": (ms.Lion, ms.Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "states bf16": (ms.Lion, ms.Lion, {"lr": 0.01, "state_dtype": torch.bfloat16}),
}
fuses = torch.backends.cpu.get_cpu_capability() != "DEFAULT"


class Net(nn.Module):
    """``branch`` is used where ``use`` says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.branch, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 1)

    def forward(self, x, use=True):
        x = self.first(x).tanh()
        return self.last(self.branch(x) if use else x)


def part(step):
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    return data.chunk(dist.get_world_size())[dist.get_rank()]


def values(net):
    return whole(net.parameters())


def train(net, optimizer, start=0, steps=STEPS, **options):
    for step in range(start, start + steps):
        (net(part(step), **options) - 1).square().mean().backward()
        if getattr(optimizer, "in_backward", False):
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


def ddp(**options):
    """With and without in_backward, by the optimizer's name."""
    results = {}
    for name, make in MAKES.items():
        of = []
        for takes in (True, False):
            net = DistributedDataParallel(Net(), **options)
            optimizer = make(net.parameters())
            if takes:
                ms.in_backward(optimizer).attach(net)
            use = dist.get_rank() == 0 or not options.get("find_unused_parameters")
            of.append(train(net, optimizer, use=use))
        results[name] = of
    return results


def many_buckets():
    return ddp(bucket_cap_mb=0.0001)


def views():
    return ddp(gradient_as_bucket_view=True)


def unused():
    return ddp(find_unused_parameters=True)


def micro_batches():
    results = []
    for takes in (True, False):
        net = DistributedDataParallel(Net())
        optimizer = MAKES["SGD"](net.parameters())
        if takes:
            ms.in_backward(optimizer, max_grad_norm=1e9).attach(net)
        for step in range(STEPS):
            first, second = part(step).chunk(2)
            with net.no_sync():
                if takes:
                    with optimizer.accumulate():
                        net(first).square().mean().backward()
                else:
                    net(first).square().mean().backward()
            net(second).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(net))
    return {"SGD": results}


def shard(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in net.children():
        fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def fsdp():
    results = {}
    for name, make in MAKES.items():
        of = []
        for takes in (True, False):
            net = shard(Net())
            optimizer = make(net.parameters())
            of.append(train(net, ms.in_backward(optimizer) if takes else optimizer))
        results[name] = of
    return results


def fsdp_resumed():
    """From a checkpoint that torch.distributed.checkpoint wrote, into other objects."""

    def make():
        net = shard(Net())
        return net, ms.in_backward(MAKES["AdamW"](net.parameters()))

    net, optimizer = make()
    train(net, optimizer, 0, 2)
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.save(states, checkpoint_id=os.environ[FOLDER])
    net, optimizer = make()
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.load(states, checkpoint_id=os.environ[FOLDER])
    set_state_dict(
        net, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    resumed = train(net, optimizer, 2, STEPS - 2)
    net = shard(Net())
    return {"AdamW": [resumed, train(net, MAKES["AdamW"](net.parameters()))]}


def sgd_and_lion_ddp():
    results = {}
    for name, (ours, theirs, options) in PAIRS.items():
        nets = [DistributedDataParallel(Net()) for _ in range(2)]
        optimizer = ours(nets[0].parameters(), **options, in_backward=True)
        optimizer.attach(nets[0])
        other = theirs(nets[1].parameters(), **options)
        results[name] = train(nets[0], optimizer), train(nets[1], other)
    return results


def sgd_and_lion_fsdp():
    results = {}
    for name, (ours, theirs, options) in PAIRS.items():
        nets = [shard(Net()) for _ in range(2)]
        optimizer = ours(nets[0].parameters(), **options, in_backward=True)
        other = theirs(nets[1].parameters(), **options)
        results[name] = train(nets[0], optimizer), train(nets[1], other)
        for param in nets[0].parameters():
            for key, value in optimizer.state.get(param, {}).items():
                assert isinstance(value, DTensor) == (key != "step")
    return results


def refusals():
    said = {}

    def note(name, call):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)

    net = DistributedDataParallel(Net())
    optimizer = ms.in_backward(MAKES["SGD"](net.parameters()))
    note("not attached", lambda: train(net, optimizer))
    return said


SAME = [ddp, many_buckets, views, unused, micro_batches, fsdp, fsdp_resumed]
SGD_AND_LION = [sgd_and_lion_ddp, sgd_and_lion_fsdp]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("checkpoints"))
    found = run_ranks(2, [*SAME, *SGD_AND_LION, refusals])
    del os.environ[FOLDER]
    return found


@pytest.mark.parametrize("name", [f.__name__ for f in SAME])
def test_equals_the_ordinary_step(results, name):
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for kind, (ours, theirs) in rank.items():
            for p, q in zip(ours, theirs, strict=True):
                assert torch.equal(p, q), kind


@pytest.mark.parametrize("name", [f.__name__ for f in SGD_AND_LION])
def test_sgd_and_lion_equal_the_step_after_backward(results, name):
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for kind, (ours, theirs) in rank.items():
            for p, q in zip(ours, theirs, strict=True):
                if fuses or kind in ("Lion", "states bf16"):
                    assert torch.equal(p, q), kind
                else:
                    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_refusals(results):
    for said in results["refusals"]:
        assert isinstance(said, dict), said
        assert "Call opt.attach(ddp) once, before training" in said["not attached"]
