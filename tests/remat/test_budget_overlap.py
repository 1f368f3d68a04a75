"""Blocks whose steps overlap, as of two forwards before a backward: budgets count what all hold."""

import contextlib
import gc
import warnings

import pytest
import torch
from test_budget import nothing_is_known_yet  # noqa: F401
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

PROMISED = 1.02
WIDTH, ROWS = 64, 256


def layers(number):
    parts = ((nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(number))
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))


def batches(number):
    return [torch.randn(ROWS, WIDTH) for _ in range(number)]


def two_backwards(block):
    model, xs = layers(6), batches(2)

    def step():
        losses = []
        for x in xs:
            with block(model):
                losses.append(model(x).square().mean())
        for loss in losses:
            loss.backward()

    return step, [model]


def one_backward(block):
    model, xs = layers(6), batches(3)

    def step():
        losses = []
        for x in xs:
            with block(model):
                losses.append(model(x).square().mean())
        torch.stack(losses).sum().backward()

    return step, [model]


def two_towers(block):
    first, second = layers(6), layers(4)
    (x,) = batches(1)

    def step():
        with block(first):
            u = first(x)
        with block(second):
            v = second(x)
        F.cross_entropy(u @ v.T / 10, torch.arange(ROWS)).backward()

    return step, [first, second]


def adversaries(block):
    generator, critic = layers(6), nn.Sequential(layers(6), nn.Linear(WIDTH, 1))
    noise, real = batches(2)

    def step():
        with block(generator):
            made = generator(noise)
        with block(critic):
            loss = F.softplus(-critic(real)).mean()
        with block(critic):
            loss = loss + F.softplus(critic(made.detach())).mean()
        loss.backward()
        with block(critic):
            loss = F.softplus(-critic(made)).mean()
        loss.backward()

    return step, [generator, critic]


def train(program, budget=None):
    """Returns of four steps the gradients and the peak by what was promised, or in bytes; and what
    lived before."""
    torch.manual_seed(0)
    blocks = []

    def block(model):
        if budget is None:
            return contextlib.nullcontext()
        blocks.append(ms.remat(model, budget=budget))
        return blocks[-1]

    step, models = program(block)
    gradients, peaks = [], []
    for _ in range(4):
        gc.collect()
        blocks.clear()
        with ms.memory.track(nn.ModuleList(models)) as track:
            before = track.live
            step()
            peak = track.peak
        gradients += [p.grad.clone() for model in models for p in model.parameters()]
        for model in models:
            model.zero_grad()
        promised = max([budget, *(b.least for b in blocks)]) if budget else 1
        peaks.append(peak / promised)
    dropped = [b.figures().dropped_bytes for b in blocks]
    return gradients, peaks, before, dropped


@pytest.mark.each_value
@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
@pytest.mark.parametrize("program", [two_backwards, one_backward, two_towers, adversaries])
def test_steps_that_overlap_keep_to_the_budget_from_the_second_time_on(program, share):
    plain, (*_, most), before, _ = train(program)
    budget = int(before + share * (most - before))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a budget below the least
        gradients, peaks, _, dropped = train(program, budget)
    assert all(map(torch.equal, plain, gradients))
    assert max(peaks[1:]) <= PROMISED, peaks
    # All together, and not only the last one, for which the least would be left.
    assert sum(dropped) > 0
    if share < 0.5:
        assert all(dropped), dropped


def test_the_same_model_beside_other_steps_is_planned_apart():
    """The second of two forwards has another plan than the first, in every step."""
    torch.manual_seed(0)
    model, xs = layers(6), batches(2)
    dropped = []
    for _ in range(4):
        blocks = [ms.remat(model, budget=900_000) for _ in xs]
        losses = []
        for block, x in zip(blocks, xs, strict=True):
            with warnings.catch_warnings(), block:
                warnings.simplefilter("ignore", UserWarning)
                losses.append(model(x).square().mean())
        torch.stack(losses).sum().backward()
        dropped.append([block.figures().dropped_bytes for block in blocks])
        model.zero_grad()
    assert dropped[1] == dropped[2] == dropped[3]
    assert dropped[1][0] != dropped[1][1]
