"""What a training loop does with an optimizer that in_backward() has taken: Adam's words."""

import gc
import math
import pickle
import weakref

import pytest
import torch
from own_steps import TORCHS, assert_same, loss, model, pair, step
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import memsave_ext as ms

SGD, ADAM = TORCHS["SGD momentum"], TORCHS["Adam"]
MAKES = pytest.mark.parametrize("make", [SGD, ADAM, TORCHS["Adam fused"]], ids=["SGD", "Adam", "f"])


def accumulated(net, optimizer, number, context):
    with context:
        (loss(net, number) / 2).backward()
    (loss(net, number + 1) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


@MAKES
def test_accumulate(make):
    ours, theirs = pair(make)
    for number in range(3):
        accumulated(*ours, number, ours[1].accumulate())
        accumulated(*theirs, number, torch.enable_grad())
    assert_same(ours, theirs)


def test_accumulate_when():
    ours, theirs = pair(SGD)
    last = False
    ours[1].accumulate_when(lambda: not last)
    for number in range(2):
        last = False
        (loss(ours[0], number) / 2).backward()
        assert all(p.grad is not None for p in ours[0].parameters())
        last = True
        (loss(ours[0], number + 1) / 2).backward()
        ours[1].step()
        accumulated(*theirs, number, torch.enable_grad())
    assert_same(ours, theirs)


def test_paused():
    ours, theirs = pair(SGD)
    net, optimizer = ours
    with optimizer.paused():
        loss(net, 5).backward()
        with pytest.raises(RuntimeError, match="nothing is stepped"):
            optimizer.step()
    assert all(p.grad is None for p in net.parameters())
    with optimizer.paused(keep=True):
        (loss(net, 0) / 2).backward()
    (loss(net, 1) / 2).backward()
    optimizer.step()
    accumulated(*theirs, 0, torch.enable_grad())
    assert_same(ours, theirs)


def test_closures():
    ours, theirs = pair(SGD)
    for net, optimizer in (ours, theirs):
        for number in range(2):

            def closure(net=net, number=number):
                value = loss(net, number)
                value.backward()
                return value

            optimizer.zero_grad()
            assert optimizer.step(closure).item() > 0
        optimizer.zero_grad()
    assert_same(ours, theirs)
    with pytest.raises(TypeError, match="closure must be a function"):
        ours[1].step(3)


class StepsByItsBase(torch.optim.SGD):
    """torch calls step hooks around the step of its base, too."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("make", [SGD, StepsByItsBase])
def test_step_hooks_run_once_for_a_step(make):
    net, seen = model(), []
    optimizer = make(list(net.parameters()))
    SGD(list(net.parameters()))  # from now on torch does so
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(("before", o)))
    ms.in_backward(optimizer)
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(("after", o)))
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: seen.append(("before all", o))),
        register_optimizer_step_post_hook(lambda o, a, k: seen.append(("after all", o))),
    ]
    try:
        for _ in range(2):
            loss(net, 0).backward()
            assert not seen
            optimizer.step()
            assert [name for name, _ in seen] == ["before all", "before", "after", "after all"]
            assert all(o is optimizer for _, o in seen)
            seen.clear()
    finally:
        for handle in handles:
            handle.remove()


# clipping


@MAKES
def test_max_grad_norm_of_each_parameter(make):
    ours, theirs = pair(make, max_grad_norm=0.05)
    for number in range(3):
        step(*ours, number)
        loss(theirs[0], number).backward()
        for p in theirs[0].parameters():
            nn.utils.clip_grad_norm_([p], 0.05)
        theirs[1].step()
        theirs[1].zero_grad()
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert all(group["max_grad_norm"] == 0.05 for group in ours[1].param_groups)
    ours[1].load_state_dict(theirs[1].state_dict())  # which has none
    assert all(group["max_grad_norm"] == 0.05 for group in ours[1].param_groups)
    ours[1].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert ours[1].param_groups[1]["max_grad_norm"] == 0.05
    ours[1].param_groups[0]["max_grad_norm"] = -1
    with pytest.raises(ValueError, match="max_grad_norm must be a number above 0"):
        loss(ours[0], 0).backward()


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_norm_pass():
    ours, theirs = pair(SGD)
    for number in range(3):
        net, optimizer = ours
        with optimizer.norm_pass(max_norm=0.1):
            loss(net, number).backward()
        step(net, optimizer, number)
        loss(theirs[0], number).backward()
        norm = nn.utils.clip_grad_norm_(theirs[0].parameters(), 0.1)
        theirs[1].step()
        theirs[1].zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, norm)
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_torchs_clipping_raises():
    (net, optimizer), _ = pair(SGD)
    loss(net, 0).backward()
    with pytest.raises(RuntimeError, match=r"memsave_ext.in_backward\(SGD\)"):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()


class Clips(torch.optim.SGD):
    """Clips each gradient in its own step, as some optimizers do."""

    def step(self, closure=None):
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            nn.utils.clip_grad_norm_([p], 0.1)
        return super().step(closure)


def test_an_optimizer_that_clips_and_one_that_calls_its_base():
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # its step() then calls step hooks, too
    ours, theirs = model(), model()
    seen = []
    optimizer = ms.in_backward(Clips(ours.parameters(), lr=0.1))
    other = Clips(theirs.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    step(ours, optimizer, 0)
    assert seen == [1]
    step(theirs, other, 0)
    assert_same((ours, optimizer), (theirs, other))


class Counts(torch.optim.SGD):
    """Counts its steps in the groups, in two ways, as optimi and others do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group.setdefault("tensor", torch.zeros(())).add_(1)
            group["rate"] = group["lr"] / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad * group["rate"] * group["tensor"])


@pytest.mark.parametrize("small_bytes", [0, 1 << 16])
def test_counts_of_steps_in_groups(small_bytes):
    """They go up once for a step, also of a group of which nothing was stepped."""
    pairs = []
    for takes in (True, False):
        net = model()
        groups = [{"params": list(module.parameters())} for module in (net[0], net[2], net[3])]
        optimizer = Counts(groups, lr=0.1)
        if takes:
            ms.in_backward(optimizer, small_bytes=small_bytes)
        pairs.append((net, optimizer))
    for number in range(5):
        for net, optimizer in pairs:
            net[0].requires_grad_(number % 2 == 0)
            if number == 3:  # a part is left for step()
                net[3].weight.grad = torch.ones_like(net[3].weight)
                net[3].weight.requires_grad_(False)
            loss(net, number).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert [g["k"] for g in optimizer.param_groups] == [number + 1] * 3
            net.requires_grad_(True)
        assert_same(*pairs)
    saved = pickle.loads(pickle.dumps(pairs[0]))
    for net, optimizer in (saved, pairs[1]):
        step(net, optimizer, 9)
    assert_same(saved, pairs[1])


class CountsLate(Counts):
    """Sums up its learning rates after a warmup, as schedule-free RAdam does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            if group["k"] > 5:
                group["sum"] = group.get("sum", 0.0) + group["lr"]
                for p in group["params"]:
                    if p.grad is not None:
                        p.data.sub_(p.grad * group["lr"] / group["sum"])


@pytest.mark.parametrize("options", [{"small_bytes": 0}, {}, {"grads_on": "."}])
def test_counts_that_begin_after_some_steps(options):
    ours, theirs = pair(lambda params: CountsLate(params, lr=0.01), **options)
    for number in range(9):
        step(*ours, number)
        step(*theirs, number)
    assert ours[1].param_groups[0]["sum"] == theirs[1].param_groups[0]["sum"] > 0.03
    assert_same(ours, theirs)


# loss scaling


@MAKES
def test_grad_scaler_as_in_torchs_loop(make):
    ours, theirs = pair(make)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    ours[1].grad_scaler = scalers[0]
    for number in range(7):
        for (net, optimizer), scaler in zip((ours, theirs), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss(net, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
    assert scalers[0].get_scale() == 4096
    assert_same(ours, theirs)


def test_counts_of_steps_that_a_grad_scaler_scales():
    """As without one: nothing is stepped by step() itself, which would count, too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ours, theirs = pair(lambda params: Counts(params, lr=0.125), grad_scaler=scaler)
    for number in range(3):
        net, optimizer = ours
        scaler.scale(loss(net, number)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step(*theirs, number)
        assert optimizer.param_groups[0]["k"] == number + 1
    assert_same(ours, theirs)


def test_an_infinity_skips_its_parameter():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (net, optimizer), _ = pair(ADAM, grad_scaler=scaler, max_grad_norm=1.0)
    for spoiled in (False, True):
        value = loss(net, 0)
        if spoiled:
            before = [p.detach().clone() for p in net.parameters()]
            value = value + (net[2].weight * math.inf).sum()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    same = [torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    assert same == [False, False, True, False, False, False]
    assert [optimizer.state[p]["step"].item() for p in net.parameters()] == [2, 2, 1, 2, 2, 2]
    assert scaler.get_scale() == 512


def test_a_grad_scaler_that_was_not_handed_over():
    scaler = torch.amp.GradScaler("cpu")
    (net, optimizer), _ = pair(SGD)
    scaler.scale(loss(net, 0)).backward()
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("small_bytes", [0, 1 << 16], ids=["at once", "in a bucket"])
def test_dropped_in_backward(small_bytes):
    """It lives until the backward ends, so that no gradient is lost."""
    params = [nn.Parameter(torch.randn(8)) for _ in range(4)]
    held = [ms.in_backward(torch.optim.SGD(params, lr=0.1), small_bytes=small_bytes)]
    gone = weakref.ref(held[0])

    def drop(grad):
        held.clear()
        gc.collect()
        return grad

    x = params[0] * 1.0
    total = (x * params[1] + params[2] * params[3]).sum()
    before = [p.detach().clone() for p in params]
    expected = torch.autograd.grad(total, params, retain_graph=True)
    x.register_hook(drop)
    total.backward()
    assert not held and all(p.grad is None for p in params)
    for p, old, grad in zip(params, before, expected, strict=True):
        assert torch.equal(p, torch.add(old, grad, alpha=-0.1))
    gc.collect()
    assert gone() is None
