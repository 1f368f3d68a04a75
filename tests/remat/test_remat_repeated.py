"""Blocks without a budget, step after step: from the third on they follow a plan."""

import copy
import threading

import pytest
import torch
from sampling import some
from test_budget import step
from test_remat_models import MODELS
from test_remat_random import check
from torch import nn

import memsave_ext as ms


@pytest.fixture(autouse=True)
def nothing_is_known_yet():
    ms._native.module.remat_forget()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm, self.relu = ms.BatchNorm2d(width), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)) + x)


def residuals(blocks=8):
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(16) for _ in range(blocks))), torch.randn(4, 16, 24, 24)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    build, x = MODELS[name]
    torch.manual_seed(0)
    model = build()
    expected, plain, _ = step(model, x)
    for _ in range(4):
        actual, peak, block = step(model, x, budget=None)
        assert all(map(torch.equal, expected, actual))
    assert peak <= plain
    assert block._recorder.budget()["plan"] is not None


def test_a_backward_that_raises_makes_no_plan():
    model, x = residuals(4)
    for number in range(4):
        with ms.remat(model, ahead=False) as block:
            loss = model(x).square().mean()
        plan = block._recorder.budget()["plan"]
        assert (plan is None) == (number < 3)
        if number == 0:
            model[1].conv.weight.register_hook(fails := Fails())
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            fails.over = True
        else:
            loss.backward()


class Fails:
    over = False

    def __call__(self, grad):
        if not self.over:
            raise ZeroDivisionError


def test_the_plan_has_the_best_sum_of_time_and_memory():
    model, x = residuals()
    _, plain, _ = step(model, x)
    peaks = []
    for number in range(4):
        _, peak, block = step(model, x, budget=None)
        figures = block._recorder.budget()
        assert (figures["plan"] is None) == (number < 2)
        peaks.append(peak)
    _, calls, *_ = block._recorder.trace()
    assert calls
    plans = figures["plans"]
    # The plan's times are those of the first two steps, which the trace of this one has not got.
    assert plans[0][1] == 0 and figures["plan"] in plans
    peak, seconds = figures["plan"]
    prices = [(s - seconds) / (peak - p) for p, s in plans if s > seconds]
    gains = [(seconds - s) / (p - peak) for p, s in plans if s < seconds]
    # A dearer plan is not worth its time, and a cheaper one would save too little of it.
    assert max(gains, default=0) <= min(prices, default=1)
    assert peaks[2] == peaks[3] <= plain


def test_plans_stay():
    model, x = residuals()
    saved = []
    for _ in range(6):
        _, _, block = step(model, x, budget=None)
        saved.append([(r.operator, r.verdict, r.bytes) for r in block.figures().saved])
    assert saved[2] == saved[3] == saved[4] == saved[5]


class Hoard(nn.Module):
    """Memory that is not recorded, and gone when the forward goes on."""

    size = 0

    def forward(self, x):
        with torch.no_grad():
            torch.empty(self.size, dtype=torch.uint8)
        return x


def test_plans_stay_where_other_memory_comes_and_goes():
    model, x = residuals()
    model = nn.Sequential(model[:4], Hoard(), model[4:])
    made = []
    for megabytes in (0, 0, 0, 3, 1, 9, 0):
        model[1].size = megabytes << 20
        _, _, block = step(model, x, budget=None)
        made.append(block._recorder.budget()["plans"])
    assert made[2] and all(plans == made[2] for plans in made[2:])
    # Where bytes are promised, plans are made for the memory that there was last.
    model[1].size = 20 << 20
    least = [step(model, x, budget=10**9)[2].least for _ in range(2)]
    assert least[1] > least[0] + (10 << 20)


def test_steps_in_threads_share_plans():
    """New threads for each step, as under DataParallel; each step counts the other's memory."""
    model, x = residuals()
    both = threading.Barrier(2)

    def meet(*_):
        both.wait(10)

    model[3].register_forward_hook(meet)
    made, gradients = [], []

    def run(model):
        with ms.remat() as block:
            loss = model(x).square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        made.append(block._recorder.budget()["plans"])

    models = [model, copy.deepcopy(model)]
    for _ in range(6):
        threads = [threading.Thread(target=run, args=(of,)) for of in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 12 and made[-1] and all(plans == made[-1] for plans in made[4:])
    assert all(map(torch.equal, gradients[0] * 12, sum(gradients, ())))


def test_reports_say_why_it_is_kept():
    model, x = residuals()
    for _ in range(3):
        _, _, block = step(model, x, budget=None)
    assert "too expensive (matmul" in block.report() and "budget" not in block.report()


@pytest.mark.parametrize("start", some(range(0, 60, 20), 1))
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_random_programs(start):
    blocks = []

    def make():
        blocks.append(ms.remat())
        return blocks[-1]

    for seed in range(start, start + 20):
        for _ in range(4):
            assert not (wrong := check(seed, make=make)), f"seed {seed}: {wrong}"
    assert sum(block._recorder.budget()["plan"] is not None for block in blocks) > 20


@pytest.mark.filterwarnings("ignore:remat. the budget")
def test_programs_of_the_same_shapes_that_read_other_tensors():
    x, y = (torch.randn(64, 64, requires_grad=True) for _ in "xy")

    def run(other, **options):
        with ms.remat(**options) as block:
            a, b = x.exp(), y.exp()
            total = (a * (b if other else a)).tanh()
            loss = (total.exp() * (a if other else b)).sum()
        return torch.autograd.grad(loss, (x, y)), block

    expected = [run(other, _everything=None)[0] for other in (False, True)]
    for options in ({"budget": 0.5}, {"budget": 10**9}, {}):
        for _ in range(4):
            for other in (False, True):
                actual, _ = run(other, **options)
                assert all(map(torch.equal, expected[other], actual))
    for _ in range(2):
        assert run(False, budget=10**8)[1].least
    ms._native.module.remat_forget()
    run(False, budget=10**8)
    _, block = run(True, budget=10**8)
    # It is not taken for the other one where that has ended otherwise.
    assert block._recorder.budget()["plan"] is None


def test_a_block_that_stays_open_forgets_what_it_wrote_down():
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with ms.remat() as block:
        for _ in range(20_000):
            (x @ w).tanh().exp().sum().backward()
        contents, calls, moments, *_ = block._recorder.trace()
        assert len(contents) == len(calls) == len(moments) == 0
        w.grad = None
        for _ in range(3):
            (x @ w).tanh().exp().sum().backward()
    (grad,) = torch.autograd.grad((x @ w).tanh().exp().sum(), w)
    assert torch.equal(w.grad, grad + grad + grad)
