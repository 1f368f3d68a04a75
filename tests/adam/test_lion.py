"""Lion beside an oracle in float64."""

import pytest
import torch
from modes import FP32, FP64, both_ways
from oracles.lion import Oracle
from torch import nn

import memsave_ext as ms

OPTIONS = [
    {}, {"lr": 1e-3}, {"betas": (0.95, 0.98)}, {"weight_decay": 0.1}, {"maximize": True},
    {"betas": (0.0, 0.9)}, {"betas": (0.9, 0.0)}, {"lr": torch.tensor(2e-3), "weight_decay": 0.01},
]  # fmt: skip
DEFAULTS = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}


@both_ways
@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_float64(options, dtype, in_backward):
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(5003, dtype=dtype))
    optimizer = ms.Lion([param], in_backward=in_backward, **options)
    oracle = Oracle(param)
    used = {**DEFAULTS, **options, "lr": float(options.get("lr", 1e-4))}
    clear = torch.ones(5003, dtype=torch.bool)
    for _ in range(20):
        grad = torch.randn(5003, dtype=dtype)
        grad[:7] = 0  # parameters without a gradient do not move
        param.backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        total = oracle.update(grad, **used)
        clear &= (total.abs() > 1e-6) | (total == 0)
    assert clear.double().mean() > 0.99
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(param[clear].double(), oracle.param[clear], rtol=eps * 40, atol=eps)
    exp_avg = optimizer.state[param]["exp_avg"].double()
    torch.testing.assert_close(exp_avg, oracle.m, rtol=eps * 40, atol=eps * 4)


def test_what_is_not_finite_stays_so():
    param = nn.Parameter(torch.ones(3))
    optimizer = ms.Lion([param])
    param.grad = torch.tensor([float("inf"), float("nan"), 1.0])
    optimizer.step()
    assert param.isfinite().tolist() == [True, False, True]
    assert optimizer.state[param]["exp_avg"].isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"betas": 0.9}, TypeError, "betas must be two numbers"),
        ({"maximize": 2}, TypeError, "maximize must be True or False"),
        ({"state_dtype": "4bit"}, ValueError, "packs Adam's two moments into one byte"),
        ({"bf16": "split"}, ValueError, "is for bfloat16 parameters"),
    ],
)
def test_bad_arguments(options, error, message):
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=message):
        ms.Lion([param], in_backward=True, **options)
    assert param._post_accumulate_grad_hooks is None


def test_options_that_are_changed_by_hand_are_checked():
    param = nn.Parameter(torch.ones(2))
    optimizer = ms.Lion([param])
    optimizer.param_groups[0]["betas"] = 3
    param.grad = torch.ones(2)
    with pytest.raises(TypeError, match="betas must be two numbers"):
        optimizer.step()
    assert torch.equal(param, torch.ones(2))


def test_the_state_is_one_moment():
    param = nn.Parameter(torch.ones(4096))
    optimizer = ms.Lion([param], in_backward=True)
    param.sum().backward()
    optimizer.step()
    assert list(optimizer.state[param]) == ["exp_avg"]
    assert optimizer.param_groups[0].keys() == {"params", *DEFAULTS}


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Lion does not support sparse gradients"):
        ms.Lion(embedding.parameters()).step()
