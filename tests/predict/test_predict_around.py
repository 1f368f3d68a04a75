"""What is around a predicted step: threads, exceptions, other predictions, and what users build."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import Shared
from steps import assert_near, builder, tracked, without_optimizer
from torch import nn
from torch._subclasses import fake_tensor

import memsave_ext as ms
from memsave_ext.checkpoint.fallback import surroundings

AdamW = torch.optim.AdamW


def rematerialized(model):
    ms.remat_module(model, budget=0.5 if ms._native.available else None)
    return model


def state():
    native = ms._native.module
    return (
        torch.utils.swap_tensors,
        torch.Tensor.__deepcopy__,
        fake_tensor.CONSTANT_NUMEL_LIMIT,
        surroundings.recompute_observer,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        torch.is_grad_enabled(),
        native and native.remat_is_predicted(),
        torch.get_rng_state().sum().item(),
    )


@pytest.mark.each_value
@pytest.mark.parametrize("prepare", [lambda model: model, rematerialized])
@pytest.mark.parametrize("failing", range(1, 5))
def test_an_exception_leaves_nothing(failing, prepare):
    """In the warm-up step or the followed one, in forward or backward."""
    calls = Shared()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            calls.append("forward")
            if len(calls.values()) == failing:
                raise KeyError("of the user")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            calls.append("backward")
            if len(calls.values()) == failing:
                raise KeyError("of the user")
            return grad

    class Failing(nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    before, peak = state(), ms.memory.predict(builder(AdamW, prepare)).peak
    with pytest.raises(KeyError, match="of the user"):
        ms.memory.predict(builder(AdamW, lambda m: prepare(nn.Sequential(*m, Failing()))))
    assert len(calls.values()) == failing
    assert state() == before
    assert ms.memory.predict(builder(AdamW, prepare)).peak == peak


def test_threads():
    """Each predicts, beside one that makes real steps."""
    expected = ms.memory.predict(builder(AdamW, rematerialized)).peak
    before, peaks, done = state(), [], threading.Event()

    def predict():
        peaks.extend(ms.memory.predict(builder(AdamW, rematerialized)).peak for _ in range(2))

    def train():
        step = builder(AdamW, rematerialized)()[2]
        while not done.is_set():
            peaks.append(expected if step() > 0 else None)

    threads = [threading.Thread(target=target) for target in (predict, predict, predict, train)]
    for thread in threads:
        thread.start()
    for thread in threads[:3]:
        thread.join()
    done.set()
    threads[3].join()
    assert len(peaks) > 6 and set(peaks) == {expected}
    assert state()[:-1] == before[:-1]  # a real step may draw random numbers


@pytest.mark.parametrize("part", ["forward", "backward", "none"])
def test_a_step_that_computes_in_a_thread_of_its_own(part):
    """What nobody would count is refused; other threads run."""

    def in_thread(function):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    def build():
        model, x = nn.Linear(64, 64), torch.ones(8, 64)

        def step():
            assert in_thread(lambda: len("here")) == 4
            loss = (in_thread if part == "forward" else lambda f: f())(lambda: model(x).sum())
            (in_thread if part == "backward" else lambda f: f())(loss.backward)
            model.zero_grad()

        return model, None, step

    build()[2]()
    if part == "none":
        assert ms.memory.predict(build).peak > 0
        return
    with pytest.raises(RuntimeError, match="runs in a thread that Python code of the step has"):
        ms.memory.predict(build)


def test_a_step_that_predicts():
    plain = ms.memory.predict(builder(AdamW, rematerialized))
    inner = Shared()

    def build():
        model, optimizer, step = builder(AdamW, rematerialized)()

        def predicting():
            inner.append(ms.memory.predict(builder(AdamW, rematerialized)).peak)
            step()

        return model, optimizer, predicting

    # What the inner one's model has made and not freed yet may count, too.
    assert ms.memory.predict(build).peak == pytest.approx(plain.peak, rel=0.05)
    assert set(inner.values()) == {plain.peak}


def test_inside_of_a_track():
    peak = ms.memory.predict(builder(AdamW)).peak
    with ms.memory.track() as t:
        assert ms.memory.predict(builder(AdamW)).peak == peak
    assert t.peak < 1 << 20


class Tied(nn.Module):
    """Tied weights, a norm's buffers and one of its own, and a function of its own."""

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.y = x.exp()
            return ctx.y * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.y * 2

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("table", torch.randn(100, 100))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens):
        return self.head(self.Exp.apply(self.norm(self.embedding(tokens))))


def test_tied_weights_buffers_functions_and_copies():
    def build():
        model = copy.deepcopy(Tied())
        optimizer = AdamW(model.parameters(), foreach=False)
        tokens = torch.randint(0, 500, (256,))

        def step():
            F.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    predicted, t = ms.memory.predict(build), tracked(build)
    assert (predicted.peak, predicted.at_peak) == (t.peak, t.at_peak)


def test_values_that_are_read():
    def reading(read):
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        return model, None, lambda: read(model(x).detach())

    ms.memory.predict(lambda: reading(lambda y: (y.tolist(), torch.equal(y, y + 1))))
    ms.memory.predict(lambda: reading(lambda y: f"{y.mean():.3f} {y.sum():g} {y}"))
    with pytest.raises(RuntimeError, match=r"predict: \.numpy\(\) reads the values.*is_dry_run"):
        ms.memory.predict(lambda: reading(lambda y: y.numpy()))


def test_products_of_groups_in_float32():
    """As of a mixture of experts; their fake kernel takes bfloat16 alone."""

    def make():
        model = nn.Linear(64, 64)
        experts = nn.Parameter(torch.randn(4, 64, 128))
        model.register_parameter("experts", experts)
        x = torch.randn(256, 64)
        ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32)
        return model, lambda: F.grouped_mm(model(x), experts, offs=ends).square().sum()

    assert_near(without_optimizer(make), 0.001)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.LazyLinear(4), "a lazy module has not learned its shapes yet"),
        (lambda: torch.zeros(4).tensor_split(torch.tensor([1, 2])), "sizes that a tensor holds"),
    ],
)
def test_a_sentence_in_place_of_torchs_own(make, told):
    def build():
        made = make()
        model = made if isinstance(made, nn.Module) else nn.Linear(4, 4)
        return model, None, lambda: None

    with pytest.raises(RuntimeError, match=f"predict: .*{told}"):
        ms.memory.predict(build)
