"""memory.predict() of training loops as people write them, against memory.track()."""

import math

import pytest
import steps
import torch
from helpers import Shared
from steps import mlp
from torch import nn

import memsave_ext as ms


def assert_near(build, most=1e-4):
    predicted, t = steps.assert_near(build, most)
    assert predicted.peak_phase == t.peak_phase


CHECKS = {
    "isfinite": lambda loss, model: not torch.isfinite(loss),
    "isnan": lambda loss, model: torch.isnan(loss).any() or torch.isinf(loss),
    "itself": lambda loss, model: bool(loss != loss),
    "item": lambda loss, model: not math.isfinite(loss.item()) or loss.item() > 1e4,
    "large": lambda loss, model: loss > 1e4,
    "parameters": lambda loss, model: any(torch.isnan(p).any() for p in model.parameters()),
    "count": lambda loss, model: torch.isnan(loss).sum() + torch.isinf(loss).sum() > 0,
    "all": lambda loss, model: not torch.isfinite(loss.detach().clone()).all(),
    "a sum from zero": lambda loss, model: (torch.zeros(()) + loss.detach()).item() == 0,
    "added to zero": lambda loss, model: torch.zeros(()).add_(loss.detach()).item() == 0,
    "filled": lambda loss, model: torch.full((), 3.0).item() != 3,
    "close": lambda loss, model: not torch.allclose(loss, loss),
}


@pytest.mark.parametrize("name", CHECKS)
def test_steps_that_look_for_numbers_that_are_not_finite(name):
    stepped = Shared()

    def build():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        x = torch.randn(4, 64)

        def step():
            loss = model(x).square().mean()
            if CHECKS[name](loss, model):
                return
            assert not torch.isnan(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stepped.append(name)

        return model, optimizer, step

    assert_near(build)
    assert len(stepped.values()) == 4


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, ms.AdamW])
def test_grad_scaler(make, clips):
    stepped = Shared()

    def build():
        model = mlp()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        # Of few rows torch's has its peak in its step; ours makes temporaries there in pure Python.
        x = torch.randn(4 if make is torch.optim.AdamW else 512, 64)
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))

        def step():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return model, optimizer, step

    assert_near(build, 0.005)
    assert len(stepped.values()) == 4


@pytest.mark.parametrize("history", [5, 30])
def test_lbfgs(history):
    """Its history is full after some steps; curvature is positive, as the loss is convex."""

    def build():
        model = nn.Linear(64, 64)
        optimizer = torch.optim.LBFGS(
            model.parameters(),
            lr=0.01,
            history_size=history,
            tolerance_grad=0,
            tolerance_change=0,
        )
        x, y = torch.randn(128, 64), torch.randn(128, 64)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        return model, optimizer, lambda: optimizer.step(closure)

    model, optimizer, step = build()
    for _ in range(3):
        step()
    with ms.memory.track(model, optimizer) as t:
        step()
    assert ms.memory.predict(build).peak == pytest.approx(t.peak, rel=0.02)
