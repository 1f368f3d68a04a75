"""memory.predict() of steps with remat against memory.track()."""

import pytest
import torch
import torch.nn.functional as F
from test_memory_predict import tracked
from torch import nn

import memsave_ext as ms


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))).clamp_(max=4.0))


def builder(make_optimizer=torch.optim.AdamW, **options):
    def build():
        model = nn.Sequential(*[Block() for _ in range(4)])
        ms.remat_module(model, **options)
        optimizer = make_optimizer(model.parameters())
        x = torch.randn(2048, 64)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


def in_backward(params):
    return ms.AdamW(params, in_backward=True)


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, in_backward])
def test_everything_dropped(make_optimizer):
    build = builder(make_optimizer, _everything=True)
    predicted, t = ms.memory.predict(build), tracked(build)
    assert predicted.live == t.live
    assert predicted.peak == pytest.approx(t.peak, rel=0.05 if ms._native.available else 1e-5)
    assert any(region.phase == "rematerialize" for region in predicted.regions)


def test_what_is_cheap():
    def without():
        model, optimizer, step = builder()()
        del model.forward
        return model, optimizer, step

    assert ms.memory.predict(builder()).peak < 0.8 * ms.memory.predict(without).peak


def test_times_of_fakes_are_not_kept():
    from memsave_ext.rematerialization.fallback.operators import operator_of

    operator = operator_of(torch.ops.aten.gelu.default)
    before = operator._seconds_per_byte, operator._measured
    ms.memory.predict(builder())
    assert (operator._seconds_per_byte, operator._measured) == before


@pytest.mark.skipif(not ms._native.available, reason="a budget needs the native part")
def test_a_budget_is_said_to_be_left_out():
    with pytest.warns(UserWarning, match="whichever is less"):
        predicted = ms.memory.predict(builder(budget=1 << 20))
    with pytest.warns(UserWarning, match="whichever is less"):
        assert ms.memory.predict(builder(budget=0.5)).peak == predicted.peak
