"""What people's models do beside computing happens as often, and with the same objects, where their
steps run ahead on fake tensors as where they do not."""

import contextlib
import random
import warnings

import numpy as np
import pytest
import torch
import user_code
from sampling import share
from user_code import MODELS, WIDTH, noted

import memsave_ext as ms

with contextlib.suppress(ImportError):  # for reports: it draws a random number as it is imported
    import rich.style  # noqa: F401

pytestmark = pytest.mark.skipif(not ms._native.available, reason="budgets need the native part")
STEPS = 3
# Those that no run ahead can follow, and a part of the clause that says why.
MEASURED = {
    "LoopsOverValues": "went differently",
    "SwallowsErrors": "depends on the values of tensors",
    "DrawsInPython": "",
    "Exits": "it calls sys.exit()",
    "ThreadPools": "made no progress",
    "Numpy": "reads the values of tensors",
    "InnerGradients": "",
}


def loss_of(y):
    return y.square().mean()


def nothing(model, optimizer, x):
    pass


def within_a_budget(model, optimizer, x):
    return ms.remat_module(model, budget=0.6)


def unless_measured(model):
    """Lets those that no run ahead can follow say so."""
    may_fail = type(model).__name__ in MEASURED
    return contextlib.suppress(RuntimeError) if may_fail else contextlib.nullcontext()


def predicted(model, optimizer, x):
    with unless_measured(model):
        assert ms.memory.predict(model, optimizer, x, loss=loss_of, timeout=20).peak > 0


def fitted(model, optimizer, x):
    with unless_measured(model):
        ms.fit(model, optimizer, x, budget="1GB", loss=loss_of, verbose=False, timeout=20)


def train(name, prepare):
    """Returns all that three steps leave: losses, gradients with their types, what was noted, and
    random numbers; and what ``prepare`` has returned."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    noted.clear()
    user_code.table.cache_clear()
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    x = torch.randn(24, WIDTH)
    seen, made = [], None
    handle = prepare(model, optimizer, x)
    for _ in range(STEPS):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of budgets that are too small, and of what is kept here
            loss = loss_of(model(x))
            loss.backward()
            seen.append(loss.detach())
            seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            seen += [type(p.grad) for p in model.parameters()]
            optimizer.step()
        optimizer.zero_grad()
        made = made or (handle and " ".join(handle.report().split()))
    drawn = torch.rand(3), random.random(), np.random.rand()
    return [seen, list(noted), drawn, [type(p) for p in model.parameters()]], made


def same(one, other):
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("name", share(MODELS, 2))
def test_steps_within_a_budget(name, capsys):
    plain, _ = train(name, nothing)
    printed = capsys.readouterr().out
    ms._native.module.remat_forget()
    budgeted, report = train(name, within_a_budget)
    for one, other in zip(plain, budgeted, strict=True):
        assert same(one, other)
    assert capsys.readouterr().out == printed
    if name in MEASURED:
        assert MEASURED[name] in report
    else:
        assert "which is measured" not in report, report


@pytest.mark.each_value
@pytest.mark.parametrize("prepare", [predicted, fitted])
@pytest.mark.parametrize("name", share(MODELS, 3, 1))
def test_steps_that_were_predicted(name, prepare, capsys):
    plain, _ = train(name, nothing)
    printed = capsys.readouterr().out
    after, _ = train(name, prepare)
    for one, other in zip(plain, after, strict=True):
        assert same(one, other)
    assert capsys.readouterr().out == printed


def test_a_count_of_them():
    assert len(MODELS) >= 40
