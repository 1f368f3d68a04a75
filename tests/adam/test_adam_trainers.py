"""What trainers do with an optimizer: closures, accumulation that they decide on, clipping."""

import contextlib
import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # by name, before any optimizer

import memsave_ext as ms

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def make(**options):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return net, ms.AdamW(net.parameters(), lr=0.1, in_backward=True, **options)


def loss(net, rows=slice(None)):
    return net(X[rows]).square().sum()


def torchs(net):
    """A copy, and torch's optimizer of it."""
    plain = copy.deepcopy(net)
    return plain, torch.optim.AdamW(plain.parameters(), lr=0.1)


def assert_same(net, plain):
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


# closures


def test_a_closure_steps_as_torchs():
    net, optimizer = make()
    plain, expected = torchs(net)
    for _ in range(3):
        losses = []
        for model, opt in ((net, optimizer), (plain, expected)):

            def closure(model=model, opt=opt):
                opt.zero_grad()
                value = loss(model)
                value.backward()
                return value

            losses.append(opt.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert_same(net, plain)
        assert all(p.grad is None for p in net.parameters())


def test_a_closure_that_fails_leaves_the_step_open():
    net, optimizer = make(small_bytes=0)
    first = net[0].weight

    def refuse(grad):
        raise ZeroDivisionError

    handle = first.register_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: loss(net).backward())
    handle.remove()
    with pytest.raises(RuntimeError, match="a backward raised after 3 parameters had been stepped"):
        optimizer.step(lambda: loss(net).backward())
    optimizer.zero_grad()
    optimizer.step(lambda: loss(net).backward())
    assert optimizer.state[first]["step"].item() == 1


def test_a_closure_with_two_backwards_is_refused():
    net, optimizer = make()

    def closure():
        loss(net).backward()
        loss(net).backward()

    with pytest.raises(RuntimeError, match="receives a second gradient in one step"):
        optimizer.step(closure)


def test_how_to_go_on_where_step_was_not_called():
    """As after an interrupt that came between backward and step()."""
    (net, optimizer), (other, expected) = make(), make()
    loss(net).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"call opt.zero_grad\(\) and opt.step\(\)"):
        loss(net).backward()
    optimizer.zero_grad()
    optimizer.step()
    for of, its in ((net, optimizer), (other, expected)):
        if of is other:
            loss(of).backward()
            its.step()
        loss(of).backward()
        its.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# accumulate_when


def test_accumulate_when_equals_accumulate():
    net, optimizer = make()
    other, by_hand = make()
    last = True
    optimizer.accumulate_when(lambda: not last)
    for _ in range(3):
        for row in range(4):
            last = row == 3
            loss(net, row).backward()
            kept = [p.grad is not None for p in net.parameters()]
            assert kept == [not last] * 4
            with contextlib.nullcontext() if last else by_hand.accumulate():
                loss(other, row).backward()
        optimizer.step()
        by_hand.step()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert optimizer.state[net[0].bias]["step"].item() == 3


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_the_condition_is_asked_once_for_each_backward():
    net, optimizer = make(small_bytes=0)
    asked = []
    optimizer.accumulate_when(lambda: asked.append(1))  # None is false
    loss(net).backward()
    optimizer.step()
    assert len(asked) == 1
    with optimizer.accumulate():  # no question any more
        loss(net).backward()
    optimizer.step()
    with optimizer.norm_pass(1.0):
        loss(net).backward()
    loss(net).backward()
    optimizer.step()
    assert len(asked) == 2
    optimizer.accumulate_when(None)
    loss(net).backward()
    optimizer.step()
    assert len(asked) == 2 and optimizer.state[net[0].bias]["step"].item() == 4


def test_an_error_of_the_condition_comes_out_of_backward():
    net, optimizer = make()
    before = copy.deepcopy(net)

    def condition():
        raise LookupError("which micro-batch?")

    optimizer.accumulate_when(condition)
    with pytest.raises(LookupError, match="which micro-batch"):
        loss(net).backward()
    assert_same(net, before)
    optimizer.accumulate_when(None)
    optimizer.zero_grad()
    loss(net).backward()
    optimizer.step()
    assert optimizer.state[net[0].bias]["step"].item() == 1


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_accumulate_when_refuses():
    net, optimizer = make()
    with pytest.raises(TypeError, match="condition must be a function without arguments.* got bo"):
        optimizer.accumulate_when(True)
    optimizer.accumulate_when(lambda: True)
    with optimizer.norm_pass(1.0):
        loss(net).backward()
    with pytest.raises(RuntimeError, match="accumulated after norm_pass"):
        loss(net).backward()


def test_copies_have_no_condition_and_it_keeps_nothing_alive():
    net, optimizer = make()
    optimizer.accumulate_when(functools.partial(bool, optimizer))  # a cycle
    assert copy.deepcopy(optimizer)._on_gradients() == "step"
    assert pickle.loads(pickle.dumps(optimizer))._on_gradients() == "step"
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    loss(net).backward()
    assert net[0].weight.grad is not None


# a scaler


def test_a_scaler_that_a_trainer_makes_later():
    runs = []
    for late in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024)
        net, optimizer = make(**({} if late else {"grad_scaler": scaler}))
        if late:
            optimizer.grad_scaler = scaler
        for _ in range(3):
            scaler.scale(loss(net)).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append((net, optimizer))
    assert_same(runs[0][0], runs[1][0])
    groups = [optimizer.param_groups[0] for _, optimizer in runs]
    # On CUDA the number of the step is on the device then.
    assert groups[0]["fused"] is groups[1]["fused"] is True
    net, optimizer = make()
    scaler.scale(loss(net)).backward()
    with pytest.raises(RuntimeError, match="opt.grad_scaler = scaler where a trainer has made it"):
        scaler.step(optimizer)
    ordinary = ms.Adam(nn.Linear(2, 2).parameters(), differentiable=True)
    with pytest.raises(ValueError, match="torch's own implementation, which has no grad_scaler"):
        ordinary.grad_scaler = torch.amp.GradScaler("cpu")
    assert ordinary.grad_scaler is None


# clipping

STEPPED = r"4 of 4 parameters have been stepped in backward by memsave_ext.AdamW"


@pytest.mark.parametrize(
    "clip",
    [
        lambda params: clip_grad_norm_(params, 1.0),
        lambda params: clip_grad_norm_(max_norm=1.0, parameters=(p for p in params)),
        lambda params: nn.utils.clip_grad_norm_(params, 1.0, norm_type=1.0, foreach=True),
        lambda params: nn.utils.clip_grads_with_norm_(params, 1.0, torch.ones(())),
        lambda params: clip_grad_value_(params, clip_value=0.1),
    ],
    ids=["norm", "norm, generator", "norm, foreach", "with norm", "value"],
)
def test_torchs_clipping_after_a_step_in_backward_is_an_error(clip):
    net, optimizer = make()
    params = list(net.parameters())

    def clip_by_hand():
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        clip(params)
        assert all((param.grad < 2).all() for param in params)
        net.zero_grad()

    clip_by_hand()
    loss(net).backward()
    with pytest.raises(RuntimeError, match=STEPPED):
        clip(params)
    optimizer.step()
    clip_by_hand()
    loss(net).backward()
    optimizer.remove_hooks()
    clip_by_hand()


def test_torchs_clipping_of_what_is_still_there():
    net, optimizer = make()
    plain, _ = torchs(net)
    with optimizer.accumulate():
        loss(net).backward()
    loss(plain).backward()
    assert torch.equal(
        clip_grad_norm_(net.parameters(), 0.1), clip_grad_norm_(plain.parameters(), 0.1)
    )
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    optimizer.step()
    loss(net).backward()
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.full((3,), 2.0)
    with pytest.raises(RuntimeError, match="4 of 5 parameters have been stepped"):
        clip_grad_norm_([other, *net.parameters()], 1.0)
    assert torch.equal(other.grad, torch.full((3,), 2.0))  # nor are the others clipped
    assert clip_grad_norm_(other, 1.0) == pytest.approx(12**0.5)
    # trainers that do not clip measure
    assert clip_grad_norm_(net.parameters(), float("inf")) == 0


def test_torchs_clipping_knows_nothing_of_optimizers_that_are_gone():
    net, optimizer = make()
    loss(net).backward()
    del optimizer
    gc.collect()
    clip_grad_norm_(net.parameters(), 1.0)


def test_torchs_clipping_compiles():
    _net, _optimizer = make()
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.full((3,), 2.0)
    compiled = torch.compile(lambda: clip_grad_norm_([other], 1.0), backend="eager", fullgraph=True)
    assert compiled().item() == pytest.approx(12**0.5)
    assert other.grad.norm().item() == pytest.approx(1)
