"""memory.predict() of what oneDNN's convolutions make for themselves."""

import pytest
import torch
from test_predict import tracked
from torch import nn

import memsave_ext as ms

# Input channels and size, and the convolution. A convolution of images needs no gradient of them.
CASES = {
    "3 x 3": (16, 16, lambda: nn.Conv2d(16, 32, 3, padding=1)),
    "to few channels": (48, 16, lambda: nn.Conv2d(48, 12, 3, padding=1)),
    "strided": (64, 16, lambda: nn.Conv2d(64, 64, 3, stride=2, padding=1)),
    "1 x 1, strided": (64, 16, lambda: nn.Conv2d(64, 64, 1, stride=2)),
    "dilated on tiny images": (64, 4, lambda: nn.Conv2d(64, 64, 3, padding=2, dilation=2)),
    "few channels": (3, 32, lambda: nn.Conv2d(3, 24, 3, stride=2, padding=1)),
    "patches": (3, 64, lambda: nn.Conv2d(3, 64, 16, stride=16)),
    "depthwise": (48, 16, lambda: nn.Conv2d(48, 48, 3, padding=1, groups=48)),
    "wide depthwise": (48, 16, lambda: nn.Conv2d(48, 48, 7, padding=3, groups=48)),
    "transposed": (32, 16, lambda: nn.ConvTranspose2d(32, 48, 3)),
    "transposed, strided": (64, 16, lambda: nn.ConvTranspose2d(64, 32, 2, stride=2)),
    "transposed, to few channels": (20, 32, lambda: nn.ConvTranspose2d(20, 3, 3)),
    "transposed, in groups": (32, 16, lambda: nn.ConvTranspose2d(32, 32, 4, 2, 1, groups=4)),
    "transposed, 1 x 1": (32, 16, lambda: nn.ConvTranspose2d(32, 48, 1)),
    "depthwise on tiny images": (48, 2, lambda: nn.Conv2d(48, 48, 7, padding=3, groups=48)),
}


@pytest.fixture(autouse=True)
def one_thread():
    """As some kernels add up gradients of weights in memory of each thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def builder(case, memory_format):
    channels, size, make = CASES[case]

    def build():
        model = make()
        x = torch.randn(4, channels, size, size).contiguous(memory_format=memory_format)
        x.requires_grad_(channels > 3)

        def step():
            x.grad = None
            model(x).square().mean().backward()
            model.zero_grad()

        return model, None, step

    return build


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other kernels elsewhere"
)
@pytest.mark.parametrize(
    ("case", "memory_format"),
    [(case, torch.contiguous_format) for case in CASES]
    + [(case, torch.channels_last) for case in CASES if "depthwise" in case]
    + [(case, torch.channels_last) for case in ("transposed", "transposed, strided")],
)
def test_peaks(case, memory_format):
    build = builder(case, memory_format)
    assert ms.memory.predict(build).peak == pytest.approx(tracked(build).peak, rel=0.01)


@pytest.mark.parametrize("make", [nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_transposed_in_float64(make):
    """Which oneDNN has no kernels for."""

    def build():
        model = make(16, 24, 2, 2).double()
        x = torch.randn(4, 16, *[8] * (model.weight.dim() - 2), dtype=torch.float64)
        x.requires_grad_(True)

        def step():
            x.grad = None
            model(x).square().mean().backward()
            model.zero_grad()

        return model, None, step

    assert ms.memory.predict(build).peak == pytest.approx(tracked(build).peak, rel=0.01)
