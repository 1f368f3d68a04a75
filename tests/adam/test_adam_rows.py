"""Rows of a weight stepped in backward: the same bits as with the whole gradient."""

import copy
import warnings

import pytest
import torch
from helpers import assert_equal, run_threads
from modes import MODES, every_mode
from rows import CLASSES, FEATURES, PYTHON, Model, expect_whole, reasons, train, whole

import memsave_ext as ms
from memsave_ext import _native

natively = pytest.mark.skipif(_native.module is None, reason="in pure Python the gradient is whole")


@every_mode
def test_same_bits_as_the_whole_gradient(mode):
    dtype, options = MODES[mode]
    one, other = whole(Model(dtype, **options)), Model(dtype, **options)
    expect_whole(train(one), "a hook on the weight has to see")
    found = train(other)
    if "max_grad_norm" in options:
        expect_whole(found, "max_grad_norm needs the norm of the whole gradient")
    else:
        assert found == ([PYTHON] * 3 if _native.module is None else [])
    assert_equal(list(one.tensors()), list(other.tensors()))
    assert all(state["step"] == 3 for state in other.optimizer.state.values())


def test_a_state_that_is_made_anew_where_rows_are_refused_keeps_its_low_part():
    """A momentum that begins later needs a state again, whose low part is that of before."""
    runs = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(CLASSES, FEATURES).bfloat16())
        optimizer = ms.SGD(
            [weight], lr=1e-3, bf16="split", in_backward=in_backward, max_grad_norm=1e9
        )
        for number in range(4):
            optimizer.param_groups[0]["momentum"] = 0.9 if number >= 2 else 0.0
            torch.manual_seed(number)
            x, labels = torch.randn(32, FEATURES).bfloat16(), torch.randint(CLASSES, (32,))
            ms.linear_cross_entropy(x, weight, labels, chunk_size=256).backward()
            optimizer.step()
            optimizer.zero_grad()
            runs.append(optimizer.fp32_parameters()[0])
    assert_equal(runs[4:], runs[:4])
    assert not torch.equal(runs[-1], runs[-1].bfloat16())


class InRows(torch.autograd.Function):
    """Has a given gradient, and steps with so many rows of it at a time."""

    @staticmethod
    def forward(ctx, weight, grad, rows):
        ctx.given = grad, rows
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        grad, rows = ctx.given
        if rows is None:
            return grad, None, None
        begun = _native.module.begin_adam_rows(0)
        for first in range(0, len(grad), rows):
            begun.step(first, grad[first : first + rows])
        return None, None, None


@natively
@every_mode
def test_the_number_of_rows_changes_no_bit(mode):
    dtype, options = MODES[mode]
    if "max_grad_norm" in options:
        return
    results = []
    for rows in (None, 256, 512, 768, 8192):
        model = Model(dtype, **options)
        for i in range(3):
            generator = torch.Generator().manual_seed(i)
            grad = torch.randn(CLASSES, FEATURES, generator=generator).to(dtype)
            InRows.apply(model.head, grad, rows).backward()
            model.optimizer.step()
        results.append([model.head.detach(), *model.optimizer.state[model.head].values()])
    for result in results[1:]:
        assert_equal(result, results[0])


@natively
def test_rows_are_checked():
    model = Model()
    grad = torch.randn(CLASSES, FEATURES)

    class Wrong(InRows):
        @staticmethod
        def backward(ctx, _):
            begun = _native.module.begin_adam_rows(0)
            with pytest.raises(RuntimeError, match="these rows cannot be stepped"):
                begun.step(1, grad[:32])  # not the beginning of a block
            with pytest.raises(RuntimeError, match="these rows cannot be stepped"):
                begun.step(768, grad[:256])  # more than there are
            with pytest.raises(RuntimeError, match="these rows cannot be stepped"):
                begun.step(0, grad[:256].double())
            return None, None, None

    Wrong.apply(model.head, None, None).backward()
    with pytest.raises(RuntimeError, match="for the backward of an autograd node"):
        _native.module.begin_adam_rows(0)


@pytest.mark.parametrize("lr", ["tensor", "scheduled"])
def test_learning_rates(lr):
    models = [whole(Model()), Model()]
    for model in models:
        for i in range(3):
            rate = 0.1 / (i + 1)
            model.optimizer.param_groups[0]["lr"] = torch.tensor(rate) if lr == "tensor" else rate
            model.loss().backward()
            model.optimizer.step()
    assert_equal(list(models[0].tensors()), list(models[1].tensors()))


def test_options_of_the_loss():
    kinds = [
        {"softcap": 5.0, "label_smoothing": 0.1},
        {"reduction": "sum", "weight": torch.rand(CLASSES)},
        {"linear_bias": torch.randn(CLASSES)},
    ]
    for options in kinds:
        one, other = whole(Model()), Model()
        train(one, **options), train(other, **options)
        assert_equal(list(one.tensors()), list(other.tensors()))


def test_autocast():
    models = [whole(Model()), Model()]
    for model in models:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss()
        loss.backward()
        model.optimizer.step()
    assert_equal(list(models[0].tensors()), list(models[1].tensors()))


def test_saved_and_loaded_in_between():
    one, other = Model(), Model()
    train(one, 4)
    train(other, 2)
    again = Model()
    for to, of in ((again.first, other.first), (again.head, other.head)):
        to.data.copy_(of.data)
    again.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    again.made = 2
    train(again, 2)
    assert_equal(list(one.tensors()), list(again.tensors()))


@natively
def test_no_gradient_of_the_weight_exists():
    model = Model(classes=20_000)
    train(model, 1)  # makes the states
    loss = model.loss()
    with ms.memory.track() as run:
        loss.backward()
    model.optimizer.step()
    assert run.peak < 0.7 * model.head.nbytes


@natively
def test_memory_track_watches_and_changes_nothing():
    model = Model(classes=20_000)
    module = torch.nn.ParameterList([model.first, model.head])
    with reasons() as found, ms.memory.track(module, model.optimizer):
        model.loss().backward()
        model.optimizer.step()
    assert found == []


@natively
def test_an_error_after_some_rows(monkeypatch):
    model = Model()
    train(model, 1)
    before = model.head.detach().clone()
    real = torch.mm
    calls = []

    def fail_late(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("out of memory, say")
        return real(*args, **kwargs)

    loss = model.loss()
    monkeypatch.setattr(torch, "mm", fail_late)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        loss.backward()
    monkeypatch.undo()
    assert not torch.equal(model.head, before)
    with pytest.raises(RuntimeError, match="a backward raised after 1 parameters"):
        model.optimizer.step()
    model.optimizer.zero_grad()
    train(model, 1)


def test_a_second_backward_in_one_step_raises():
    model = Model()
    model.loss().backward()
    with pytest.raises(RuntimeError, match="receives a second gradient in one step"):
        model.loss().backward()
    model.optimizer.zero_grad()


def test_a_gradient_after_rows_were_stepped_raises():
    model = Model()
    model.loss().backward()
    with pytest.raises(RuntimeError, match="receives a second gradient in one step"):
        (model.head.sum() * 2).backward()
    model.optimizer.zero_grad()


def test_a_graph_from_before_the_step_is_refused():
    model = Model()
    loss = model.loss()
    model.optimizer.zero_grad()
    model.loss().backward()
    model.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_optimizers_that_are_gone_or_let_go():
    model = Model()
    model.optimizer.remove_hooks()
    with reasons() as found:
        model.loss().backward()
    expect_whole(found, "no optimizer of memsave_ext steps the weight in backward")
    model = Model()
    del model.optimizer
    model.loss().backward()
    assert model.head.grad is not None
    model = Model()
    model.optimizer.param_groups[0]["params"] = [model.first]
    with reasons() as found:
        model.loss().backward()
    assert model.head.grad is not None
    expect_whole(found, "the weight has been removed from the optimizer")


def test_threads_with_models_of_their_own():
    models = [Model() for _ in range(4)]
    expected = Model()
    for _ in range(5):
        expected.loss().backward()
        expected.optimizer.step()

    def work(i):
        for _ in range(5):
            models[i].loss().backward()
            models[i].optimizer.step()

    run_threads(work, 4)
    for model in models:
        assert_equal(list(model.tensors()), list(expected.tensors()))


def test_the_reason_is_told_with_debug_only():
    model = whole(Model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.loss().backward()
