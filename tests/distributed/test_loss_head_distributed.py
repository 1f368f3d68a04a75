"""linear_cross_entropy under DistributedDataParallel and FSDP2, on gloo ranks: the gradient of the
head is reduced, and so whole."""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms
from memsave_ext import _native

CLASSES, STEPS = 600, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES, bias=False)

    def forward(self, x, target):
        return ms.linear_cross_entropy(
            self.first(x).tanh(), self.head.weight, target, chunk_size=256, debug=True
        )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator)
    return x, torch.randint(CLASSES, (12,), generator=generator)


def part(step):
    world, rank = dist.get_world_size(), dist.get_rank()
    return [tensor.chunk(world)[rank] for tensor in batch(step)]


def train(net, optimizer, data):
    """Returns why gradients were whole."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            net(*data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    messages = [str(warning.message) for warning in caught]
    ours = [text for text in messages if text.startswith("memsave_ext: loss head")]
    return {text.rpartition(": ")[2] for text in ours}


def values(net):
    return whole(net.parameters())


def ddp():
    net = DistributedDataParallel(Net())
    optimizer = ms.Adam(net.parameters(), lr=1e-2, in_backward=True)
    optimizer.attach(net)
    reasons = train(net, optimizer, part)
    return values(net), reasons


def fsdp():
    """The head's weight is gathered in the forward of the root."""
    net = fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = ms.Adam(net.parameters(), lr=1e-2, in_backward=True)
    reasons = train(net, optimizer, part)
    return values(net), reasons


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, [ddp, fsdp])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_trains_as_one_process(results, kind):
    net = Net()
    train(net, ms.Adam(net.parameters(), lr=1e-2), batch)
    for result in results[kind]:
        assert not isinstance(result, str), result
        found, reasons = result
        torch.testing.assert_close(found, values(net), rtol=1e-3, atol=1e-5)
        if _native.module is not None:
            reduces = {"DistributedDataParallel reduces the whole gradient"}
            nobody = {"no optimizer of memsave_ext steps the weight in backward"}
            assert reasons == (reduces if kind == "ddp" else nobody)
