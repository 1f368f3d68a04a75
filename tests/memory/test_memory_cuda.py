"""memory.track on a GPU: the allocator's own figures, and steps that it leaves as they are."""

import torch
from on_device import needs_kernels, on_every_device, values
from torch import nn

import memsave_ext as ms


def net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)


def step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, device, steps=3):
    optimizer = ms.AdamW(model.parameters(), lr=1e-3)
    x = torch.linspace(-1, 1, 128 * 64).view(128, 64).to(device)
    for _ in range(steps):
        step(model, optimizer, x)
    return optimizer


@on_every_device
def test_training_is_the_same(device):
    tracked, plain = net(device), net(device)
    with ms.memory.track(tracked) as t:
        train(tracked, device)
    train(plain, device)
    assert all(torch.equal(v, values(plain)[name]) for name, v in values(tracked).items())
    assert sum(t.at_peak.values()) == t.peak
    assert t.peak >= 2 * 128 * 256 * 4  # what GELU reads and makes
    assert len(t.steps) >= 1


@needs_kernels
def test_live_is_what_the_allocator_says():
    model = net("cuda")
    with ms.memory.track(model) as t:
        optimizer = train(model, "cuda")
        assert t.live == torch.cuda.memory_allocated()
        kept = [torch.empty(1000, device="cuda") for _ in range(3)]
        assert t.live == torch.cuda.memory_allocated()
        del kept
    assert t.live == torch.cuda.memory_allocated()
    assert t.peak >= t.live
    assert t.at_peak["parameters"] >= sum(p.nbytes for p in model.parameters())
    assert optimizer.state


@needs_kernels  # pure Python reads the profiler when the block is left
def test_the_peak_is_that_of_torch():
    """Of what Python's operators make and free, and at least of what lives between them."""
    model = net("cuda")
    train(model, "cuda", 1)
    x = torch.ones(1 << 20, device="cuda")
    with ms.memory.track(model) as t:
        y = x.sin()
        z = y.exp()
        del y
    assert t.peak - t.live == x.nbytes
    del z
