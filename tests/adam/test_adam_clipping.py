"""Clipping each gradient, clipping them all, and the pass that computes their norm."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modes import (
    FP32,
    FP64,
    assert_close_to,
    assert_same,
    both_ways,
    clip_all,
    copies,
    exact_run,
    loss,
    make,
    nothing_in_backward,
    train,
)
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import shards

pytestmark = pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")


@both_ways
@pytest.mark.parametrize("max_norm", [0.3, 1, 1000.0])
def test_max_grad_norm_clips_each(max_norm, in_backward):
    # So large an eps shows by how much gradients were scaled, which Adam is blind to.
    options = {"eps": 0.01, "weight_decay": 0.1}
    params, optimizer = make(max_grad_norm=max_norm, in_backward=in_backward, **options)
    exact, _ = exact_run(params, options, lambda all: [clip_all(max_norm)([p]) for p in all])
    train(params, optimizer, 4)
    assert_close_to(params, exact)


class AddsThroughAView(nn.Module):
    """The gradient of ``pos`` has the memory of the one that flows on to ``first``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.pos = nn.Parameter(100 * torch.randn(8, 6))

    def forward(self, x):
        return self.last(self.first(x) + self.pos.unsqueeze(0))


@pytest.mark.parametrize("number", [0, 1], ids=["assigns", "clips a copy"])
def test_the_pages_hooks_clip_nothing_else(number):
    page = Path(__file__, "../../../docs/adam/clipping.md").resolve().read_text("utf-8")
    section = page.split("in a hook\n", 1)[1]
    loop, *others = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    code = loop if number == 0 else others[0] + loop[loop.index("opt =") :]
    x = torch.full((1, 8, 6), 0.1)
    net, reference = AddsThroughAView(), AddsThroughAView()
    # Adam would hardly see by how much gradients are clipped.
    in_place_of_adam = SimpleNamespace(AdamW=ms.SGD)
    exec(code, {"torch": torch, "ms": in_place_of_adam, "model": net, "x": x})
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    reference(x).square().mean().backward()
    grads = copies([p.grad for p in reference.parameters()])
    nn.utils.clip_grad_value_(reference.parameters(), 0.1)
    assert all((p.grad != g).any() for p, g in zip(reference.parameters(), grads, strict=True))
    optimizer.step()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@nothing_in_backward
@both_ways
@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_clip_global_norm(max_norm, dtype, in_backward):
    options = {"eps": 0.01}
    params, optimizer = make(dtype, clip_global_norm=max_norm, in_backward=in_backward, **options)
    exact, norms = exact_run(params, options, clip_all(max_norm))
    before = copies(params)
    for number, norm in enumerate(norms):
        loss(params, number).backward()
        assert all(p.grad is not None for p in params)  # they are kept
        if number == 0:
            assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        optimizer.zero_grad()
    assert_close_to(params, exact)


@pytest.mark.parametrize("small_bytes", [0, 1 << 16])
@pytest.mark.parametrize("forward_again", [False, True])
def test_norm_pass(small_bytes, forward_again):
    options = {"eps": 0.01, "in_backward": True, "small_bytes": small_bytes}
    params, optimizer = make(**options)
    others, other = make(eps=0.01, clip_global_norm=0.3)
    assert optimizer.grad_norm is None
    for number in range(4):
        before = [p.detach().clone() for p in params]
        value = loss(params, number)
        with optimizer.norm_pass(0.3):
            value.backward(retain_graph=not forward_again)
        assert all(p.grad is None for p in params)
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        (loss(params, number) if forward_again else value).backward()
        assert all(p.grad is None for p in params)
        optimizer.step()
        train(others, other, 1, start=number)
        torch.testing.assert_close(optimizer.grad_norm, other.grad_norm, rtol=1e-6, atol=0)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_step_without_norm_pass_is_not_clipped():
    params, optimizer = make(in_backward=True, eps=0.01)
    others, other = make(eps=0.01)
    with optimizer.norm_pass(1e-3):
        loss(params, 0).backward()
    loss(params, 0).backward()
    optimizer.step()
    other_clipped = ms.Adam(others, lr=1e-2, eps=0.01, clip_global_norm=1e-3)
    train(others, other_clipped, 1)
    other.load_state_dict(other_clipped.state_dict())
    for one in ((params, optimizer), (others, other)):
        train(*one, 1, start=1)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_norm_pass_that_raises_is_as_none():
    params, optimizer = make(in_backward=True)
    others, other = make()

    def fail():
        loss(params, 0).backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), optimizer.norm_pass(1e-3):
        fail()
    for one in ((params, optimizer), (others, other)):
        train(*one, 2)
    assert_same((params, optimizer), (others, other))


def test_a_norm_that_cannot_be_computed_is_as_none(monkeypatch):
    params, optimizer = make(in_backward=True)
    plain, other = make(in_backward=True)

    def fails(*_):
        raise ConnectionError("a collective")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "clip_to_norm", fails)
        with pytest.raises(ConnectionError), optimizer.norm_pass(1e-3):
            loss(params[:1], 0).backward()
    for each, its in ((params, optimizer), (plain, other)):
        loss(each, 0).backward()
        its.step()
    assert_same((params, optimizer), (plain, other))
    with optimizer.norm_pass(1e-3):  # the next one is measured as ever
        loss(params, 1).backward()
    assert optimizer.grad_norm > 0


def test_no_step_inside_of_norm_pass():
    params, optimizer = make(in_backward=True)
    others, other = make()

    def step():
        loss(params, 0).backward()
        optimizer.step()

    inside = pytest.raises(RuntimeError, match=r"step\(\) was called inside of norm_pass\(\)")
    with inside, optimizer.norm_pass(1e-3):
        step()
    for one in ((params, optimizer), (others, other)):
        train(*one, 2)
    assert_same((params, optimizer), (others, other))


def test_norm_pass_and_another_loss():
    params, optimizer = make(in_backward=True)
    with optimizer.norm_pass(1.0):
        loss(params[:2], 0).backward()
    with pytest.raises(RuntimeError, match="had none in norm_pass()"):
        loss(params, 0).backward()


def test_what_cannot_have_a_norm_pass():
    def check(error, message, optimizer, max_norm=1.0):
        with pytest.raises(error, match=message), optimizer.norm_pass(max_norm):
            pass

    check(ValueError, r"norm_pass\(\) cannot be .* clip_global_norm", make(clip_global_norm=1.0)[1])
    check(ValueError, r"norm_pass\(\) is only for optimizers with in_backward=True", make()[1])
    for bad in (-1.0, 0, math.nan, None):
        check(ValueError, "max_norm must be a number above 0", make(in_backward=True)[1], bad)

    params, optimizer = make(in_backward=True)
    with optimizer.accumulate():
        loss(params, 0).backward()
        check(RuntimeError, "while gradients are accumulated", optimizer)
    check(RuntimeError, "while gradients are accumulated", optimizer)
    optimizer.step()
    loss(params, 1).backward()
    check(RuntimeError, "before any backward that steps", optimizer)
    optimizer.step()
    with optimizer.norm_pass(1.0):
        loss(params, 2).backward()
    check(RuntimeError, "once in each step", optimizer)


def test_norm_pass_warns_at_the_line_that_calls_it():
    params, optimizer = make(in_backward=True)
    with (
        pytest.warns(FutureWarning, match="use grads_on=, with which") as warned,
        optimizer.norm_pass(1.0),
    ):
        loss(params, 0).backward()
    assert [w.filename for w in warned] == [__file__]


def test_a_parameter_twice_in_a_norm_pass():
    params, optimizer = make(in_backward=True)
    with optimizer.norm_pass(1.0):
        loss(params, 0).backward()
        with pytest.raises(RuntimeError, match="receives a second gradient"):
            loss(params, 0).backward()


def test_a_norm_pass_is_of_one_backward():
    p = nn.Parameter(torch.ones(8))
    optimizer = ms.Adam([p], in_backward=True)
    with optimizer.norm_pass(1.0):
        p.sum().backward()
    with pytest.raises(RuntimeError, match="after norm_pass"), optimizer.accumulate():
        pass
    p.sum().backward()
    optimizer.step()
    with optimizer.accumulate():
        p.sum().backward()


def test_clipping_a_gradient_that_is_no_number_is_torchs():
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, expected = ms.Adam([ours], max_grad_norm=1.0), torch.optim.Adam([theirs])
    for p in (ours, theirs):
        p.grad = torch.tensor([1.0, float("nan"), 2.0])
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    optimizer.step()
    expected.step()
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours.isnan().all()


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_norm_set_by_hand_is_checked(in_backward):
    p = nn.Parameter(torch.ones(3))
    optimizer = ms.Adam([p], in_backward=in_backward)
    optimizer.param_groups[0]["max_grad_norm"] = -1.0
    if not in_backward:
        p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="max_grad_norm must be a number above 0"):
        p.sum().backward() if in_backward else optimizer.step()
    assert torch.equal(p, torch.ones(3))
