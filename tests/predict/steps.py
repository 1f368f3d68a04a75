"""Training steps to predict and to track, and how the two are compared."""

import pytest
import torch
from torch import nn

import memsave_ext as ms


def mlp(dtype=torch.float32):
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*blocks).to(dtype)


def builder(make_optimizer, prepare=lambda model: model, dtype=torch.float32, rows=512):
    """Of a step as people write it, with the loss read by Python."""

    def build():
        model = prepare(mlp(dtype))
        optimizer = make_optimizer(model.parameters())
        x = torch.randn(rows, 64, dtype=dtype)

        def step():
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return model, optimizer, step

    return build


def without_optimizer(make):
    """``make`` returns a model and a function that returns its loss."""

    def build():
        model, loss = make()

        def step():
            loss().backward()
            model.zero_grad()

        return model, None, step

    return build


def tracked(build):
    model, optimizer, step = build()
    step()
    with ms.memory.track(model, optimizer) as t:
        step()
    return t


def assert_same(build):
    """All figures, to the byte. Returns the prediction and the track."""
    predicted, t = ms.memory.predict(build), tracked(build)
    assert (predicted.peak, predicted.live) == (t.peak, t.live)
    assert predicted.at_peak == t.at_peak
    assert predicted.peak_phase == t.peak_phase
    assert sorted((s.bytes, s.name, s.module) for s in predicted.top(1000)) == sorted(
        (s.bytes, s.name, s.module) for s in t.top(1000)
    )
    return predicted, t


def assert_near(build, most, tracked=tracked):
    """``most``: by which share of it the peak may be off. Returns the prediction and the track."""
    predicted, t = ms.memory.predict(build), tracked(build)
    assert predicted.peak == pytest.approx(t.peak, rel=most)
    return predicted, t
