"""memory.predict() of what oneDNN's LSTM on the CPU makes for itself."""

import pytest
import torch
from torch import nn

import memsave_ext as ms

LAYERS = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "several layers": {"num_layers": 3, "dropout": 0.1},
    "both": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without biases": {"bias": False},
    "in eval": {},
    "projected": {"proj_size": 32},  # by other kernels
}


def builder(kind, name, dtype, steps=60, batch=16, width=100, hidden=128):
    def build():
        layer = getattr(nn, kind)(width, hidden, **LAYERS[name]).to(dtype)
        layer.train(name != "in eval")
        x = torch.randn(steps, batch, width, dtype=dtype)

        def step():
            output, state = layer(x)
            (output.float().square().mean() + state[0].float().sum()).backward()
            layer.zero_grad()

        return layer, None, step

    return build


def assert_near(build, most):
    model, _, step = build()
    step()
    with ms.memory.track(model) as t:
        step()
    assert ms.memory.predict(build).peak == pytest.approx(t.peak, rel=most)
    return t.peak


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other kernels elsewhere"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_peaks(name, dtype):
    assert_near(builder("LSTM", name, dtype), 0.02)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other kernels elsewhere"
)
@pytest.mark.parametrize("sizes", [(1, 1, 16, 16), (300, 2, 256, 64), (5, 64, 90, 256)])
def test_sizes(sizes):
    build = builder("LSTM", "plain", torch.float32, *sizes)
    # Of tiny ones the pages, to which oneDNN rounds up what kernels take, are much.
    assert_near(build, 0.02 if min(sizes) > 1 else 0.2)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_other_kinds(kind):
    assert_near(builder(kind, "several layers", torch.float32), 0.001)
