"""Every mode of SGD and Lion: converted, accumulated, scaled, clipped. See test_adam_modes.py."""

import copy

import pytest
import torch
from modes import (
    FP32,
    FP64,
    LION,
    MOMENTUM,
    RULE_MODES,
    assert_same,
    both_ways,
    clip_all,
    copies,
    loss,
    make,
    make_mode,
    save_and_load,
    train,
)
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import rules
from memsave_ext.memory import footprint

each_mode = pytest.mark.parametrize("mode", RULE_MODES)


@each_mode
def test_to_fp32_state_dict(mode):
    """A plain optimizer goes on from it, and torch's where it has one."""
    params, optimizer = make_mode(mode, in_backward=True)
    train(params, optimizer, 3)
    exported = save_and_load(optimizer.to_fp32_state_dict())
    names = {name for group in optimizer.param_groups for name in rules.rule_of(group).moments}
    runs = []
    for kind in (type(optimizer), torch.optim.SGD)[: 1 + isinstance(optimizer, ms.SGD)]:
        others = copies(optimizer.fp32_parameters(), FP64 if "fp64" in mode else None)
        runs.append((others, kind(others, lr=1)))
        runs[-1][1].load_state_dict(copy.deepcopy(exported))
        for other in others:
            state = runs[-1][1].state.get(other, {})
            assert state.keys() == names
            assert all(t.dtype in (FP32, FP64) for t in state.values())
        train(*runs[-1], 1, start=3)
    for ours, theirs in zip(runs[0][0], runs[-1][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@each_mode
def test_a_plain_state_loads_into_every_mode(mode):
    dtype, options = RULE_MODES[mode]
    kind = options["kind"]
    plain_options = {k: v for k, v in options.items() if k in ("momentum", "lr")}
    params, _ = make(FP64 if dtype == FP64 else FP32)
    plain = (torch.optim.SGD if kind is ms.SGD else kind)(params, **{"lr": 1e-2, **plain_options})
    train(params, plain, 3)
    others = copies(params, dtype)
    own = {name: value for name, value in options.items() if name != "kind"}
    optimizer = kind(others, **{**own, "in_backward": True, "lr": 1})
    optimizer.load_state_dict(save_and_load(plain.state_dict()))
    exported = optimizer.to_fp32_state_dict()["state"]
    for i, param in enumerate(params):
        for name, exact in plain.state.get(param, {}).items():
            found = exported[i][name].double()
            near = 0.03 if f"{name}_scale" in optimizer.state[others[i]] else 2**-8
            bound = near * exact.abs().max().item()
            torch.testing.assert_close(found, exact.double(), rtol=near, atol=bound)
    train(others, optimizer, 2, start=3)
    assert all(p.isfinite().all() for p in others)


@pytest.mark.parametrize("options", [MOMENTUM, {**MOMENTUM, "nesterov": True}, LION], ids=str)
def test_accumulated(options):
    """Gradients that add up in .grad are stepped with, as those of one backward."""
    together = make(FP64, **options, in_backward=True)
    apart = make(FP64, **options, in_backward=True)
    for number in range(3):
        (loss(together[0], 2 * number) + loss(together[0], 2 * number + 1)).backward()
        with apart[1].accumulate():
            loss(apart[0], 2 * number).backward()
        loss(apart[0], 2 * number + 1).backward()
        for _, optimizer in (together, apart):
            optimizer.step()
    assert_same(together, apart)


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("options", [{"kind": ms.SGD}, MOMENTUM, LION], ids=str)
def test_clipped_together(options):
    """By norm_pass() and by clip_global_norm=, as clip_grad_norm_ does."""
    passed = make(FP64, **options, in_backward=True)
    kept = make(FP64, **options, clip_global_norm=0.5)
    plain = make(FP64, **options)
    for number in range(3):
        with passed[1].norm_pass(0.5):
            loss(passed[0], number).backward()
        for params, optimizer in (passed, kept, plain):
            loss(params, number).backward()
            if optimizer is plain[1]:
                clip_all(0.5)(params)
            optimizer.step()
            optimizer.zero_grad()
    for others in (passed[0], kept[0]):
        for p, q in zip(others, plain[0], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)


@both_ways
@pytest.mark.parametrize(
    "options",
    [{"kind": ms.SGD}, {**MOMENTUM, "dampening": 0.5}, LION, {**LION, "state_dtype": "8bit"}],
    ids=str,
)
def test_loss_scaling(options, in_backward):
    """A step whose gradients are not finite is left out, the first one, too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    params, optimizer = make(**options, in_backward=in_backward, grad_scaler=scaler)
    others, plain = make(**options)
    assert optimizer.param_groups[0].keys() == plain.param_groups[0].keys()
    for number in range(4):
        broken = number % 3 == 0
        factor = float("inf") if broken else 1.0
        scaler.scale(loss(params, number) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not broken:
            loss(others, number).backward()
            plain.step()
            plain.zero_grad()
    assert scaler.get_scale() == 256.0
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "mode", ["SGD", "momentum", "momentum, states 8bit", "Lion", "Lion, split"]
)
def test_footprint_knows_the_states(mode):
    dtype, options = RULE_MODES[mode]
    options = dict(options)
    kind = options.pop("kind")
    net = nn.Linear(256, 64).to(dtype)
    optimizer = kind(net.parameters(), **options, in_backward=True)
    told = footprint(net, optimizer).expected.between
    net(torch.randn(3, 256).to(dtype)).sum().backward()
    optimizer.step()
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert told.optimizer.bytes == held
