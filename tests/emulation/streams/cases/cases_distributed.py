"""DistributedDataParallel and FSDP2 with one process: nothing is sent, all streams are there."""

import random
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import has_waited
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import memsave_ext as ms
from memsave_ext.adam.ddp import StepReduced

DEVICE = "cuda"
OPTIONS = {"lr": 0.01, "eps": 1e-3}


@pytest.fixture(autouse=True, scope="module")
def _one_process():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).to(DEVICE)


def train(net, optimizer):
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]
    return [p.detach().cpu() for p in local]


def alone(seed):
    net = make(seed)
    return train(net, ms.AdamW(net.parameters(), **OPTIONS))


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def on_some_stream(chance, run):
    """The loop is on the default stream or on another."""
    current = torch.cuda.current_stream()
    stream = chance.choice([current, torch.cuda.Stream()])
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = run()
    current.wait_stream(stream)
    return result


def gloo(chance, _stream):
    """What gloo does with a bucket: on a thread, by way of the host. Its future has no devices."""

    def reduce(_state, bucket):
        buffer, queued = bucket.buffer(), torch.cuda.current_stream()
        future, side = torch.futures.Future(), torch.cuda.Stream()
        side.wait_stream(queued)
        buffer.record_stream(side)
        delay = chance.choice([0, 0, 0.002])

        def run():
            threading.Event().wait(delay)
            with torch.cuda.stream(side):
                host = torch.empty_like(buffer, device="cpu", pin_memory=True)
                host.copy_(buffer, non_blocking=True)
                side.synchronize()
                buffer.copy_(host, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            future.set_result([buffer])

        threading.Thread(target=run).start()
        return future

    return reduce


def nccl(_chance, stream):
    """What NCCL does with a bucket: on its stream, of which its future knows."""

    def reduce(_state, bucket):
        buffer = bucket.buffer()
        future = torch.futures.Future(devices=[buffer.device])
        stream.wait_stream(torch.cuda.current_stream())
        buffer.record_stream(stream)
        with torch.cuda.stream(stream):
            buffer.mul_(1)
            future.set_result([buffer])
        return future

    return reduce


@pytest.mark.parametrize("backend", [gloo, nccl], ids=["gloo", "nccl"])
def test_ddp(seed, backend):
    chance = random.Random(seed)

    def wrap():
        sizes = {"bucket_cap_mb": chance.choice([1e-4, 1])}
        unused = chance.random() < 0.5
        net = DistributedDataParallel(make(seed), find_unused_parameters=unused, **sizes)
        optimizer = ms.AdamW(net.parameters(), in_backward=True, **OPTIONS)
        optimizer.attach(net, hook=backend(chance, torch.cuda.Stream()))
        net.logger = Mock()  # which wants a timer that only CUDA builds have
        return net, optimizer

    made_outside = chance.random() < 0.5
    if made_outside:
        wrapped = wrap()

    def loop():
        return train(*(wrapped if made_outside else wrap()))

    assert_same(on_some_stream(chance, loop), alone(seed))


@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
def test_ddp_backward_does_not_wait_for_nccl(seed, unused, monkeypatch):
    """Or communication would not run beside it: only the end of backward waits."""
    chance = random.Random(seed)
    stream, waits = torch.cuda.Stream(), []
    run = StepReduced._run

    def watched(self, bucket):
        made = run(self, bucket)
        waits.append(has_waited(torch.cuda.current_stream(), stream))
        return made

    monkeypatch.setattr(StepReduced, "_run", watched)
    net = DistributedDataParallel(make(seed), bucket_cap_mb=1e-4, find_unused_parameters=unused)
    optimizer = ms.AdamW(net.parameters(), in_backward=True, **OPTIONS)
    optimizer.attach(net, hook=nccl(chance, stream))
    net.logger = Mock()
    assert_same(on_some_stream(chance, lambda: train(net, optimizer)), alone(seed))
    assert len(waits) > 3
    assert not any(waits)


class Watch:
    """A hook after ours, for which gradients wait in buckets."""

    def __call__(self, param):
        assert param.grad is not None


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_fsdp(seed, watched):
    chance = random.Random(seed)

    def loop():
        net = make(seed)
        mesh = init_device_mesh(DEVICE, (1,))
        for block in net:
            if chance.random() < 0.7:
                fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = ms.AdamW(net.parameters(), in_backward=True, **OPTIONS)
        if watched:
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(Watch())
        return train(net, optimizer)

    assert_same(on_some_stream(chance, loop), alone(seed))
