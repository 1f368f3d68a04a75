"""Where nothing records a block: without the native part, and on fake tensors nobody predicts."""

import copy
import pickle

import pytest
import torch
from processes import run_program
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memsave_ext as ms
from memsave_ext import _native

REASON = "the native part of memsave_ext"
without = pytest.mark.skipif(_native.available, reason="about pure Python")
natively = pytest.mark.skipif(not _native.available, reason="budgets are native")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2))


def train(model, block=None):
    torch.manual_seed(1)
    x = torch.randn(4, 8)
    with block or ms.remat():
        loss = model(x).square().sum()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def plain():
    model = make_model()
    torch.manual_seed(1)
    loss = model(torch.randn(4, 8)).square().sum()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


@without
def test_gradients_are_the_plain_runs():
    model = make_model()
    block = ms.remat(model)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours = train(model, block)
    assert saved and all(map(torch.equal, ours, plain()))
    assert block.figures().operators == 0 == len(block.figures().saved)
    assert block.report().startswith(f"Kept everything: {REASON}")
    for name in ("peak", "least", "budget"):
        with pytest.raises(RuntimeError, match=f"{name} is not known: {REASON}"):
            getattr(block, name)
    with pytest.raises(RuntimeError, match=f"plot is not known: {REASON}"):
        block.plot("never.png")


@without
def test_modules_copies_and_regions():
    model = make_model()
    handle = ms.remat_module(model, by_module=True)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.zero_grad()
        with ms.remat():  # around the module's own
            assert all(map(torch.equal, train(each), plain()))
    assert "Kept everything" in handle.report()
    handle.remove()
    ms.checkpoint_modules(model, nn.Linear)
    model.zero_grad()
    assert all(map(torch.equal, train(model), plain()))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@without
def test_declared_functions_are_let_be():
    own = Double.__dict__["forward"]
    x = torch.randn(4, requires_grad=True)
    with ms.remat(pure=[Double]):
        assert Double.__dict__["forward"] is own
        Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))
    with pytest.raises(TypeError, match="pure must be a list of classes"):
        ms.remat(pure=Double)


@without
def test_blocks_are_entered_once_and_budgets_refused():
    block = ms.remat()
    with block, pytest.raises(RuntimeError, match="is entered once; make another"):
        block.__enter__()
    with pytest.raises(RuntimeError, match="a budget needs the native part.*MEMSAVE_EXT_NATIVE=0"):
        ms.remat(budget="1GB")
    with pytest.raises(RuntimeError, match="a budget needs the native part"):
        ms.remat_module(make_model(), budget=0.5)


def test_one_warning_in_a_process_without_the_native_part():
    code = """
import warnings, memsave_ext as ms
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    ms.remat()
    ms.remat()
assert [w.filename for w in seen] == [__file__ if "__file__" in dir() else "<string>"], seen
print(seen[0].category.__name__, seen[0].message)
"""
    ran = run_program(code, MEMSAVE_EXT_NATIVE="0")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"UserWarning remat keeps everything: {REASON}")


@pytest.mark.parametrize("budget", [None, pytest.param(0.5, marks=natively)])
def test_fakes_that_nobody_predicts(budget, recwarn):
    with FakeTensorMode():
        model = make_model()
        block = ms.remat(model, budget=budget)
        train(model, block)
    if _native.available:
        assert "tensors are fake" in str(recwarn.pop(UserWarning).message)
    assert block.report().startswith("Kept everything")


@without
def test_a_prediction_keeps_everything_too():
    def build(rematerialized):
        model = make_model()
        if rematerialized:
            ms.remat_module(model)
        return model, None, lambda: train_step(model)

    def train_step(model):
        model(torch.randn(4, 8)).square().sum().backward()
        model.zero_grad()

    peaks = {ms.memory.predict(lambda b=b: build(b)).peak for b in (False, True)}
    assert len(peaks) == 1
