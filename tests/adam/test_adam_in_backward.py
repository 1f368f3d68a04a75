"""The rules of a step in backward."""

import collections
import gc
import re
import weakref

import pytest
import torch
from helpers import leaf, run_threads
from stepped_in_backward import loss, make, values
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import memsave_ext as ms

BOTH = pytest.mark.parametrize("small_bytes", [0, 1 << 16], ids=["at once", "in a bucket"])


@BOTH
def test_backward_steps_and_frees(small_bytes):
    params, optimizer = make(small_bytes=small_bytes)
    before = values(params)
    loss(params).backward()
    assert all(p.grad is None for p in params)
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    after = values(params)
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(p, a) for p, a in zip(params, after, strict=True))
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 1, 1]


@pytest.mark.skipif(
    not ms._native.available, reason="in pure Python hooks of others run after the bucket's"
)
def test_no_more_small_gradients_wait_than_a_bucket_has():
    net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(12)])
    params = list(net.parameters())
    optimizer = ms.AdamW(params, in_backward=True, bucket_bytes=3 * params[0].nbytes)
    waiting = []
    for p in params:
        p.register_post_accumulate_grad_hook(
            lambda _: waiting.append(sum(p.grad is not None for p in params))
        )
    net(torch.randn(4, 16)).sum().backward()
    assert waiting == [1, 2, 3] * 4 and optimizer.in_backward


def test_a_parameter_that_never_required_a_gradient():
    """Such a one has nothing of autograd's; it can begin to require gradients later."""
    frozen, trained = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    ms.Adam([frozen, trained], lr=0.1).zero_grad()
    optimizer = ms.Adam([frozen, trained], lr=0.1, in_backward=True)
    for _ in range(2):
        (frozen * trained).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert frozen.eq(1).all()
    assert trained.lt(0.9).all()
    frozen.requires_grad_()
    (frozen * trained).sum().backward()
    assert frozen.ne(1).all()
    optimizer.remove_hooks()


# rule 1


@BOTH
def test_a_second_backward_is_refused(small_bytes):
    params, _kept = make(small_bytes=small_bytes)
    loss(params).backward()
    after = values(params)
    with pytest.raises(RuntimeError, match=r"parameter \d of the optimizer \(shape \[10\]\) rece"):
        loss(params).backward()
    assert all(torch.equal(p, a) for p, a in zip(params, after, strict=True))
    with pytest.raises(RuntimeError, match=r"with opt.accumulate\(\)"):
        loss(params).backward()


@BOTH
def test_reentrant_regions_are_refused_and_others_are_not(small_bytes):
    def program(run, params):
        x = torch.ones(10, requires_grad=True)
        return run(lambda t: t * params[0], run(lambda t: (t * params[0]).sin(), x)).sum()

    for run in (
        ms.checkpoint,
        lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=False),
    ):
        params, optimizer = make(small_bytes=small_bytes)
        expected = [nn.Parameter(p.detach().clone()) for p in params]
        plain = torch.optim.Adam(expected, lr=0.1)
        program(lambda f, x: f(x), expected).backward()
        plain.step()
        program(run, params).backward()
        optimizer.step()
        torch.testing.assert_close(params[0], expected[0])
    params, optimizer = make(small_bytes=small_bytes)
    with pytest.raises(RuntimeError, match=r"checkpoint\(use_reentrant=True\)"):
        program(
            lambda f, x: torch_checkpoint.checkpoint(f, x, use_reentrant=True), params
        ).backward()


def test_explicit_regions_deliver_once():
    params, optimizer = make()
    x = leaf(10)
    y = ms.CheckpointFunction.apply(lambda t: t * params[0], 1, x, params[0])
    ms.CheckpointFunction.apply(lambda t: (t * params[0]).sin(), 1, y, params[0]).sum().backward()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1


# rule 2


@BOTH
def test_python_hooks_before_and_after_see_the_gradient(small_bytes):
    p = nn.Parameter(torch.ones(4))
    seen = []

    def see(name):
        return p.register_post_accumulate_grad_hook(
            lambda p: seen.append((name, p.grad.clone(), p.detach().clone()))
        )

    see("before")
    optimizer = ms.Adam([p], in_backward=True, small_bytes=small_bytes)
    handle = see("after")
    (p * 3).sum().backward()
    assert [name for name, *_ in seen] == ["before", "after"]
    for _, grad, value in seen:
        assert torch.equal(grad, torch.full((4,), 3.0))
        assert torch.equal(value, torch.ones(4)) or not ms._native.available
    assert p.grad is None
    optimizer.step()
    handle.remove()
    (p * 3).sum().backward()
    assert [name for name, *_ in seen] == ["before", "after", "before"]


def test_a_waiting_gradient_that_is_replaced_or_taken_away():
    params, optimizer = make()
    before = values(params)
    seen = []

    def hook(param):
        seen.append(param)
        if len(seen) == 3:  # the others wait
            seen[0].grad = None
            seen[1].grad = torch.full((10,), -1.0)  # the other way

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    loss(params).backward()
    optimizer.step()
    taken, replaced, last = (next(i for i, p in enumerate(params) if p is q) for q in seen)
    assert torch.equal(params[taken], before[taken]) and params[taken] not in optimizer.state
    assert (params[replaced] > before[replaced]).all()
    assert (params[last] < before[last]).all()


# rule 3


def test_a_replaced_state_is_noticed():
    params, optimizer = make(1)
    for new in (collections.defaultdict(dict), None):
        loss(params).backward()
        optimizer.step()
        if new is not None:
            optimizer.state = new
        else:
            step = optimizer.state[params[0]]["step"]
            assert step == 1
            optimizer.state[params[0]]["step"] = torch.tensor(41.0)
    loss(params).backward()
    assert optimizer.state[params[0]]["step"] == 42


def test_the_step_tensor_is_advanced_in_place():
    params, optimizer = make(1)
    loss(params).backward()
    optimizer.step()
    step = optimizer.state[params[0]]["step"]
    loss(params).backward()
    assert step == 2 and optimizer.state[params[0]]["step"] is step


# rule 4


def test_a_gradient_left_in_grad_is_applied_by_step():
    params, optimizer = make()
    reference = [nn.Parameter(p.detach().clone()) for p in params]
    expected = torch.optim.Adam(reference, lr=0.1)
    params[0].grad = torch.full((10,), 2.0)
    reference[0].grad = torch.full((10,), 2.0)
    loss(params[1:]).backward()
    loss(reference[1:]).backward()
    optimizer.step()
    expected.step()
    for p, q in zip(params, reference, strict=True):
        torch.testing.assert_close(p, q)
    assert params[0].grad is None


def test_a_second_gradient_by_hand_is_refused():
    params, optimizer = make()
    loss(params).backward()
    params[1].grad = torch.ones(10)
    after = values(params)
    with pytest.raises(RuntimeError, match="parameter 1 of the optimizer .* was stepped in backwa"):
        optimizer.step()
    assert all(torch.equal(p, a) for p, a in zip(params, after, strict=True))


# rule 5


def failing(params, at):
    """A loss whose backward raises before the gradient of ``params[at]``."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    total = torch.zeros(())
    for i, p in enumerate(params):  # the last one's gradient comes first
        total = total * 1 + (Fail.apply(p) if i == at else p).sum()
    return total


@BOTH
def test_a_backward_that_raises(small_bytes):
    params, optimizer = make(4, small_bytes=small_bytes)
    before = values(params)
    with pytest.raises(ZeroDivisionError):
        failing(params, 1).backward()
    waits = small_bytes > 0
    for i in (2, 3):
        assert torch.equal(params[i], before[i]) == waits
        assert (params[i].grad is not None) == waits
    for i in (0, 1):
        assert torch.equal(params[i], before[i])
    if waits:  # nothing was stepped: as after any backward that raised
        assert not optimizer.state
        optimizer.step()
        assert not torch.equal(params[2], before[2])
        return
    for again in (optimizer.step, lambda: loss(params).backward()):
        with pytest.raises(RuntimeError, match="raised after 2 parameters had been stepped"):
            again()
    assert optimizer.state[params[3]]["step"] == 1
    optimizer.zero_grad()
    loss(params).backward()
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_a_failure_that_is_acknowledged_leaves_no_step_behind():
    params, optimizer = make(4, small_bytes=0)
    with pytest.raises(ZeroDivisionError):
        failing(params, 1).backward()
    optimizer.zero_grad()
    with optimizer.norm_pass(1.0):  # which must be the first of a step
        loss(params).backward()
    loss(params).backward()
    optimizer.step()


def test_retain_graph_and_a_second_backward_raise_torchs_version_error():
    p = nn.Parameter(torch.ones(4))
    optimizer = ms.Adam([p], in_backward=True)
    y = (p * p).sum()
    y.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# accumulation


@BOTH
def test_accumulation_equals_one_big_batch(small_bytes):
    nets = [nn.Linear(5, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = ms.Adam(nets[0].parameters(), lr=0.1, in_backward=True, small_bytes=small_bytes)
    theirs = torch.optim.Adam(nets[1].parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(12, 5)
        for i, part in enumerate(x.split(4)):
            if i < 2:
                with ours.accumulate():
                    nets[0](part).sin().sum().backward()
                assert nets[0].weight.grad is not None
            else:
                nets[0](part).sin().sum().backward()
        assert nets[0].weight.grad is None
        ours.step()
        nets[1](x).sin().sum().backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(nets[0].weight, nets[1].weight, rtol=1e-5, atol=1e-6)


def test_accumulate_is_left_after_an_exception():
    params, optimizer = make()
    with pytest.raises(ZeroDivisionError), optimizer.accumulate():
        raise ZeroDivisionError
    loss(params).backward()
    assert params[0].grad is None


# who takes part


def test_folding_was_removed():
    text = re.escape(
        "(fold=True) was removed, as its steps were approximate: use grads_on=, with which "
        "gradients add up elsewhere, exactly, or accumulate() without fold"
    )
    params, optimizer = make()
    with pytest.raises(ValueError, match=f"^accumulate{text}$"), optimizer.accumulate(fold=True):
        pass
    with pytest.raises(ValueError, match=f"^accumulate_when{text}$"):
        optimizer.accumulate_when(lambda: True, fold=True)
    optimizer.accumulate_when(lambda: False, fold=False)
    loss(params).backward()  # nothing was entered
    assert all(p.grad is None for p in params)


def test_unused_frozen_and_tied():
    params, optimizer = make(4)
    params[1].requires_grad_(False)
    tied = params[2]
    (params[0].sum() + params[1].sum() * params[0].sum() + (tied * tied).sum()).backward()
    optimizer.step()
    assert set(optimizer.state) == {params[0], tied}
    assert optimizer.state[tied]["step"] == 1
    params[1].requires_grad_(True)
    params[1].sum().backward()
    optimizer.step()
    assert optimizer.state[params[1]]["step"] == 1


def test_autograd_grad_steps_nothing():
    params, optimizer = make()
    before = values(params)
    torch.autograd.grad(loss(params), params)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert not optimizer.state


def test_create_graph():
    params, optimizer = make()
    x = leaf(10)
    (grad,) = torch.autograd.grad((params[0] * x).sin().sum(), x, create_graph=True)
    grad.square().sum().backward()
    optimizer.step()
    assert not params[0].requires_grad or params[0].grad is None
    loss(params).backward(create_graph=False)


def test_nested_backward_in_a_hook():
    """A backward inside a backward: each parameter is stepped once, by whichever reaches it."""
    params, optimizer = make(2)
    h = params[0] * 2

    @h.register_hook
    def another(grad):
        with torch.enable_grad():
            params[1].sum().backward()

    h.sum().backward()
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 1]


def test_backwards_in_threads():
    params, optimizer = make(8, small_bytes=0)
    run_threads(lambda i: loss(params[i::4]).backward(), 4)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1] * 8


@BOTH
def test_an_optimizer_that_goes_during_a_backward_ends_it(small_bytes):
    params, optimizer = make(4, small_bytes=small_bytes)
    expected, other = make(4, small_bytes=small_bytes)
    gone = weakref.ref(optimizer)

    def drop(grad):
        nonlocal optimizer
        optimizer = None
        gc.collect()

    params[1].register_hook(drop)
    loss(params).backward()
    loss(expected).backward()
    assert optimizer is None and other is not None
    for p, q in zip(params, expected, strict=True):
        assert torch.equal(p, q) and p.grad is None
    gc.collect()
    assert gone() is None
    before = values(params)
    loss(params).backward()
    for p, b in zip(params, before, strict=True):
        assert torch.equal(p, b) and p.grad is not None
