"""States of bfloat16, of 8 and of 4 bits."""

import math

import pytest
import torch
from modes import BF16, FP64, copies, distance, make, make_mode, train
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import memsave_ext as ms


def test_8bit_states_are_of_8_bits():
    params, optimizer = make(state_dtype="8bit")
    train(params, optimizer, 1)
    sizes = [sum(t.nbytes for n, t in optimizer.state[p].items() if n != "step") for p in params]
    blocks = [math.ceil(p.numel() / 256) for p in params]
    expected = [2 * p.numel() + 8 * b for p, b in zip(params, blocks, strict=True)]
    small = [p.numel() < 4096 for p in params]
    assert sizes == [
        8 * p.numel() if s else e for p, s, e in zip(params, small, expected, strict=True)
    ]
    assert small == [False, True, False, True]


@pytest.mark.parametrize("mode", ["fp32, states 8bit", "fp32, states bf16"])
def test_low_precision_states_stay_near_exact_adam(mode):
    params, optimizer = make_mode(mode, in_backward=True)
    start = copies(params)
    exact = copies(params)
    expected = torch.optim.Adam(
        exact, lr=1e-2, weight_decay=optimizer.param_groups[0]["weight_decay"]
    )
    for one in ((params, optimizer), (exact, expected)):
        train(*one, 60)
    assert distance(params, exact, start) < 0.05


@pytest.mark.parametrize(
    "betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.9), (0.5, 0.5), (0.8, 0.64), (0.7, 0.49)]
)
def test_the_bound_of_an_8bit_step_is_what_adam_can_reach(betas):
    """By gradients that rise as (beta2 / beta1)^i. Here exp_avg is more than they can have left."""
    beta1, beta2 = betas
    for steps in (1, 2, 10, 100, 20_000):
        i = torch.arange(steps, dtype=FP64)
        grads = (beta1 / beta2) ** i  # the last one first
        if not grads.isfinite().all():
            continue
        first = (1 - beta1) * (beta1**i * grads).sum()
        second = (1 - beta2) * (beta2**i * grads**2).sum() / (1 - beta2**steps)
        reached = (first / second.sqrt()).item()
        param = nn.Parameter(torch.zeros(4096))
        optimizer = ms.Adam([param], lr=1.0, betas=betas, eps=0, state_dtype="8bit")
        param.grad = torch.full_like(param, 1e-20)
        optimizer.step()
        state = optimizer.state[param]
        state["step"].fill_(steps - 1)
        state["exp_avg_scale"].fill_(1.0)
        start = param.detach().clone()
        optimizer.step()
        step = (start - param.detach()).abs().max().item() * (1 - beta1**steps)
        assert step == pytest.approx(reached, rel=1e-3)


@pytest.mark.parametrize("state_dtype", [BF16, "8bit", "4bit"])
def test_what_is_not_finite_shows(state_dtype):
    param = nn.Parameter(torch.zeros(2 * 4096))
    optimizer = ms.Adam([param], state_dtype=state_dtype)
    param.grad = torch.ones_like(param)
    param.grad[5] = math.nan
    optimizer.step()
    optimizer.step()
    assert param[5].isnan() and not param[4096:].isnan().any()


def test_4bit_states_are_of_4_bits():
    params, optimizer = make(state_dtype="4bit")
    train(params, optimizer, 1)
    for p, small in zip(params, [False, True, False, True], strict=True):
        size = sum(t.nbytes for n, t in optimizer.state[p].items() if n != "step")
        assert size == (8 * p.numel() if small else p.numel() + 8 * math.ceil(p.numel() / 128))


@pytest.mark.parametrize("state_dtype", ["8bit", "4bit"])
def test_states_in_blocks_and_memory_formats(state_dtype):
    same_order = nn.Parameter(torch.randn(64, 128, 1, 1))
    other = nn.Parameter(torch.randn(64, 16, 3, 3))
    gaps = nn.Parameter(torch.randn(8192)[::2])
    optimizer = ms.Adam([same_order, other, gaps], state_dtype=state_dtype)

    def step():
        for p in (same_order, other, gaps):
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    assert optimizer.state[gaps]["exp_avg"].dtype == torch.float32
    codes = "moments" if state_dtype == "4bit" else "exp_avg"
    assert optimizer.state[other][codes].dtype == torch.uint8
    same_order.data = same_order.data.to(memory_format=torch.channels_last)
    step()
    other.data = other.data.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="Load this optimizer's to_fp32_state_dict"):
        step()


@pytest.mark.parametrize("state_dtype", ["8bit", "4bit"])
def test_an_amsgrad_state_is_not_for_blocks(state_dtype):
    p = nn.Parameter(torch.ones(8))
    saved = torch.optim.Adam([p], amsgrad=True).state_dict()
    match = f"amsgrad=True, which .* this optimizer's state_dtype='{state_dtype}'"
    with pytest.raises(ValueError, match=match):
        ms.Adam([p], state_dtype=state_dtype).load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_dict_has_the_name_of_a_dtype(dtype):
    """torch.distributed.checkpoint gathers no options that are dtypes."""
    net = nn.Linear(4, 4)
    optimizer = ms.Adam(net.parameters(), state_dtype=dtype)
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    for options in ({"full_state_dict": True}, {"cpu_offload": True}):
        saved = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(**options))
        assert saved["param_groups"][0]["state_dtype"] == str(dtype).split(".")[1]
    older = optimizer.state_dict()
    older["param_groups"][0]["state_dtype"] = dtype
    for state_dict in (optimizer.state_dict(), older):
        other = ms.Adam(nn.Linear(4, 4).parameters(), state_dtype=dtype)
        other.load_state_dict(state_dict)
        assert other.param_groups[0]["state_dtype"] is dtype
        assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert optimizer.param_groups[0]["state_dtype"] is dtype
