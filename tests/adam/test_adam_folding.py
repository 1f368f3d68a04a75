"""Accumulation that folds gradients into the moments."""

import contextlib
import copy
import re

import pytest
import torch
from modes import (
    BF16,
    FP32,
    FP64,
    copies,
    distance,
    gradients,
    loss,
    make,
    nothing_in_backward,
    train,
)
from torch import nn

import memsave_ext as ms
from memsave_ext.adam.fallback.update import update
from memsave_ext.adam.states import make_state


def folded_step(params, optimizer, number, micro_batches=4, all_folded=False):
    for part in range(micro_batches):
        last = part == micro_batches - 1 and not all_folded
        with contextlib.nullcontext() if last else optimizer.accumulate(fold=True):
            loss(params, number * micro_batches + part).backward()
        assert all(p.grad is None for p in params)
    optimizer.step()


def summed_step(params, optimizer, number, micro_batches=4):
    optimizer.zero_grad()
    for part in range(micro_batches):
        loss(params, number * micro_batches + part).backward()
    optimizer.step()


def assert_close_but_at_zeros(params, exact, tolerance):
    """Where gradients cancel, Adam makes a step of full size of what rounding leaves of them."""
    for param, expected in zip(params, exact, strict=True):
        some = expected.grad.abs() > 1e-3
        assert some.double().mean() > 0.99
        torch.testing.assert_close(param[some], expected[some], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"amsgrad": True}, {"maximize": True}, {"betas": (0.3, 0.95)}, {"betas": (0.0, 0.99)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_fold_is_near_exact_adam(options, dtype):
    params, optimizer = make(dtype, in_backward=True, **options)
    exact, start = copies(params), copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2, **options)
    for number in range(50):
        folded_step(params, optimizer, number)
        summed_step(exact, expected, number)
        if number == 0:
            assert_close_but_at_zeros(params, exact, 1e-6)
    assert distance(params, exact, start) < (0.02 if dtype == FP32 else 1e-4)
    assert all(optimizer.state[p]["step"] == 50 for p in params)
    for p, q in zip(params, exact, strict=True):
        mine, theirs = optimizer.state[p], expected.state[q]
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("small_bytes", [0, 1 << 16])
def test_fold_with_every_backward_and_with_bf16_parameters(small_bytes):
    """step() closes what has only been folded."""
    options = {"bf16": "split", "in_backward": True, "small_bytes": small_bytes}
    params, optimizer = make(BF16, **options)
    exact = copies(params, FP32)
    start = copies(exact)
    expected = torch.optim.Adam(exact, lr=1e-2)
    for number in range(10):
        folded_step(params, optimizer, number, all_folded=number % 2 == 1)
        summed_step(exact, expected, number)
    assert distance(optimizer.fp32_parameters(), exact, start) < 0.02


def test_fold_is_the_references():
    params, optimizer = make(in_backward=True, seed=11, weight_decay=0.1)
    group = optimizer.param_groups[0]
    expected = copies(params)
    states = [make_state(p, group) for p in expected]
    for number in range(3):
        folded_step(params, optimizer, number, micro_batches=3)
        for part, phase in enumerate(("first_fold", "fold", "close")):
            grads = gradients(expected, number * 3 + part)
            for position, (p, g, s) in enumerate(zip(expected, grads, states, strict=True)):
                update(p, g, s, group, position=position, phase=phase)
        for p, q, state in zip(params, expected, states, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
            # Packing rounds to 9 bits, at random, what may differ by an ulp.
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(optimizer.state[p][name], state[name], rtol=1e-3,
                                           atol=1e-6)  # fmt: skip


def test_fold_and_parameters_that_take_part_now_and_then():
    params, optimizer = make(in_backward=True)
    exact = copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2)
    for _ in range(2):
        with optimizer.accumulate(fold=True):
            loss(params[:2], 0).backward()
        loss(params[1:3], 1).backward()
        optimizer.step()
        expected.zero_grad()
        loss(exact[:2], 0).backward()
        loss(exact[1:3], 1).backward()
        expected.step()
    assert params[3] not in optimizer.state
    for p, q in zip(params[:3], exact, strict=False):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
        assert optimizer.state[p]["step"] == 2


def test_fold_then_an_ordinary_step_and_accumulation():
    params, optimizer = make(in_backward=True)
    exact, start = copies(params), copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2)
    folded_step(params, optimizer, 0)
    summed_step(exact, expected, 0)
    train(params, optimizer, 1, start=100)
    train(exact, expected, 1, start=100)
    for part in range(4):
        with optimizer.accumulate() if part < 3 else contextlib.nullcontext():
            loss(params, 4 + part).backward()
    optimizer.step()
    summed_step(exact, expected, 1)
    assert distance(params, exact, start) < 0.02
    assert [optimizer.state[p]["step"].item() for p in params] == [3] * 4


def test_no_state_dict_in_the_middle_of_folding():
    params, optimizer = make(in_backward=True)
    train(params, optimizer, 1)
    with optimizer.accumulate(fold=True):
        loss(params, 1).backward()
    for use in (optimizer.state_dict, optimizer.to_fp32_state_dict, lambda: copy.copy(optimizer),
                lambda: copy.deepcopy(optimizer)):  # fmt: skip
        with pytest.raises(RuntimeError, match="folded into their moments"):
            use()
    optimizer.step()
    optimizer.state_dict()


def test_fold_with_a_tied_parameter():
    """Its gradients of one backward are one."""
    params, optimizer = make(in_backward=True)
    exact = copies(params)
    expected = torch.optim.Adam(exact, lr=1e-2)
    for all_params, one in ((params, optimizer), (exact, expected)):
        with optimizer.accumulate(fold=True) if one is optimizer else contextlib.nullcontext():
            (loss(all_params, 0) + all_params[0].sin().sum()).backward()
        (loss(all_params, 1) + all_params[0].sin().sum()).backward()
        one.step()
    assert_close_but_at_zeros(params, exact, 1e-6)


UNFOLDABLE = {
    "without in_backward": ({"in_backward": False}, "in_backward=False"),
    "grad_scaler": ({"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler"),
    "max_grad_norm": ({"max_grad_norm": 1.0}, "max_grad_norm"),
    "clip_global_norm": ({"clip_global_norm": 1.0}, "clip_global_norm"),
    "8bit": ({"state_dtype": "8bit"}, "state_dtype='8bit'"),
    "bf16 states": ({"state_dtype": BF16}, "state_dtype=torch.bfloat16"),
}


@nothing_in_backward
@pytest.mark.parametrize("case", UNFOLDABLE)
def test_what_cannot_be_folded(case):
    options, named = UNFOLDABLE[case]
    params, optimizer = make(**{"in_backward": True, **options})
    match = rf"accumulate\(fold=True\) cannot be combined with {re.escape(named)}"
    with pytest.raises(ValueError, match=match), optimizer.accumulate(fold=True):
        pass
    if case != "grad_scaler":
        train(params, optimizer, 1)


def test_nothing_is_saved_in_the_middle_of_folding():
    p = nn.Parameter(torch.ones(8))
    optimizer = ms.Adam([p], in_backward=True)
    with optimizer.accumulate(fold=True):
        p.sum().backward()
    for save in (optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="1 parameters have gradients folded"):
            save()
    with pytest.raises(RuntimeError, match="norm_pass"), optimizer.norm_pass(1.0):
        p.sum().backward()
    optimizer.step()
    copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())
