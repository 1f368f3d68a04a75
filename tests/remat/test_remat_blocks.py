"""The front of rematerialization: blocks, modules in place, reports."""

import copy
import gc
import inspect
import pickle
import threading

import pytest
import torch
from helpers import host_memory_grows
from torch import nn

import memsave_ext as ms
from memsave_ext.remat import RematFigures


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x, fails=False):
        x = self.down(self.act(self.up(x)))
        if fails:
            raise ZeroDivisionError
        return x


def net():
    torch.manual_seed(0)
    return Net(), torch.randn(512, 64)


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_what_a_block_tells():
    model, x = net()
    with ms.remat(model, _everything=True) as r:  # else a clock decides
        loss = model(x).square().mean()
        assert r.figures().dropped_bytes == 512 * 256 * 4
    assert r.figures().recomputed == ()
    loss.backward()
    figures = r.figures()
    (dropped,) = [row for row in figures.saved if row.verdict == "dropped"]
    assert (dropped.module, dropped.operator, dropped.count) == ("act", "aten::gelu", 1)
    (again,) = figures.recomputed
    assert (again.module, again.operator, again.count, again.bytes) == (
        *("act", "aten::gelu", 1),
        512 * 256 * 4,
    )
    # What backward reads of the linear layer before is kept, and the result of the second.
    kept = {(row.module, row.operator) for row in figures.saved if row.verdict != "dropped"}
    assert ("up", "aten::addmm") in kept
    assert figures.kept_bytes >= 512 * 256 * 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    report = r.report()
    for text in ("512 KiB", "aten::gelu", "aten::addmm", "too expensive (matmul", "act"):
        assert text in report, report
    assert len(r.report(top=1)) < len(report)


def test_without_a_model_there_are_no_modules():
    model, x = net()
    with ms.remat() as r:
        model(x).sum().backward()
    assert {row.module for row in r.figures().saved} == {""}
    report = " ".join(r.report().split())  # a narrow terminal breaks its lines
    assert "by module" not in report
    hint = "To see modules, pass the model: remat(model), or remat_module(model, by_module=True)"
    assert report.endswith(hint)
    with ms.remat(model) as r:
        model(x).sum().backward()
    report = " ".join(r.report().split())
    assert "by module " in report and "To see modules" not in report


def test_nothing_recorded():
    with ms.remat() as r:
        pass
    assert r.figures() == RematFigures(0, (), ())
    assert "0 operators in all" in " ".join(r.report().split())


def test_wrong_use():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module or None, got Tensor"):
        ms.remat(torch.ones(1))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        ms.remat_module(1)
    with pytest.raises(RuntimeError, match="not entered cannot be left"):
        ms.remat().__exit__(None, None, None)
    with pytest.raises(TypeError):
        ms.remat(bytes="8GB")


@pytest.mark.skipif(not ms._native.available, reason="budgets need the native part")
def test_hooks_of_blocks_that_are_left_out_of_order_go():
    model, hooks = nn.Linear(4, 4), torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    for of in (None, model):
        outer, inner = ms.remat(of, budget="1GB"), ms.remat(budget="1GB")
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(RuntimeError, match="must be left"):
            outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        assert len(hooks) == before and not model._forward_pre_hooks
        outer.__exit__(None, None, None)  # which leaves nothing for later blocks of this thread


@pytest.mark.parametrize(
    "options", [{}, {"_everything": True}, {"budget": 0.5}, {"budget": "1GB"}], ids=str
)
@pytest.mark.filterwarnings("ignore:remat. the budget")
def test_models_whose_parameters_are_on_the_meta_device(options):
    """Between forwards, as accelerate's cpu_offload() has them, or for good."""
    if "budget" in options and not ms._native.available:
        pytest.skip("budgets need the native part")

    class Offloaded(nn.Linear):
        def __init__(self):
            super().__init__(8, 8, device="meta")
            self.there = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

        def forward(self, x):
            return nn.functional.gelu(x @ self.there)

    model, x = nn.Sequential(Offloaded(), Offloaded()), torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    for _ in range(4):
        with ms.remat(model, **options):
            loss = model(x).square().sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    meta = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to("meta")
    for _ in range(4):
        with ms.remat(meta, **options):
            out = meta(torch.ones(4, 8, device="meta"))
        out.sum().backward()
    assert meta[0].weight.grad.is_meta


def test_blocks_are_left_in_order_and_by_their_thread():
    outer, inner = ms.remat(), ms.remat()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="in the thread that entered it, and after those"):
        outer.__exit__(None, None, None)
    errors = []

    def leave():
        try:
            inner.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "in the thread that entered it" in errors[0]
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="in the thread"):
        outer.__exit__(None, None, None)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_is_never_left(late):
    """By a generator that ends nowhere, or out of order, which is an error there. Functions that
    are declared are as they were once it is collected."""
    forward = vars(Doubled)["forward"]
    model, x = net()
    expected = gradients(model, x)
    results = []

    def open_block():
        with ms.remat(_everything=True):
            yield

    def work():  # in a thread, where all of it ends
        generator = open_block() if late else ms.remat(_everything=True, pure=[Doubled])
        next(generator) if late else generator.__enter__()
        if late:
            with ms.remat(_everything=True):
                del generator
        else:
            del generator
        for _ in range(3):
            gc.collect()
            results.append(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    results.append(gradients(model, x))
    assert vars(Doubled)["forward"] is forward
    assert len(results) == 4
    assert all(all(map(torch.equal, result, expected)) for result in results)


def test_removed_where_another_library_has_wrapped_it():
    model = nn.Linear(4, 4)
    handle = ms.remat_module(model)
    ours = model.forward
    model.forward = lambda *args: ours(*args)
    model(torch.ones(2, 4))
    last = handle._last()
    handle.remove()
    model(torch.ones(2, 4)).sum().backward()
    assert handle._last() is last and model.weight.grad is not None


def test_by_module_is_a_bool():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="remat_module: by_module must be True or False, got "):
        ms.remat_module(model, by_module="no")
    assert "forward" not in vars(model)


@pytest.mark.parametrize("by_module", [False, True])
def test_a_module_in_place(by_module):
    model, x = net()
    expected = gradients(model, x)
    state, keys = model.state_dict(), list(model._modules)
    handle = ms.remat_module(model, by_module=by_module, _everything=True)
    with pytest.raises(RuntimeError, match="no forward with gradients yet"):
        handle.report()
    with torch.no_grad():
        model(x)
    with pytest.raises(RuntimeError, match="no forward with gradients yet"):
        handle.figures()
    assert all(map(torch.equal, gradients(model, x), expected))
    assert handle.figures().dropped_bytes == 512 * 256 * 4
    assert "aten::gelu" in handle.report()
    assert ("by module" in handle.report()) == by_module
    assert list(model.state_dict()) == list(state)
    assert list(model._modules) == keys
    assert inspect.signature(model.forward) == inspect.signature(net()[0].forward)
    with pytest.raises(
        ValueError, match=r"the forward of Net has been replaced already; remove\(\)"
    ):
        ms.remat_module(model)
    with pytest.raises(ZeroDivisionError):
        model(x, fails=True)
    assert all(map(torch.equal, gradients(model, x), expected))
    handle.remove()
    handle.remove()
    assert "forward" not in model.__dict__
    again = ms.remat_module(model)
    handle.remove()  # not its own
    assert "forward" in model.__dict__
    again.remove()


def test_copies_of_a_module():
    model, x = net()
    expected = gradients(model, x)
    handle = ms.remat_module(model)
    gradients(model, x)
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, gradients(other, x), expected))
        assert other.forward.module is (model if other.forward is model.forward else other)
    handle.remove()
    assert "forward" not in model.__dict__


def test_nested_modules_and_threads():
    model, x = nn.Sequential(net()[0], net()[0]), net()[1]
    expected = gradients(model, x)
    handles = [ms.remat_module(m, _everything=True) for m in (model, model[1])]
    assert all(map(torch.equal, gradients(model, x), expected))
    assert all(handle.figures().dropped_bytes == 512 * 256 * 4 for handle in handles)
    results = {}

    def work(i):
        results[i] = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all(map(torch.equal, results[i], expected)) for i in range(4))


def test_nothing_is_left_of_many_blocks():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
    x = torch.randn(8, 16)

    def steps(count):
        for i in range(count):
            with ms.remat(_everything=i % 2 == 0):
                loss = model(x).sum()
            if i % 3:
                loss.backward(retain_graph=i % 5 == 0)

    steps(100)
    assert not host_memory_grows(lambda: steps(600), 1 << 19)
