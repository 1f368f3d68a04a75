"""Adam with a GradScaler."""

import math
import pickle

import pytest
import torch
from modes import (
    FP16,
    FP32,
    assert_close_to,
    assert_same,
    both_ways,
    clip_all,
    copies,
    exact_run,
    loss,
    make,
    nothing_in_backward,
    tensors,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import memsave_ext as ms
from memsave_ext.adam.states import make_state


def scaled_step(params, optimizer, scaler, number, spoiled=()):
    optimizer.zero_grad()
    value = loss(params, number)
    for i in spoiled:
        value = value + (params[i] * math.inf).sum()
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()


def make_scaled(dtype=FP32, scale=1024.0, **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return *make(dtype, grad_scaler=scaler, **options), scaler


@both_ways
def test_grad_scaler_as_in_torchs_loop(in_backward):
    params, optimizer, scaler = make_scaled(in_backward=in_backward, eps=1e-3)
    others = copies(params)
    other = torch.optim.Adam(others, lr=1e-2, eps=1e-3)
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for number in range(7):
        scaled_step(params, optimizer, scaler, number)
        scaled_step(others, other, torchs, number)
        assert scaler.get_scale() == torchs.get_scale()
        assert scaler.state_dict() == torchs.state_dict()
    assert scaler.get_scale() == 4096
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@both_ways
def test_grad_scaler_with_fp16_parameters(in_backward):
    """Which torch's refuses. A scale that is a power of 2 leaves no trace."""
    params, optimizer, scaler = make_scaled(FP16, in_backward=in_backward)
    others, other = make(FP16)
    for number in range(4):
        scaled_step(params, optimizer, scaler, number)
        train(others, other, 1, start=number)
    assert_same((params, optimizer), (others, other))


@both_ways
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_an_infinity_skips_its_parameter(in_backward, options):
    params, optimizer, scaler = make_scaled(in_backward=in_backward, **options)
    for number in range(2):
        scaled_step(params, optimizer, scaler, number)
    before = {name: t.clone() for name, t in tensors(params, optimizer)}
    scaled_step(params, optimizer, scaler, 2, spoiled=[1])
    assert scaler.get_scale() == 512
    for name, value in tensors(params, optimizer):
        assert torch.equal(value, before[name]) == name.startswith("1 "), name
    scaled_step(params, optimizer, scaler, 3)
    steps = [optimizer.state[p]["step"].item() for p in params]
    assert steps == [4, 3, 4, 4]
    assert scaler.get_scale() == 512
    assert all(p.isfinite().all() for p in params)


@nothing_in_backward
@both_ways
def test_an_infinity_skips_all_with_clip_global_norm(in_backward):
    params, optimizer, scaler = make_scaled(in_backward=in_backward, clip_global_norm=1.0)
    scaled_step(params, optimizer, scaler, 0)
    before = {name: t.clone() for name, t in tensors(params, optimizer)}
    scaled_step(params, optimizer, scaler, 1, spoiled=[2])
    assert scaler.get_scale() == 512
    assert all(torch.equal(t, before[name]) for name, t in tensors(params, optimizer))
    scaled_step(params, optimizer, scaler, 2)
    assert [optimizer.state[p]["step"].item() for p in params] == [2] * 4


def test_an_infinity_in_the_first_step():
    params, optimizer, scaler = make_scaled(in_backward=True)
    scaled_step(params, optimizer, scaler, 0, spoiled=range(4))
    assert scaler.get_scale() == 512
    scaled_step(params, optimizer, scaler, 0)
    assert [optimizer.state[p]["step"].item() for p in params] == [1] * 4


@nothing_in_backward
@both_ways
@pytest.mark.parametrize("clip", ["max_grad_norm", "clip_global_norm"])
def test_grad_scaler_with_clipping(clip, in_backward):
    """Of the gradients that are not scaled."""
    options = {"eps": 0.01}
    params, optimizer, scaler = make_scaled(in_backward=in_backward, **{clip: 0.3}, **options)
    each = clip_all(0.3)
    exact, norms = exact_run(
        params, options, each if clip != "max_grad_norm" else lambda all: [each([p]) for p in all]
    )
    for number in range(4):
        scaled_step(params, optimizer, scaler, number)
    assert_close_to(params, exact)
    if clip == "clip_global_norm":
        assert optimizer.grad_norm.item() == pytest.approx(norms[-1].item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
def test_grad_scaler_with_norm_pass():
    options = {"eps": 0.01}
    params, optimizer, scaler = make_scaled(in_backward=True, **options)
    exact, norms = exact_run(params, options, clip_all(0.3))
    for number, norm in enumerate(norms):
        value = scaler.scale(loss(params, number))
        with optimizer.norm_pass(0.3):
            value.backward(retain_graph=True)
        value.backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_close_to(params, exact)
    before = copies(params)
    value = scaler.scale(loss(params, 9) + (params[0] * math.inf).sum())
    scale = scaler.get_scale()
    with optimizer.norm_pass(0.3):
        value.backward(retain_graph=True)
    value.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@both_ways
def test_a_step_before_anything_was_scaled(in_backward):
    """As of torch.distributed.checkpoint, for which the states are made."""
    _, optimizer, scaler = make_scaled(in_backward=in_backward)
    optimizer.step()
    assert scaler.get_scale() == 1024.0 and not scaler._per_optimizer_states
    net = nn.Linear(4, 4)
    optimizer = ms.AdamW(net.parameters(), in_backward=in_backward, grad_scaler=scaler)
    saved = get_optimizer_state_dict(net, optimizer)
    set_optimizer_state_dict(net, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_group_that_is_added_after_the_scaler():
    _, optimizer = make(FP32, in_backward=True)
    optimizer.grad_scaler = torch.amp.GradScaler("cpu")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("given", ["to the constructor", "later", "before a group"])
def test_with_a_scaler_steps_are_counted_on_the_device(given, foreach):
    """Which alone knows what is skipped. Here the device is one without memory."""
    param, scaler = nn.Parameter(torch.ones(3)), torch.amp.GradScaler("cpu")
    first = scaler if given == "to the constructor" else None
    optimizer = ms.Adam([param], foreach=foreach, grad_scaler=first)
    on_device = torch.empty(3, device="meta")
    if first is None:
        assert make_state(on_device, optimizer.param_groups[0])["step"].device.type == "cpu"
        optimizer.grad_scaler = scaler
    if given == "before a group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "foreach": foreach})
    assert make_state(on_device, optimizer.param_groups[-1])["step"].device.type == "meta"


def test_torchs_adam_goes_on_with_what_was_scaled():
    params, scaler = [nn.Parameter(torch.ones(3)) for _ in range(2)], torch.amp.GradScaler("cpu")
    ours = ms.Adam(params[:1], foreach=True, grad_scaler=scaler)
    torchs = torch.optim.Adam(params[:1])
    theirs = torch.optim.Adam(params[1:])
    scaler.scale(params[0].square().sum()).backward()
    scaler.step(ours)
    ours.zero_grad()
    torchs.load_state_dict(ours.state_dict())
    for optimizer, losses in ((torchs, params[:1]), (theirs, 2 * params[1:])):
        for param in losses:
            optimizer.zero_grad()
            param.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(*params)


def test_gradients_that_were_unscaled_by_hand():
    params, optimizer, scaler = make_scaled(eps=0.01)
    exact, _ = exact_run(params, {"eps": 0.01}, clip_all(0.3))
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(params, number)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 0.3)
        scaler.step(optimizer)
        scaler.update()
    assert_close_to(params, exact)


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"clip_global_norm": 0.3}])
@pytest.mark.parametrize(
    "clip", [nn.utils.clip_grad_value_, nn.utils.clip_grad_norm_], ids=["value", "norm"]
)
def test_an_infinity_that_was_unscaled_by_hand(clip, options):
    """Clipping makes it finite: what unscale_() has found counts."""
    params, optimizer, scaler = make_scaled(**options)
    for spoiled in ((), (1,), ()):
        before = {name: tensor.clone() for name, tensor in tensors(params, optimizer)}
        scale = scaler.get_scale()
        optimizer.zero_grad()
        value = loss(params, 1) + sum((params[i] * math.inf).sum() for i in spoiled)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        clip(params, 0.3)
        scaler.step(optimizer)
        scaler.update()
        after = dict(tensors(params, optimizer))
        assert (scaler.get_scale() == scale / 2) is bool(spoiled)
        assert all(p.grad is not None for p in params)
        same = before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        assert same is bool(spoiled)


@both_ways
def test_another_default_dtype(in_backward):
    slopes = torch.randn(3, 8)
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            param = nn.Parameter(torch.zeros(8, dtype=torch.float32))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            optimizer = ms.Adam([param], grad_scaler=scaler, in_backward=in_backward)
            for slope in slopes:
                scaler.scale((param * slope).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(param)
    assert torch.equal(*results) and results[0].all()


@both_ways
def test_finite_doubles_whose_squares_are_not(in_backward):
    """torch's scaler steps: it asks for values that are not finite."""
    params = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)
    ours = ms.SGD(params[:1], lr=1e-200, grad_scaler=scaler, in_backward=in_backward)
    theirs = torch.optim.SGD(params[1:], lr=1e-200)
    for param, optimizer in zip(params, (ours, theirs), strict=True):
        scaler.scale((param * 1e200).sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(*params) and params[0].abs().max() < 0.5
    assert scaler.get_scale() == 2.0


def test_a_disabled_grad_scaler_is_none():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    params, optimizer = make(in_backward=True, grad_scaler=scaler)
    for number in range(2):
        scaled_step(params, optimizer, scaler, number)
    others, other = make()
    train(others, other, 2)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


def test_a_grad_scaler_that_was_not_handed_over():
    params, optimizer = make(in_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(params, 0)).backward()
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(optimizer)


def test_a_copy_is_given_the_scaler_again():
    params, copies_ = [nn.Parameter(torch.ones(3))], [nn.Parameter(torch.ones(3))]
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    optimizer = pickle.loads(pickle.dumps(ms.Adam(params, lr=0.1, grad_scaler=scaler)))
    params = optimizer.param_groups[0]["params"]
    expected = torch.optim.Adam(copies_, lr=0.1, eps=1.0)
    optimizer.param_groups[0]["eps"] = 1.0  # so that a wrong scale shows
    assert optimizer.grad_scaler is None
    optimizer.grad_scaler = scaler
    for used, step, of in ((scaler, optimizer, params), (other, expected, copies_)):
        used.scale((of[0] * 3).sum()).backward()
        used.step(step)
        used.update()
    torch.testing.assert_close(params[0], copies_[0])
