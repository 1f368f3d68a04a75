"""Parameters of bfloat16, and what is rounded at random."""

import math

import pytest
import torch
from modes import (
    BF16,
    FP32,
    MODES,
    assert_same,
    both_ways,
    copies,
    every_mode,
    gradients,
    make,
    make_mode,
    train,
)
from torch import nn

import memsave_ext as ms


@pytest.mark.parametrize("mode", [None, "stochastic", "split", "split8"])
@both_ways
def test_a_weight_of_one_moves_as_in_fp32_on_average(mode, in_backward):
    weight = nn.Parameter(torch.ones(4000, dtype=BF16))
    exact = nn.Parameter(torch.ones(4000))
    optimizer = ms.Adam([weight], lr=1e-4, bf16=mode, in_backward=in_backward)
    expected = torch.optim.Adam([exact], lr=1e-4)
    for number in range(100):
        (grad,) = gradients([weight], number, noise=0.2)
        (weight * grad).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        exact.grad = grad.float()
        expected.step()
    (master,) = optimizer.fp32_parameters()
    moved, way = (1 - t.detach().double().mean().item() for t in (master, exact))
    assert way > 0.009
    if mode is None:
        assert moved == 0  # each step is less than half of what bfloat16 resolves
    elif mode == "stochastic":
        # The sum of 100 steps of 2^-8 that are made with a probability of 1e-4 * 2^8.
        deviation = math.sqrt(100 * 1e-4 * 2**-8)
        assert abs(moved - way) < 4 * deviation / math.sqrt(4000)
    else:
        # split8: 4 deviations of 100 roundings at random, of which each has one of 2^-17 at most.
        near = {"split": 2e-6, "split8": 4 * 10 * 2**-17}[mode]
        torch.testing.assert_close(master, exact.detach(), rtol=0, atol=near)
        assert ((weight - master).abs() <= 2**-9).all()


def test_split8_moves_a_weight_by_less_than_it_resolves():
    """To nearest it would stay where it is: steps of 2^-20 of a weight, of which 2^-16 is one."""
    weight = nn.Parameter(torch.ones(4000, dtype=BF16))
    optimizer = ms.Adam([weight], lr=2**-20, bf16="split8")
    for _ in range(64):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = (1 - optimizer.fp32_parameters()[0].double()).mean().item()
    deviation = math.sqrt(64 * 2**-20 * 2**-16)  # of numbers below 1 neighbours are 2^-16 apart
    assert abs(moved - 64 * 2**-20) < 4 * deviation / math.sqrt(4000)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"state_dtype": "8bit"}], ids=str
)
def test_split_is_an_fp32_master(options):
    params, optimizer = make(BF16, bf16="split", in_backward=True, **options)
    masters = copies(params, FP32)
    plain = ms.Adam(masters, lr=1e-2, in_backward=True, **options)
    for number in range(10):
        train(params, optimizer, 1, start=number)
        train(masters, plain, 1, start=number)
        for param, master, joined in zip(params, masters, optimizer.fp32_parameters(), strict=True):
            assert torch.equal(joined, master)
            assert joined.stride() == master.stride()
            assert ((param - master).abs() <= (master.bfloat16() - master).abs()).all()
            for name in ("exp_avg", "exp_avg_sq"):
                mine, theirs = (o.state[p][name] for o, p in ((optimizer, param), (plain, master)))
                assert torch.equal(mine, theirs)


def test_fp32_parameters_of_complex_ones_are_complex():
    param = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    optimizer = ms.Adam([param])
    (value,) = optimizer.fp32_parameters()
    assert torch.equal(value, param.to(torch.complex64))


def test_fp32_parameters_are_copies():
    params, optimizer = make(in_backward=True)
    values = optimizer.fp32_parameters()
    assert all(torch.equal(v, p) for v, p in zip(values, params, strict=True))
    values[0].zero_()
    assert params[0].any()


@pytest.mark.parametrize("mode", ["stochastic", "fp32, states bf16", "fp32, states 8bit"])
def test_seeds(mode):
    def run(**options):
        params, optimizer = make_mode(mode, **options)
        torch.manual_seed(torch.seed())  # has nothing to do with it
        train(params, optimizer, 2)
        return params, optimizer

    assert_same(run(), run(seed=0))
    assert_same(run(seed=7), run(seed=7, in_backward=True))
    for other in (7, 1 << 32):
        assert not all(torch.equal(a, b) for a, b in zip(run()[0], run(seed=other)[0], strict=True))


@pytest.mark.parametrize("mode", ["stochastic", "fp32, states bf16", "fp32, states 8bit"])
def test_every_parameter_has_its_own_random_bits(mode):
    dtype, options = MODES[mode]
    params = [nn.Parameter(torch.ones(4096, dtype=dtype)) for _ in range(2)]
    optimizer = ms.Adam(params, **options)
    for param in params:
        param.grad = torch.linspace(0.1, 1, 4096).to(dtype)
    optimizer.step()
    one, other = ({"param": p, **optimizer.state[p]} for p in params)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@every_mode
def test_elements_are_in_the_order_of_memory(mode):
    """Blocks and random bits do not depend on a tensor's shape; with gaps, on its indices."""
    dtype, options = MODES[mode]
    torch.manual_seed(1)
    flat = torch.randn(8192).to(dtype)
    shaped = {
        "flat": flat.clone(),
        "channels_last": flat.view(8, 16, 16, 4).permute(0, 3, 1, 2).clone(),
        "transposed": flat.view(64, 128).t().clone(),
    }
    if options.get("state_dtype") not in ("8bit", "4bit"):  # which gaps have none of
        shaped["strided"] = torch.stack([flat, flat], 1).view(32, 256, 2)[:, :, 0]
    back = {
        "flat": lambda t: t,
        "channels_last": lambda t: t.permute(0, 2, 3, 1).reshape(-1),
        "transposed": lambda t: t.t().reshape(-1),
        "strided": lambda t: t.reshape(-1),
    }
    assert shaped["transposed"].stride() == (1, 128)
    runs = []
    for name, start in shaped.items():
        param = nn.Parameter(torch.empty(0, dtype=dtype))
        param.data = start
        optimizer = ms.Adam([param], lr=1e-2, **options)
        for number in range(2):
            (grad,) = gradients([flat], number)
            param.grad = torch.empty_like(param)
            param.grad.copy_(_like(grad, start, name))
            optimizer.step()
        state = {n: v for n, v in optimizer.state[param].items() if v.shape == param.shape}
        runs.append({n: back[name](v) for n, v in {"param": param.detach(), **state}.items()})
    for run in runs[1:]:
        assert run.keys() == runs[0].keys()
        assert all(torch.equal(value, runs[0][name]) for name, value in run.items())


def _like(flat, tensor, name):
    """The flat gradient in the indices of the tensor of that name."""
    if name == "channels_last":
        return flat.view(8, 16, 16, 4).permute(0, 3, 1, 2)
    return flat.view(64, 128).t() if name == "transposed" else flat.view(tensor.shape)
