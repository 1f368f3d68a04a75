"""Random sequences of training steps: rows stepped give the same bits and errors as a gradient that
a hook keeps whole."""

import random

import pytest
import torch
from modes import MODES
from rows import Model, whole
from sampling import some

import memsave_ext as ms

pytestmark = pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")

OPTIONS = [mode for mode in MODES if "clipped" not in mode]


def plain(model):
    model.loss().backward()


def scaled(model):
    (model.loss() * 0.5).backward()


def smoothed(model):
    model.loss(softcap=4.0, label_smoothing=0.1).backward()


def each_token(model):
    losses = model.loss(reduction="none")
    (losses * torch.arange(len(losses))).mean().backward()


def accumulated(model):
    with model.optimizer.accumulate():
        plain(model)
    plain(model)


def left_over(model):
    with model.optimizer.accumulate():
        plain(model)


def paused(model):
    with model.optimizer.paused():
        plain(model)
    plain(model)


def kept(model):
    with model.optimizer.paused(keep=True):
        plain(model)


def retained(model):
    model.loss().backward(retain_graph=True)


def tied(model):
    (model.loss() + model.head.square().mean()).backward()


def in_two_passes(model):
    loss = model.loss()
    with model.optimizer.norm_pass(1.0):
        loss.backward(retain_graph=True)
    loss.backward()


def twice(model):
    plain(model)
    plain(model)


def to_the_head(model):
    model.loss().backward(inputs=[model.head])


def offloaded(model):
    with torch.autograd.graph.save_on_cpu():
        loss = model.loss()
    loss.backward()


def in_remat(model):
    with ms.remat():
        loss = model.loss()
    loss.backward()


def frozen(model):
    model.head.requires_grad_(False)
    plain(model)
    model.head.requires_grad_(True)


def loaded(model):
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    plain(model)


STEPS = [
    plain, plain, plain, scaled, smoothed, each_token, accumulated, left_over, paused, kept,
    retained, tied, in_two_passes, twice, to_the_head, offloaded, in_remat, frozen, loaded,
]  # fmt: skip


def run(model, program):
    """(values and states, errors)."""
    errors = []
    for step in program:
        model.optimizer.zero_grad()
        for part in (lambda step=step: step(model), model.optimizer.step):
            try:
                part()
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))
                model.optimizer.zero_grad()
    return list(model.tensors()), errors


@pytest.mark.parametrize("first", some(range(0, 80, 20), 2))
def test_programs(first):
    for seed in range(first, first + 20):
        choose = random.Random(seed)
        dtype, options = MODES[choose.choice(OPTIONS)]
        program = [choose.choice(STEPS) for _ in range(choose.randint(2, 8))]
        results = []
        for make in (whole, lambda model: model):
            results.append(run(make(Model(dtype, classes=600, **options)), program))
        (expected, errors), (found, errors_of_it) = results
        told = seed, [step.__name__ for step in program]
        assert errors_of_it == errors, told
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), told
