"""Steps that go by the script of a proven plan: what the plan does not need passes unrecorded."""

import contextlib
import os
import random
import threading
import time

import pytest
import torch
from helpers import run_threads
from sampling import some
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

pytestmark = pytest.mark.filterwarnings("ignore:remat. the budget")


@pytest.fixture(autouse=True)
def _nothing_is_known():
    """Other programs that begin alike are known otherwise, and one is written down longer."""
    ms._native.module.remat_forget()


class Program(nn.Module):
    """Steps of a program, of which a variant changes one."""

    def __init__(self, length=12, width=24):
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(length))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(length))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x, variant=None, at=0):
        for i, (linear, norm) in enumerate(zip(self.linears, self.norms, strict=True)):
            y = linear(norm(x))
            change = variant if i == at else None
            if change == "another operator":
                y = torch.tanh(y)
            elif change == "one more":
                y = F.gelu(y).sin()
            elif change == "one less":
                pass
            elif change == "another order":
                y = F.gelu(F.dropout(y, 0.2)) * self.scale
            elif change == "other sizes":
                y = F.gelu(torch.cat([y, y[:3]]))[: len(y)]
            elif change == "writes":
                y = F.gelu(y).clone().mul_(1.5).add_(self.scale)
            elif change == "a factory":  # calls others that are seen
                y = F.gelu(y) * torch.ops.aten.ones([1, 1])
            elif change == "reads another":
                y = F.gelu(x)
            elif change == "no gradients":
                with torch.no_grad():
                    mask = (torch.rand_like(y) > 0.3).to(y.dtype)
                y = F.gelu(y * mask)
            elif change == "a region":
                y = ms.checkpoint(F.gelu, y)
            elif change == "a block":
                with ms.remat(_everything=True):  # what is cheap follows the clock
                    y = F.gelu(y).exp().clamp(max=3.0)
            elif change == "another thread":
                box = []
                thread = threading.Thread(target=lambda y=y, box=box: box.append(F.gelu(y).cos()))
                thread.start()
                thread.join()
                y = box[0]
            else:
                y = F.gelu(y)
            x = x + F.dropout(y, 0.2, self.training) * self.scale
        return x


VARIANTS = [
    "another operator", "one more", "one less", "another order", "other sizes", "writes",
    "a factory", "reads another", "no gradients", "a region", "a block", "another thread",
]  # fmt: skip


def train(model, x, block=None, seed=1, **how):
    """The loss, and the gradients of those parameters that have one."""
    torch.manual_seed(seed)
    model.zero_grad()
    with block or contextlib.nullcontext():
        loss = model(x, **how).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def passed(block):
    return block._recorder.figures()["passed"]


def rows(block):
    """Without times, which are measured."""
    return [row[:-1] for row in block._recorder.figures()["saved"]]


class Masks(Program):
    """Makes tensors between its layers where other operators are seen that make them, as a causal
    attention with dropout does."""

    def forward(self, x, fewer=False):
        for linear in self.linears[: 4 if fewer else None]:
            x = x + torch.tanh(linear(x))
            heads = x.view(1, 4, -1, x.shape[1] // 2).expand(1, 4, -1, -1)
            y = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
            x = x + y.reshape(x.shape) * torch.ops.aten.full([1, 1], 0.5)
        return x


def test_what_factories_call_is_passed_over():
    model, x = Masks(), torch.randn(16, 24)
    expected = {fewer: train(model, x, fewer=fewer) for fewer in (False, True)}
    for fewer, least in ((False, 5), (True, 0), (False, 0)):
        went = []
        for _ in range(10):
            block = ms.remat(budget=1.0)
            assert all(map(torch.equal, train(model, x, block, fewer=fewer), expected[fewer]))
            went.append((passed(block), block.figures().operators))
        # None leaves its script, after which one is not used at once.
        assert sum(done > 0.9 * operators for done, operators in went) >= least, went


@pytest.mark.parametrize("kept", [False, True])
def test_the_step_of_a_thread_that_has_ended_is_over(kept):
    """Though its block was never left. Steps beside others go by no script."""
    model, x = Program(), torch.randn(16, 24)
    blocks = []

    def work():
        block = ms.remat(budget=0.5)
        block.__enter__()
        model(x)
        with contextlib.suppress(ZeroDivisionError), ms.remat(budget=0.5):  # within it
            raise ZeroDivisionError
        if kept:
            blocks.append(block)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # join() comes a little before
        time.sleep(0.01)
    for _ in range(10):
        block = ms.remat(budget=0.5)
        train(model, x, block)
    assert passed(block)
    blocks.clear()
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("budget", [1.0, 0.9, 0.6, 0.3, None])
@pytest.mark.parametrize("by_module", [False, True])
def test_it_keeps_what_a_recorded_step_keeps(budget, by_module):
    model, x = Program(), torch.randn(16, 24)
    expected = train(model, x)
    seen = []
    for _ in range(10):
        block = ms.remat(model if by_module else None, budget=budget)
        assert all(map(torch.equal, train(model, x, block), expected))
        seen.append(block)
    went = [(passed(b), budget and (b.peak, b._recorder.budget()["plan"])) for b in seen]
    assert passed(seen[-1]), went
    first = [passed(block) > 0 for block in seen].index(True)
    recorded, last = seen[first - 1], seen[-1]
    assert all(map(passed, seen[first:]))
    assert last._recorder.budget()["plan"] == recorded._recorder.budget()["plan"]
    assert last.figures().operators == recorded.figures().operators
    assert passed(last) > (0.9 if budget == 1.0 else 0.2) * last.figures().operators
    assert last.figures().dropped_bytes == recorded.figures().dropped_bytes
    assert rows(last) == rows(recorded)
    if budget is not None:
        assert last.peak == recorded.peak and last.least == recorded.least
        assert last._recorder.deviation() is None
        assert len(last._recorder.budget()["curve"]) == len(recorded._recorder.budget()["curve"])
        assert last._recorder.trace()[3] == recorded._recorder.trace()[3]


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [1.0, 0.5, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_that_goes_another_way(budget, variant):
    """The variant has the plain run's bits at once; it becomes known, and keeps to its budget."""
    model, x = Program(), torch.randn(16, 24)
    for _ in range(5):
        block = ms.remat(budget=budget)
        train(model, x, block)
    assert passed(block)
    for at in some((0, 5, 11), 2):
        plain = [train(model, x), train(model, x, variant=variant, at=at)]
        blocks = []
        for number in range(18):
            goes = number % 3 != 2
            how = {"variant": variant, "at": at} if goes else {}
            block = ms.remat(budget=budget)
            assert all(map(torch.equal, train(model, x, block, **how), plain[goes])), number
            blocks.append(block)
            # Not where the beginning was decided on by another program's plan.
            assert not passed(block) or block._recorder.deviation() is None
        # Of a step after one like it: where two programs begin alike, it begins with the plan that
        # the latest one has.
        block = blocks[-2]
        if budget is not None:
            assert block.least is not None
            assert block.peak <= 1.02 * max(block.budget, block.least)


@pytest.mark.parametrize("seed", range(4))
def test_programs_that_change_at_random(seed):
    chance = random.Random(seed)
    model = Program(length=6)
    inputs = [torch.randn(n, 24) for n in (16, 11)]
    how = [{}, *({"variant": v, "at": chance.randrange(6)} for v in chance.sample(VARIANTS, 3))]
    scripted = 0
    for number in range(60):
        options = how[0] if chance.random() < 0.8 else chance.choice(how)
        x, budget = chance.choice(inputs), chance.choice([1.0, 0.5, 0.5, None])
        expected = train(model, x, seed=number, **options)
        block = ms.remat(budget=budget)
        assert all(map(torch.equal, train(model, x, block, seed=number, **options), expected))
        scripted += passed(block) > 0
    assert scripted


@pytest.mark.parametrize("budget", [0.6, None])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 4, 5)])
def test_threads(budget, lengths):
    """Each has a model and steps of its own, also on shapes that others have."""
    models = [Program(length).eval() for length in lengths]
    x = torch.randn(8, 24)
    expected = [grads_of(model, x) for model in models]
    right, scripted = [], []

    def run(number):
        for _ in range(12):
            block = ms.remat(models[number], budget=budget)
            with block:
                loss = models[number](x).square().mean()
            grads = torch.autograd.grad(loss, [*models[number].parameters()])
            right.append(all(map(torch.equal, grads, expected[number])))
            scripted.append(passed(block))

    for times in range(1, 21):
        run_threads(run, len(models))
        assert right == [True] * 36 * times
        # Within a budget a step that begins beside others has a smaller one, and goes by no script.
        if any(scripted) or budget is not None:
            return
    raise AssertionError("no step has gone by a script")


def step_by_script(model, x, budget, most=16):
    """Returns the loss of the first step that goes by its script, of which backward is to come."""
    for _ in range(most):
        block = ms.remat(model, budget=budget)
        with block:
            loss = model(x).square().mean()
        if passed(block):
            return loss
        loss.backward()
        del loss
    raise AssertionError("no step has gone by a script")


@pytest.mark.parametrize("budget", [0.6, None])
def test_threads_whose_steps_begin_while_one_goes_by_its_script(budget):
    models = [Program(length=6).eval() for _ in range(3)]
    x = torch.randn(8, 24)
    expected = grads_of(models[0], x)
    for _ in range(4):
        loss = step_by_script(models[0], x, budget)
        results = []

        def run(number, loss=loss, results=results):
            if number:
                with ms.remat(models[number], budget=budget):
                    loss = models[number](x).square().mean()
            results.append(torch.autograd.grad(loss, [*models[number].parameters()]))

        run_threads(run, len(models))
        assert len(results) == 3 and all(all(map(torch.equal, r, expected)) for r in results)
        del loss, run


def test_backwards_of_one_graph_at_once():
    """Each opens what others are recomputing."""
    model, x = Program(length=6).eval(), torch.randn(16, 24)
    expected = grads_of(model, x)
    for _ in range(4):
        loss = step_by_script(model, x, 0.6)
        results = []

        def backward(_, loss=loss, results=results):
            for _ in range(3):
                params = [*model.parameters()]
                results.append(torch.autograd.grad(loss, params, retain_graph=True))

        run_threads(backward, 4)
        assert len(results) == 12 and all(all(map(torch.equal, r, expected)) for r in results)
        del loss, backward


def grads_of(model, x):
    return torch.autograd.grad(model.eval()(x).square().mean(), [*model.parameters()])


def test_a_kept_tensor_that_is_changed_is_an_error():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(24, 24)

        def forward(self, x, changes=False):
            x = torch.sigmoid(self.linear(x))
            y = torch.sigmoid(self.linear(torch.exp(x)))
            if changes:
                with torch.no_grad():
                    x.mul_(2)
            return y * x

    model, x = Changes(), torch.randn(8, 24)
    for _ in range(5):
        block = ms.remat(budget=1.0)
        train(model, x, block)
    assert passed(block)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="modified by an inplace operation|changed"):
            train(model, x, ms.remat(budget=1.0), changes=True)
    assert all(map(torch.equal, train(model, x, ms.remat(budget=1.0)), train(model, x)))


@pytest.mark.parametrize("budget", [0.8, 0.6, 0.4])
def test_what_is_changed_in_place_and_cloned_for_backward(budget):
    """Autograd clones what clamp_() changes inside of it, before it does."""

    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(64, 256) for _ in range(4))
            self.back = nn.ModuleList(nn.Linear(256, 64) for _ in range(4))

        def forward(self, x):
            for layer, back in zip(self.layers, self.back, strict=True):
                x = x + back(F.gelu(layer(x)).clamp_(max=0.5))
            return x

    model, x = Clamped(), torch.randn(512, 64)
    expected = train(model, x)
    for _ in range(6):
        block = ms.remat(model, budget=budget)
        assert all(map(torch.equal, train(model, x, block), expected))
    assert passed(block) and block.figures().dropped_bytes


def test_a_model_proves_its_own_plans():
    """An equal one may have another loss, of which a script would see nothing."""
    x = torch.randn(16, 24)
    blocks = []
    for model in (Program(), Program()):
        train(model, x)
        for _ in range(5):
            blocks.append(ms.remat(model, budget=0.6))
            train(model, x, blocks[-1])
    assert passed(blocks[4]) and passed(blocks[9]) and not passed(blocks[5])


def test_a_block_that_was_not_given_the_model_has_no_names_of_modules():
    """It may go by the script of one that was, where the first that is saved is of no module."""
    model, start = Program(), torch.randn(16, 24, requires_grad=True)

    def step(block):
        with block:
            loss = model(start.sin()).square().mean()
        loss.backward()
        return block

    named = [step(ms.remat(model)) for _ in range(10)][-1]
    assert passed(named) and any(row.module for row in named.figures().saved)
    plain = step(ms.remat())
    assert passed(plain) and not any(row.module for row in plain.figures().saved)


def test_an_exception_in_the_middle():
    model, x = Program(length=4), torch.randn(8, 24)
    expected, scripted = train(model, x), 0
    for number in range(20):
        block = ms.remat(model, budget=0.6)
        if number % 4 == 3:
            hook = model.linears[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                train(model, x, block)
            hook.remove()
        else:
            assert all(map(torch.equal, train(model, x, block), expected))
            scripted += passed(block) > 0
    assert scripted > 2


def test_an_optimizer_in_backward():
    """It may not step a parameter at once that dropped values are computed from."""
    results = []
    for budget in (None, 1.0, 0.4):
        model, x = Program(length=5), torch.randn(16, 24)
        optimizer = ms.Adam(model.parameters(), lr=0.01, in_backward=True)
        scripted = 0
        for number in range(10):
            block = None if budget is None else ms.remat(model, budget=budget)
            torch.manual_seed(number)
            with block or contextlib.nullcontext():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scripted += block is not None and passed(block) > 0
        assert budget is None or scripted > 3
        results.append([loss.detach(), *model.parameters()])
    for ours in results[1:]:
        assert all(map(torch.equal, ours, results[0]))


def test_backward_in_the_block_twice_and_not_at_all():
    model, x = Program(length=4), torch.randn(8, 24)
    expected = train(model, x)
    for number in range(15):
        torch.manual_seed(1)
        model.zero_grad()
        block = ms.remat(budget=0.5)
        with block:
            loss = model(x).square().mean()
            if number % 3 == 0:
                loss.backward()
        if number % 3 == 1:
            loss.backward(retain_graph=True)
            grads = [p.grad.clone() for p in model.parameters()]
            loss.backward()
            assert all(
                torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), grads, strict=True)
            )
            continue
        if number % 3 == 2:
            del loss
            continue
        assert all(map(torch.equal, [p.grad for p in model.parameters()], expected[1:]))
