"""SGD and Lion in backward, under DistributedDataParallel and FSDP2, on gloo ranks.

Each is compared, to the bit, with a step after backward under the same parallelism: torch's of SGD.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

STEPS = 4
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
DAMPENED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
# In backward, and after it.
PAIRS = {
    "SGD": (ms.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (ms.SGD, torch.optim.SGD, MOMENTUM),
    "dampening": (ms.SGD, torch.optim.SGD, DAMPENED),
    "Lion": (ms.Lion, ms.Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "states bf16": (ms.Lion, ms.Lion, {"lr": 0.01, "state_dtype": torch.bfloat16}),
}
fuses = torch.backends.cpu.get_cpu_capability() != "DEFAULT"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def part(step):
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    return data.chunk(dist.get_world_size())[dist.get_rank()]


def train(net, optimizer):
    for step in range(STEPS):
        (net(part(step)) - 1).square().mean().backward()
        if getattr(optimizer, "in_backward", False):
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters())
    return [p.detach().clone() for p in whole]


def ddp():
    results = {}
    for name, (ours, theirs, options) in PAIRS.items():
        nets = [DistributedDataParallel(Net()) for _ in range(2)]
        optimizer = ours(nets[0].parameters(), **options, in_backward=True)
        optimizer.attach(nets[0])
        other = theirs(nets[1].parameters(), **options)
        results[name] = train(nets[0], optimizer), train(nets[1], other)
    return results


def shard(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in net.children():
        fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def fsdp():
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


BOTH = [ddp, fsdp]


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, BOTH)


@pytest.mark.parametrize("name", [f.__name__ for f in BOTH])
def test_equals_the_step_after_backward(results, name):
    for rank in results[name]:
        assert isinstance(rank, dict), rank
        for kind, (ours, theirs) in rank.items():
            for p, q in zip(ours, theirs, strict=True):
                if fuses or kind in ("Lion", "states bf16"):
                    assert torch.equal(p, q), kind
                else:
                    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
