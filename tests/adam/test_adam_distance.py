"""How far low precisions are from Adam in float64, after 200 and after 2,000 steps."""

import math

import pytest
import torch
from modes import BF16, FP32, FP64
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

ELEMENTS = 8192
LR = 1e-4
MODES = {
    "split8": (BF16, {"bf16": "split8"}),
    "8bit": (FP32, {"state_dtype": "8bit"}),
    "split8, 8bit": (BF16, {"bf16": "split8", "state_dtype": "8bit"}),
    "4bit": (FP32, {"state_dtype": "4bit"}),
    "stochastic, 4bit": (BF16, {"bf16": "stochastic", "state_dtype": "4bit"}),
}
# Of gradients whose mean is `snr` of their noise, with scales in a block that are exp(spread * N).
SIGNALS = {"noisy": (0.1, 0.0), "even": (1.0, 0.0), "uneven": (1.0, 1.0)}
# Distances after 200 and 2,000 steps as they were measured; the bounds are 1.3 times as much.
#
# split8: weights around 0.02 are 2^-21 apart or less. A rounding at random is off by half of that
# at most, n of them by sqrt(n) as much, 3e-6 and 1e-5; the way is n steps of up to 1e-4, of noisy
# gradients of a tenth of it: a thousandth of it, which falls where noise cancels in the way, too.
# 8bit: a step of the codes is 1.4 % of the largest exp_avg of the block, 0.7 % of the root: of a
# fifth of it, which elements are where scales are uneven, 3 to 7 %. exp_avg is right on average;
# what stays is the root's, which forgets in 1,000 steps and is rounded in all of them.
# 4bit: 19 % and 9 % of the largest. Of exp_avg the noise averages out (the noisy ones get closer);
# of the root what is below a 64th of the largest is taken for that, and its step is too short.
MEASURED = {
    ("split8", "noisy"): (1.1e-3, 4.8e-4),
    ("split8", "even"): (2.3e-4, 2.5e-4),
    ("split8", "uneven"): (2.3e-4, 2.6e-4),
    ("8bit", "noisy"): (0.022, 0.024),
    ("8bit", "even"): (0.021, 0.033),
    ("8bit", "uneven"): (0.050, 0.062),
    ("split8, 8bit", "noisy"): (0.022, 0.024),
    ("split8, 8bit", "even"): (0.021, 0.033),
    ("split8, 8bit", "uneven"): (0.050, 0.062),
    ("4bit", "noisy"): (0.25, 0.16),
    ("4bit", "even"): (0.15, 0.14),
    ("4bit", "uneven"): (0.35, 0.28),
    ("stochastic, 4bit", "noisy"): (0.33, 0.18),
    ("stochastic, 4bit", "even"): (0.17, 0.15),
    ("stochastic, 4bit", "uneven"): (0.36, 0.29),
}


def distances(dtype, options, counts, snr, spread):
    """Of where parameters are, over the way that the exact ones have gone, after so many steps."""
    generator = torch.Generator().manual_seed(1)
    start = (0.02 * torch.randn(ELEMENTS, generator=generator)).bfloat16()
    mean = snr * torch.randn(ELEMENTS, generator=generator)
    scale = (spread * torch.randn(ELEMENTS, generator=generator)).exp()
    param, exact = (nn.Parameter(start.to(t, copy=True)) for t in (dtype, FP64))
    optimizer = ms.Adam([param], lr=LR, **options)
    expected = torch.optim.Adam([exact], lr=LR, fused=True)
    found = []
    for number in range(1, counts[-1] + 1):
        grad = ((mean + torch.randn(ELEMENTS, generator=generator)) * scale).bfloat16()
        param.grad, exact.grad = grad.to(dtype), grad.double()
        optimizer.step()
        expected.step()
        if number in counts:
            (master,) = optimizer.fp32_parameters()
            way = (exact.detach() - start).norm()
            found.append(((master - exact.detach()).norm() / way).item())
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("mode", MODES)
def test_distance_from_exact_adam(mode, signal):
    counts = (200, 2000) if _native.available else (200,)  # pure Python takes seconds for 200
    found = distances(*MODES[mode], counts, *SIGNALS[signal])
    for distance, measured in zip(found, MEASURED[mode, signal], strict=False):
        assert math.isfinite(distance) and distance < 1.3 * measured
