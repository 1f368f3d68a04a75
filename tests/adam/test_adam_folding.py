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
from memsave_ext.adam.fallback.rules import update
from memsave_ext.adam.fallback.stored import pack, unpack
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
    assert distance(params, exact, start) < (0.02 if dtype == FP32 else 2e-6)
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


def folded_grads_step(param, optimizer, grads):
    for grad in grads[:-1]:
        with optimizer.accumulate(fold=True):
            (param * grad).sum().backward()
    (param * grads[-1]).sum().backward()
    optimizer.step()


def test_fold_of_float64_in_its_whole_range():
    """The squares of gradients from 1e-150 to 1e150 have float64's range."""
    generator = torch.Generator().manual_seed(2)
    scales = 10.0 ** torch.arange(-150, 151, dtype=FP64).repeat(3)  # whole vectors and a rest
    p = nn.Parameter(torch.randn(scales.shape, dtype=FP64, generator=generator))
    optimizer = ms.Adam([p], lr=1e-2, eps=0.0, in_backward=True)
    exact = copies([p])
    expected = torch.optim.Adam(exact, lr=1e-2, eps=0.0)
    inexact = 0
    for number in range(10):
        grads = [scales * (0.5 + torch.rand(scales.shape, dtype=FP64, generator=generator))
                 for _ in range(3)]  # fmt: skip
        total = sum(grads)
        before = {k: v.clone() for k, v in optimizer.state[p].items()} if number else None
        folded_grads_step(p, optimizer, grads)
        exact[0].grad = total
        expected.step()
        if before is not None:
            exp_avg_sq = 0.999 * before["exp_avg_sq"] + 0.001 * total.square()
            of_total = 9 * 2.0**-21 * before["exp_avg"] / total
            bound = 0.999 * before["exp_avg_sq"] * 2.0**-22 + 0.001 * total.square() * (
                2.1 * of_total + 1e-13
            )
            off = (optimizer.state[p]["exp_avg_sq"] - exp_avg_sq).abs()
            assert (off <= bound + 1e-13 * exp_avg_sq).all()
            inexact += (off > 1e-13 * exp_avg_sq).sum().item()
    assert inexact > 9 * p.numel() / 2
    mine, theirs = optimizer.state[p], expected.state[exact[0]]
    torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=1e-13, atol=0)
    torch.testing.assert_close(mine["exp_avg_sq"], theirs["exp_avg_sq"], rtol=1e-5, atol=0)
    torch.testing.assert_close(p, exact[0], rtol=0, atol=1e-7)


INF, LARGEST, TINY = float("inf"), torch.finfo(FP64).max, torch.finfo(FP64).tiny
# Moments, and what packing leaves of them. exp_avg has 20 bits of mantissa, exp_avg_sq 21.
PACKED = [
    ((0.0, 0.0), (0.0, 0.0)),
    ((-0.0, 1.0), (-0.0, 1.0)),
    ((1e-300, 1e300), None),
    ((-1e300, 1e-300), None),
    ((1 + 2.0**-20, 1 + 2.0**-21), (1 + 2.0**-20, 1 + 2.0**-21)),
    ((1 + 2.0**-21, 1 + 2.0**-22), (1.0, 1.0)),  # ties, to even
    ((-1 - 3 * 2.0**-21, 1 + 3 * 2.0**-22), (-1 - 2.0**-19, 1 + 2.0**-20)),
    ((1 + 2.0**-21 + 2.0**-52, 1 + 2.0**-22 + 2.0**-52), (1 + 2.0**-20, 1 + 2.0**-21)),
    ((2 - 2.0**-52, 2 - 2.0**-52), (2.0, 2.0)),
    ((-LARGEST, LARGEST), (-INF, INF)),
    ((INF, INF), (INF, INF)),
    ((-INF, 1.0), (-INF, 1.0)),
    ((TINY, TINY), (TINY, TINY)),
    ((-TINY / 4, TINY / 4), (-TINY / 4, TINY / 4)),
    ((TINY * (1 - 2.0**-52), TINY * (1 - 2.0**-52)), (TINY, TINY)),
    ((5e-324, 5e-324), (0.0, 0.0)),
    ((2.0**-1042, 2.0**-1043), (2.0**-1042, 2.0**-1043)),  # the least of each
]
NANS = [0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1, (0xFFF0 << 48) + 1, (1 << 64) - 1,
        (1 << 63) - 1]  # fmt: skip


def assert_bits(found, expected):
    assert torch.equal(found.view(torch.int64), expected.view(torch.int64))


def of_bits(bits):
    return torch.tensor([b - (1 << 64) if b >> 63 else b for b in bits]).view(FP64)


def rounded(values, bits):
    """Normal numbers with that many significant bits, rounded to nearest even."""
    mantissa, exponent = torch.frexp(values)
    # In two steps, as 2^exponent can be infinite.
    half = exponent // 2
    mantissa = (mantissa * 2**bits).round() / 2**bits
    return mantissa * 2.0 ** half.double() * 2.0 ** (exponent - half).double()


def test_what_is_kept_of_float64_moments_meanwhile():
    """They keep their range, and NaN and infinity stay what they are."""
    generator = torch.Generator().manual_seed(4)
    ordinary = torch.randn(2, 1000, dtype=FP64, generator=generator)
    ordinary *= 10.0 ** torch.linspace(-300, 300, 1000, dtype=FP64)
    ordinary[1] = ordinary[1].abs()
    special = torch.tensor([given for given, _ in PACKED], dtype=FP64).T
    nans = of_bits(NANS).expand(2, -1)
    given = torch.cat([special, nans, ordinary], 1)
    expected = torch.stack([rounded(given[0], 21), rounded(given[1], 22)])
    for i, (_, kept) in enumerate(PACKED):
        if kept is not None:
            expected[:, i] = torch.tensor(kept, dtype=FP64)
    expected[:, len(PACKED) : len(PACKED) + len(NANS)] = float("nan")

    p = nn.Parameter(torch.zeros(given.shape[1], dtype=FP64))
    optimizer = ms.Adam([p], in_backward=True)
    (p * 0).sum().backward()
    optimizer.step()
    state = optimizer.state[p]
    state["exp_avg"].copy_(given[0])
    state["exp_avg_sq"].copy_(given[1])
    with optimizer.accumulate(fold=True):
        (p * 0).sum().backward()
    held = state["exp_avg_sq"].clone()
    assert_bits(held, pack(*given, None))
    for found, wanted in zip(unpack(held), expected, strict=True):
        number = ~wanted.isnan()
        assert found[~number].isnan().all()
        assert_bits(found[number], wanted[number])
    optimizer.step()  # The gradients are none, but for what rounding exp_avg leaves.
    exp_avg_sq, lasts = 0.999 * expected[1], expected.isfinite().all(0) & (given[0].abs() < 1e150)
    assert lasts.sum() > 500
    bound = 1e-13 * exp_avg_sq + 0.001 * (9.1 * 2.0**-21 * given[0]).square() + 1e-323
    assert ((state["exp_avg_sq"] - exp_avg_sq).abs() <= bound)[lasts].all()
    assert state["exp_avg_sq"][expected.isnan().any(0)].isnan().all()
    assert not state["exp_avg_sq"][given[1].isinf()].isfinite().any()


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
        with pytest.raises(RuntimeError, match="folded into the optimizer's moments"):
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
        with pytest.raises(RuntimeError, match="the gradients of 1 parameters were folded"):
            save()
    with pytest.raises(RuntimeError, match="norm_pass"), optimizer.norm_pass(1.0):
        p.sum().backward()
    optimizer.step()
    copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("with_gradient", [False, True])
def test_folded_gradients_are_not_in_the_norm_of_all(with_gradient):
    folded, other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer = ms.Adam([folded, other], lr=0.1, in_backward=True)
    with optimizer.accumulate(fold=True):
        folded.sum().backward()
    optimizer.remove_hooks()
    optimizer.clip_global_norm = 1.0
    other.grad = torch.full((8,), 2.0) if with_gradient else None
    optimizer.step()
    torch.testing.assert_close(folded.detach(), torch.full((8,), 0.9))
    torch.testing.assert_close(other.detach(), torch.full((8,), 0.9 if with_gradient else 1.0))
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(32.0 * with_gradient).sqrt())
    assert not optimizer._stepper.folded()
