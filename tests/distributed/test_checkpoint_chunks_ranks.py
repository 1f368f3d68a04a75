"""checkpoint(chunks=) under DistributedDataParallel and FSDP2, on two gloo ranks.

Beside one process that has the whole batch and cuts nothing.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

STEPS, SAMPLES, WIDTH, CHUNKS = 3, 22, 7, 3
DDP = {
    "buckets": {"bucket_cap_mb": 1e-3},
    "unused": {"find_unused_parameters": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
}
FSDP = ["modules before", "modules after", "around"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 20),
            nn.Linear(20, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, around=False):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks.append(self.blocks[0])  # its parameters are in two regions
        self.around = around
        self.double()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = ms.checkpoint(block, x, chunks=CHUNKS) if self.around else block(x)
        return self.last(x)


def in_chunks(net):
    ms.checkpoint_modules(net, Block, chunks=CHUNKS)
    return net


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator, dtype=torch.double)


def train(net, optimizer, part):
    """Parameters after each step."""
    results = []
    for step in range(STEPS):
        (net(part(step)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        names, params = zip(*net.named_parameters(), strict=True)
        results.append(dict(zip(names, whole(params), strict=True)))
    return results


def my_part(step):
    return data(step).chunk(dist.get_world_size())[dist.get_rank()]


def ddp(mode, in_backward):
    net = DistributedDataParallel(in_chunks(Net()), **DDP[mode])
    optimizer = ms.Adam(net.module.parameters(), lr=0.01, in_backward=in_backward)
    if in_backward:
        optimizer.attach(net)
    return [
        {name.removeprefix("module."): p for name, p in step.items()}
        for step in train(net, optimizer, my_part)
    ]


def fsdp(kind, in_backward):
    net = Net(around=kind == "around")
    if kind == "modules before":
        in_chunks(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (net.first, *net.blocks[:3], net.last, net):
        fully_shard(module, mesh=mesh)
    if kind == "modules after":
        in_chunks(net)
    return train(net, ms.Adam(net.parameters(), lr=0.01, in_backward=in_backward), my_part)


def collectives():
    """How many DDP makes in a step, of a net that is cut and of one that is not."""
    counts = []
    for prepare in (in_chunks, lambda net: net):
        net = DistributedDataParallel(prepare(Net()), **DDP["buckets"])
        for _ in range(2):
            before = dist.group.WORLD._get_sequence_number_for_group()
            net(data(0)).sum().backward()
        counts.append(dist.group.WORLD._get_sequence_number_for_group() - before)
    return counts


CASES = {
    **{f"DDP, {m}, {b}": functools.partial(ddp, m, b) for m in DDP for b in (False, True)},
    **{f"FSDP2, {k}, {b}": functools.partial(fsdp, k, b) for k in FSDP for b in (False, True)},
}


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, {**CASES, "collectives": collectives})


@pytest.fixture(scope="module")
def expected():
    net = Net()
    return train(net, torch.optim.Adam(net.parameters(), lr=0.01), data)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(results, expected, case):
    for rank in results[case]:
        assert isinstance(rank, list), rank
        for step, reference in zip(rank, expected, strict=True):
            torch.testing.assert_close(step, reference, rtol=1e-7, atol=1e-9)


def test_ddp_reduces_as_often_as_without_chunks(results):
    for rank in results["collectives"]:
        assert isinstance(rank, list), rank
        assert rank[0] == rank[1]
