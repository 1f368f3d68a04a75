"""NCCL and FSDP2 with a world of one process, which one GPU can run: streams and steps, no traffic.

Without a GPU the same by gloo on the CPU, where there are no streams.
"""

import pytest
import torch
from on_device import FORMS, HAS_CUDA, network, synchronize
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

DEVICE = "cuda" if HAS_CUDA else "cpu"
STEPS = 5
OPTIONS = {"lr": 1e-2, "eps": 1e-4}


def make():
    return network(FORMS["checkpoint"], DEVICE, norm=nn.LayerNorm, p=0.0)


def train(net, optimizer):
    for step in range(STEPS):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        net(x).square().mean().backward()
        assert all(p.grad is None for p in net.parameters())
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    synchronize(DEVICE)
    return [p.detach().cpu() for p in whole]


def on_a_stream(run):
    with torch.cuda.stream(torch.cuda.Stream() if HAS_CUDA else None):
        return run()


def adam(net, **options):
    return ms.AdamW(net.parameters(), in_backward=True, **OPTIONS, **options)


def alone():
    net = make()
    return train(net, adam(net))


def ddp():
    net = DistributedDataParallel(make(), bucket_cap_mb=1e-3)
    optimizer = adam(net)
    optimizer.attach(net)
    return train(net, optimizer)


def fsdp(**options):
    net = make()
    mesh = init_device_mesh(DEVICE, (1,))
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net, adam(net, **options))


def ddp_on_a_stream():
    return on_a_stream(ddp)


def fsdp_on_a_stream():
    return on_a_stream(fsdp)


def fsdp_at_once():
    return fsdp(small_bytes=0)


CASES = [ddp, ddp_on_a_stream, fsdp, fsdp_on_a_stream, fsdp_at_once]


@pytest.fixture(scope="module")
def results():
    return run_ranks(1, CASES, "nccl" if HAS_CUDA else "gloo")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_rank_is_as_none(results, case):
    [found] = results[case.__name__]
    assert not isinstance(found, str), found
    for a, b in zip(found, alone(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
