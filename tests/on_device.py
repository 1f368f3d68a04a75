"""What the tests of a GPU share. Those that can run on the CPU, too, where most of it is tried."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
needs_kernels = pytest.mark.skipif(
    not (HAS_CUDA and _native.module and _native.module.with_cuda),
    reason="needs a CUDA device and a native build with CUDA",
)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
on_every_device = pytest.mark.parametrize("device", DEVICES)


@contextlib.contextmanager
def no_synchronisation():
    """torch raises where it would wait for the GPU. Before it, what waits once must have run."""
    if HAS_CUDA:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if HAS_CUDA:
            torch.cuda.set_sync_debug_mode("default")


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def another_stream():
    """Inside, work goes to a stream of its own, after what came before it and before what comes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def capture(step, warmup=3):
    """(replay of a CUDA graph of ``step()``, what that returned), after ``warmup`` steps.

    Without a GPU a step stands in for a replay, as each does what the other does.
    """
    if not HAS_CUDA:
        for _ in range(warmup):
            result = step()
        return step, result
    with another_stream():
        for _ in range(warmup):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph.replay, result


# Regions: call(function, n, *tensors), the n inputs and then the parameters.


def plain(function, n, *tensors):
    return function(*tensors[:n])


def by_checkpoint(function, n, *tensors):
    return ms.checkpoint(function, *tensors[:n])


def by_engine_hooks(function, n, *tensors):
    before = ms.use_engine_hooks(True)
    try:
        return ms.checkpoint(function, *tensors[:n])
    finally:
        ms.use_engine_hooks(before)


def by_function(function, n, *tensors):
    return ms.CheckpointFunction.apply(function, n, *tensors)


def nested(function, n, *tensors):
    def inside(*inputs):
        return by_function(function, n, *inputs, *tensors[n:])

    return ms.checkpoint(inside, *tensors[:n])


FORMS = {
    "checkpoint": by_checkpoint,
    "engine hooks": by_engine_hooks,
    "CheckpointFunction": by_function,
    "nested": nested,
}
# Without a GPU two are enough to try the tests; the forms have their own there.
every_form = pytest.mark.parametrize("form", FORMS if HAS_CUDA else ["checkpoint", "nested"])


class Block(nn.Module):
    """Dropout, a batch norm and two layers, run as one region."""

    def __init__(self, width, run=plain, norm=ms.BatchNorm1d, p=0.3):
        super().__init__()
        self.run, self.p = run, p
        self.inner, self.norm, self.outer = (
            nn.Linear(width, 2 * width),
            norm(2 * width),
            nn.Linear(2 * width, width),
        )

    def region(self, x):
        hidden = F.dropout(self.norm(self.inner(x)).relu(), self.p)
        return F.dropout(self.outer(hidden), self.p)

    def forward(self, x):
        parameters = [p for m in (self.inner, self.norm, self.outer) for p in m.parameters()]
        return x + self.run(self.region, 1, x, *parameters)


def network(run=plain, device="cpu", width=16, depth=3, norm=ms.BatchNorm1d, p=0.3):
    """The same weights for every ``run``."""
    torch.manual_seed(5)
    blocks = [Block(width, run, norm, p) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 4)).to(device)


def values(net):
    """Parameters and buffers by name, as they are now."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def assert_same_values(found, expected):
    """Bitwise, also across devices."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value.cpu(), expected[name].cpu()), name


def distance(found, exact):
    """|found - exact| / |exact|, over all tensors of two lists, in float64 on the CPU."""
    pairs = [
        (f.detach().double().cpu(), e.detach().double().cpu())
        for f, e in zip(found, exact, strict=True)
    ]
    apart = sum((f - e).square().sum() for f, e in pairs)
    return (apart / sum(e.square().sum() for _, e in pairs)).sqrt().item()
