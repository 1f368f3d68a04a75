"""memory.predict() of what torch's attention on the CPU makes for itself."""

import pytest
import torch
import torch.nn.functional as F
from test_predict import tracked
from torch import nn

import memsave_ext as ms


class Attention(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.scale, self.transposed = nn.Parameter(torch.ones(1)), transposed

    def forward(self, q, k):
        out = F.scaled_dot_product_attention(q * self.scale, k, k)
        return out.transpose(1, 2).flatten(2) if self.transposed else out


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(17, 17), (128, 100), (200, 200), (800, 600)])
def test_peaks(queries, keys, transposed):
    def build():
        model = Attention(transposed)
        q, k = torch.randn(2, 4, queries, 16), torch.randn(2, 4, keys, 16)

        def step():
            model(q, k).square().mean().backward()
            model.zero_grad()

        return model, None, step

    # Of several threads not all hold their small buffers at the same time.
    assert ms.memory.predict(build).peak == pytest.approx(tracked(build).peak, rel=0.002)
