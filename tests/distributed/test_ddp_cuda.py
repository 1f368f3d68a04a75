"""Two processes on one GPU under DistributedDataParallel: Adam in backward, regions, batch norms.

By gloo, which takes CUDA tensors; NCCL refuses two processes on one GPU.
"""

import pytest
import torch
import torch.distributed as dist
from on_device import FORMS, HAS_CUDA, distance, needs_cuda, network
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memsave_ext as ms

DEVICE = "cuda" if HAS_CUDA else "cpu"
STEPS, SAMPLES = 5, 24
# A gradient that is 0 but for rounding, as of a bias before a batch norm, makes no step with it.
OPTIONS = {"lr": 1e-2, "eps": 1e-4}


def data(step):
    return torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))


def part(step):
    return data(step).chunk(dist.get_world_size())[dist.get_rank()].to(DEVICE)


def train(net, optimizer, batch):
    for step in range(STEPS):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def cpu_parameters(net):
    return [p.detach().cpu() for p in net.parameters()]


def ranks_train(form="checkpoint", norm=nn.LayerNorm, ddp_options=None, **options):
    net = network(FORMS[form], DEVICE, norm=norm, p=0.0)
    ddp = DistributedDataParallel(net, **(ddp_options or {}))
    optimizer = ms.AdamW(ddp.parameters(), in_backward=True, **OPTIONS, **options)
    optimizer.attach(ddp)
    train(ddp, optimizer, part)
    assert all(p.grad is None for p in net.parameters())
    return cpu_parameters(net)


def plainly():
    return ranks_train()


def many_buckets():
    return ranks_train(ddp_options={"bucket_cap_mb": 1e-3})


def views():
    return ranks_train(ddp_options={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3})


def explicit():
    return ranks_train("CheckpointFunction", fused=True)


def unused():
    return ranks_train(ddp_options={"find_unused_parameters": True})


def batch_norms():
    """Synchronised, which makes one batch of the parts."""
    net = network(FORMS["checkpoint"], DEVICE, p=0.0)
    ddp = DistributedDataParallel(ms.convert_batch_norm(net, sync=True))
    optimizer = ms.AdamW(ddp.parameters(), in_backward=True, **OPTIONS)
    optimizer.attach(ddp)
    train(ddp, optimizer, part)
    counts = {m.num_batches_tracked.item() for m in net.modules() if hasattr(m, "running_mean")}
    assert counts == {STEPS}
    return cpu_parameters(net)


def alone(norm):
    """All of the batch in one process, after backward, by torch, in float64 on the CPU."""
    net = network(norm=norm, p=0.0).double()
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    train(net, optimizer, lambda step: data(step).double())
    return cpu_parameters(net)


@needs_cuda
def test_two_processes_are_as_one():
    cases = [plainly, many_buckets, views, explicit, unused, batch_norms]
    found = run_ranks(2, cases)
    exact = {nn.LayerNorm: alone(nn.LayerNorm), nn.BatchNorm1d: alone(nn.BatchNorm1d)}
    start = cpu_parameters(network(p=0.0))
    for case in cases:
        ranks = found[case.__name__]
        for rank in ranks:
            assert not isinstance(rank, str), rank
        for a, b in zip(*ranks, strict=True):
            assert torch.equal(a, b), case.__name__
        expected = exact[nn.BatchNorm1d if case is batch_norms else nn.LayerNorm]
        way = [e - s.double() for e, s in zip(expected, start, strict=True)]
        made = [r.double() - s.double() for r, s in zip(ranks[0], start, strict=True)]
        # Another gradient, as that of one process alone would be, makes another way altogether.
        assert distance(made, way) < 1e-3, case.__name__


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_half_of_the_batch_goes_another_way(norm):
    """What the test above would find if gradients were not reduced."""
    net = network(norm=norm, p=0.0).double()
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    train(net, optimizer, lambda step: data(step).double()[: SAMPLES // 2])
    start = cpu_parameters(network(norm=norm, p=0.0))
    made = [p - s.double() for p, s in zip(cpu_parameters(net), start, strict=True)]
    way = [e - s.double() for e, s in zip(alone(norm), start, strict=True)]
    assert distance(made, way) > 1e-2
