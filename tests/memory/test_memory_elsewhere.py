"""What memory.track() and memory.predict() say of weights, gradients and states in a folder."""

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext.shared.table import format_bytes

LARGE = 256 * 256 * 4  # bytes of a weight; biases are too small to lie elsewhere


def build(folder, **elsewhere):
    """Returns a model, its optimizer and a step."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    if elsewhere.pop("weights", False):
        ms.weights_on(model, folder)
    optimizer = ms.AdamW(model.parameters(), **dict.fromkeys(elsewhere, folder))
    x = torch.randn(8, 256)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


ALL = {"parameters": 2 * LARGE, "gradients": 2 * LARGE, "optimizer": 4 * LARGE}
KINDS = {
    "nothing": ({}, {}),
    "weights": ({"weights": True}, {"parameters": ALL["parameters"]}),
    "gradients": ({"grads_on": True}, {"gradients": ALL["gradients"]}),
    "states": ({"states_on": True}, {"optimizer": ALL["optimizer"]}),
    "all": ({"weights": True, "grads_on": True, "states_on": True}, ALL),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_elsewhere(tmp_path, kind):
    options, expected = KINDS[kind]
    model, optimizer, step = build(tmp_path, **options)
    with ms.memory.track(model, optimizer) as t:
        step()
        step()
    assert t.most_elsewhere == expected
    assert list(t.most_elsewhere) == [name for name in ALL if name in expected]
    assert t.to_json()["most_elsewhere"] == expected
    said = " ".join(t.report().split())  # a long line is broken
    for category, size in expected.items():
        assert f"{format_bytes(size)} of {category}" in said, said
    assert ("elsewhere at most" in said) == bool(expected)
    # What is there is not counted as memory.
    whole = {"parameters": 2 * LARGE + 2048, "optimizer": 4 * LARGE + 4096}
    for category, size in whole.items():
        here = t.at_peak[category]
        assert (here < size - LARGE) == (category in expected), (category, here)

    optimizer.zero_grad()
    predicted = ms.memory.predict(lambda: build(tmp_path, **options))
    assert predicted.most_elsewhere == expected


def test_a_step_in_backward_has_no_gradients_elsewhere(tmp_path):
    model = nn.Linear(256, 256)
    optimizer = ms.AdamW(model.parameters(), in_backward=True, states_on=tmp_path)
    with ms.memory.track(model, optimizer) as t:
        model(torch.randn(8, 256)).sum().backward()
        optimizer.step()
    assert t.most_elsewhere == {"optimizer": 2 * LARGE}


def test_states_of_several_optimizers(tmp_path):
    """Those of all together; and an optimizer may have states that are no parameter's."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizers = [ms.AdamW(part.parameters(), states_on=tmp_path) for part in model]
    optimizers[1].state["of all"] = {"average": torch.zeros(256, 256)}
    with ms.memory.track(model, optimizers) as t:
        model(torch.randn(8, 256)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert t.most_elsewhere == {"optimizer": ALL["optimizer"]}


def test_since_the_peak_was_reset(tmp_path):
    model, optimizer, step = build(tmp_path, grads_on=True, states_on=True)
    with ms.memory.track(model, optimizer) as t:
        step()
        t.reset_peak()
        assert t.most_elsewhere == {}
        model(torch.randn(8, 256)).sum()
    assert t.most_elsewhere == {}


def test_weights_that_came_back(tmp_path):
    model = nn.Linear(256, 256)
    handle = ms.weights_on(model, tmp_path)
    handle.remove()
    with ms.memory.track(model) as t:
        model(torch.randn(8, 256)).sum().backward()
    assert t.most_elsewhere == {}
