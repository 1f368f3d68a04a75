"""memory.predict() of what kernels on the CPU copy, and of gradients that fakes do otherwise."""

import pytest
import torch
import torch.nn.functional as F
from test_predict import tracked
from torch import nn

import memsave_ext as ms

BF16 = torch.bfloat16
CASES = {
    "mixed dtypes": lambda x, y: x.to(BF16) * y,
    "compared dtypes": lambda x, y: x * (x.to(BF16) > y),
    "in place": lambda x, y: (x.to(BF16) * 1).add_(y),
    "a chosen dtype": lambda x, y: torch.where(y > 0.5, x.to(BF16), y),
    "complex and real": lambda x, y: (torch.complex(x, y) * y).abs(),
    "narrow mean": lambda x, y: x.to(BF16).mean(),
    "sums around others": lambda x, y: x.to(BF16).view(8, 8, 80).sum((0, 2)),
    "wide sum": lambda x, y: x.to(BF16).sum(dtype=torch.float32),
    "counted": lambda x, y: x / (y > 0.5).sum(),
    "mse": F.mse_loss,
    "narrow mse": lambda x, y: F.mse_loss(x.to(BF16), y.to(BF16)),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft margin": F.soft_margin_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "with logits": F.binary_cross_entropy_with_logits,
    "group norm": lambda x, y: F.group_norm(x.to(BF16), 4),
    "kthvalue": lambda x, y: x.kthvalue(3).values,
    "median": lambda x, y: x.median(),
    "max": lambda x, y: x.max(),
    "min": lambda x, y: x.min(),
    "amax": lambda x, y: x.amax(1),
    "prod": lambda x, y: x.prod(),
    "prod of rows": lambda x, y: x.prod(1),
    "cumprod": lambda x, y: x.cumprod(1),
    "vander": lambda x, y: torch.linalg.vander(x[:4]),
    "masked prod": lambda x, y: torch.masked.prod(x, 1, mask=y > 0.5),
    "narrow gather": lambda x, y: x.to(BF16).gather(1, (y * 10).long()),
    "powers of rows": lambda x, y: x[:, :1] ** x[0],
    "masked scatter": lambda x, y: y.masked_scatter(y >= 0, x),
}


@pytest.mark.skipif(not ms._native.available, reason="a track sees what kernels make natively")
@pytest.mark.parametrize("name", CASES)
def test_peaks(name):
    def build():
        model = nn.Module()
        model.x, model.y = nn.Parameter(torch.rand(64, 80) + 0.5), nn.Buffer(torch.rand(64, 80))

        def step():
            CASES[name](model.x * 1, model.y).sum().backward()
            model.zero_grad()

        return model, None, step

    assert ms.memory.predict(build).peak == pytest.approx(tracked(build).peak, rel=0.003)
