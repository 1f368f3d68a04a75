"""What predictions remember of operators, so that they compute each kind of call once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memsave_ext as ms
from memsave_ext.fakes import repeats


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.silu(self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.once
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operator_of_a_decoder_is_remembered(device, monkeypatch):
    monkeypatch.setattr(repeats, "_of_process", {})
    model = nn.Sequential(Block(), Block()).bfloat16()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    options = {"loss": lambda y: y.sum(), "device": device}
    first = ms.memory.predict(model, None, x, **options)
    known = {key[0] for of_device in repeats._of_process.values() for key in of_device}
    names = {name.partition("::")[2] for name in known}
    assert {"silu", "silu_backward", "addmm", "mm"} <= names
    attention = {name for name in names if name.startswith("_scaled_dot_product")}
    assert len(attention) == 2  # forward and backward
    second = ms.memory.predict(model, None, x, **options)
    assert second.peak == first.peak > 0 and second.at_peak == first.at_peak


def test_an_operator_that_may_return_a_view_is_not():
    assert not repeats._is_fitting(torch.ops.aten.reshape.default)
    assert not repeats._is_fitting(torch.ops.aten.contiguous.default)
    assert repeats._is_fitting(torch.ops.aten.silu_backward.default)
