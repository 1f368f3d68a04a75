"""Blocks of rematerialization on several streams, run again on those of backward."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

DEVICE = "cuda"
KINDS = {"cheap": {}, "budget": {"budget": 0.4}, "few bytes": {"budget": 4000}}


@pytest.fixture(autouse=True)
def forget():
    _native.module.remat_forget()


class Net(nn.Module):
    """Layers on streams that take turns; each is ordered after what it reads, as its user must."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)).to(DEVICE)
        self.seed = seed

    def forward(self, x):
        chance = random.Random(self.seed)
        main = torch.cuda.current_stream()
        streams = [main, torch.cuda.Stream(), torch.cuda.Stream()]
        for layer in self.layers:
            stream, before = chance.choice(streams), torch.cuda.current_stream()
            stream.wait_stream(before)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                x = F.gelu(layer(x)).tanh() * x.sigmoid()
                if chance.random() < 0.3:
                    x = F.dropout(x, 0.2)
            before.wait_stream(stream)
            x.record_stream(before)
        return x.square().mean()


def gradients(net, x):
    net.zero_grad()
    net(x).backward()
    return [p.grad.cpu() for p in net.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_on_several_streams(seed, kind):
    net = Net(seed)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    for step in range(4):
        torch.cuda.manual_seed(step)
        expected = gradients(net, x)
        torch.cuda.manual_seed(step)
        net.zero_grad()
        with ms.remat(**KINDS[kind]):
            loss = net(x)
        loss.backward()
        for param, gradient in zip(net.parameters(), expected, strict=True):
            assert torch.equal(param.grad.cpu(), gradient)


def test_plans_follow_times_of_events_without_waiting(seed):
    """The host waits for nothing; when it meets events that are past, there is a plan."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    )
    net.to(DEVICE)
    x = torch.randn(64, 8, device=DEVICE)
    plans = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            net.zero_grad()
            with ms.remat(budget=0.5) as block:
                loss = net(x).square().mean()
            loss.backward()
            plans.append(block._recorder.budget()["plan"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plans[0] is None and plans[-1] is not None
    _peak, seconds = plans[-1]
    assert 0 < seconds < 1
