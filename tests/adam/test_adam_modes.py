"""Every mode as the reference has it: stepped, saved, loaded; of Adam also options by group."""

import copy
import math
import re

import pytest
import torch
from modes import (
    ALL_MODES,
    BF16,
    BF16_CHOICES,
    FP16,
    FP32,
    FP64,
    MODES,
    assert_same,
    both_ways,
    copies,
    every_mode,
    every_mode_of_all,
    loss,
    make,
    make_mode,
    save_and_load,
    train,
)
from references import assert_is_the_references, oracle
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.adam import blocks


@every_mode_of_all
def test_in_backward_as_after_it(mode):
    runs = [make_mode(mode, in_backward=in_backward) for in_backward in (False, True)]
    for params, optimizer in runs:
        train(params, optimizer, 4)
    assert_same(*runs)
    assert all(p.grad is None for p in runs[1][0])


@both_ways
@every_mode_of_all
def test_a_step_is_the_references(mode, in_backward):
    """Float32 within a few ulps, as not every machine fuses; the same random bits."""
    params, optimizer = make_mode(mode, in_backward=in_backward, seed=2**63 + 5)
    train(params, optimizer, 2)
    for number in range(2, 5):
        expected = oracle(params, optimizer, number)
        train(params, optimizer, 1, start=number)
        for param, state in zip(params, expected, strict=True):
            assert_is_the_references(param, optimizer, state)


@pytest.mark.skipif(
    not _native.available or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="of the native part, where it fuses products and sums",
)
@pytest.mark.parametrize("mode", [mode for mode in MODES if "4bit" in mode or "split8" in mode])
def test_a_step_is_the_references_bit_for_bit(mode):
    params, optimizer = make_mode(mode, in_backward=True, seed=5)
    for number in range(4):
        expected = None if number == 0 else oracle(params, optimizer, number)
        train(params, optimizer, 1, start=number)
        for param, state in zip(params, expected or [], strict=bool(expected)):
            for name, value in {"param": param.detach(), **optimizer.state[param]}.items():
                assert torch.equal(value, state[name]), name


@every_mode_of_all
def test_resume_bit_for_bit(mode):
    params, optimizer = make_mode(mode, in_backward=True)
    train(params, optimizer, 3)
    others = copies(params)
    dtype, options = ALL_MODES[mode]
    own = {name: value for name, value in options.items() if name != "kind"}
    resumed = options.get("kind", ms.Adam)(others, in_backward=True, **own)
    resumed.load_state_dict(save_and_load(optimizer.state_dict()))
    assert_same((params, optimizer), (others, resumed))
    for one in ((params, optimizer), (others, resumed)):
        train(*one, 3, start=3)
    assert_same((params, optimizer), (others, resumed))
    assert others[0].dtype == dtype


@both_ways
@pytest.mark.parametrize(
    "mode", ["split, states 8bit", "stochastic, states bf16", "split8", "fp32, states 4bit"]
)
def test_copies_go_on_alike(mode, in_backward):
    params, optimizer = make_mode(mode, in_backward=in_backward)
    train(params, optimizer, 2)
    others, other = copy.deepcopy((params, optimizer))
    for one in ((params, optimizer), (others, other)):
        train(*one, 2, start=2)
    assert_same((params, optimizer), (others, other))


@every_mode
def test_to_fp32_state_dict(mode):
    """Torch's Adam goes on from it, and so does a plain one of ours."""
    params, optimizer = make_mode(mode, in_backward=True)
    train(params, optimizer, 3)
    exported = save_and_load(optimizer.to_fp32_state_dict())
    values = optimizer.fp32_parameters()
    assert all(v.dtype == FP32 for v in values)
    options = {"lr": 1, "amsgrad": MODES[mode][1].get("amsgrad", False)}
    runs = []
    for kind in (ms.Adam, torch.optim.Adam):
        others = copies(values, FP64 if "fp64" in mode else None)  # which has moments of its own
        runs.append((others, kind(others, **options)))
        fresh = runs[-1][1].state_dict()["param_groups"][0].keys()
        runs[-1][1].load_state_dict(copy.deepcopy(exported))
        assert runs[-1][1].state_dict()["param_groups"][0].keys() == fresh
        for other in others:
            state = runs[-1][1].state[other]
            names = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
            assert list(state) == names[: 3 + options["amsgrad"]]
            if "fp64" not in mode:
                assert all(t.dtype == FP32 for t in state.values())
        train(*runs[-1], 1, start=3)
    assert runs[0][1].param_groups[0]["lr"] == 1e-2
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@every_mode
@pytest.mark.parametrize("kind", [ms.Adam, torch.optim.Adam])
def test_a_plain_state_loads_into_every_mode(mode, kind):
    dtype, options = MODES[mode]
    plain_options = {k: v for k, v in options.items() if k in ("amsgrad", "weight_decay")}
    params, _ = make(FP64 if dtype == FP64 else FP32)
    plain = kind(params, lr=1e-2, **plain_options)
    train(params, plain, 3)
    others = copies(params, dtype)
    optimizer = ms.Adam(others, lr=1, in_backward=True, **options)
    formats = {}
    fresh, other = make_mode(mode)
    train(fresh, other, 1)
    for i, param in enumerate(fresh):
        formats[i] = {name: (v.dtype, v.shape) for name, v in other.state[param].items()}
    optimizer.load_state_dict(save_and_load(plain.state_dict()))
    for i, (param, mine) in enumerate(zip(params, others, strict=True)):
        state = optimizer.state[mine]
        if dtype != FP16 and (dtype != BF16 or kind is ms.Adam):
            assert {n: (v.dtype, v.shape) for n, v in state.items()} == formats[i]
        assert state["step"] == 3
        exported = optimizer.to_fp32_state_dict()["state"][i]
        for name in ("exp_avg", "exp_avg_sq"):
            exact = plain.state[param][name]
            # Half a step of the codes, of the block's largest.
            near = {"8bit": 0.03, "4bit": 0.75 / 8}.get(options.get("state_dtype"), 2**-8)
            near = near if "exp_avg_scale" in state else 2**-8
            torch.testing.assert_close(
                exported[name].double(), exact.double(), rtol=near, atol=near * exact.abs().max()
            )
    train(others, optimizer, 2, start=3)
    assert optimizer.state[others[0]]["step"] == 5
    assert all(p.isfinite().all() for p in others)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("split", "stochastic"), ("split", "bf16"), ("split, states 8bit", "split, states bf16"),
        ("fp32, states 8bit", "fp32"), ("fp32, states bf16", "fp32, states 8bit"),
        ("fp32, states 4bit", "fp32, states 8bit"), ("fp32, states 8bit", "fp32, states 4bit"),
        ("split8", "split"), ("split", "split8"),
    ],
)  # fmt: skip
def test_another_modes_state_is_refused(saved, own):
    params, optimizer = make_mode(saved)
    train(params, optimizer, 1)
    others, other = make_mode(own)
    train(others, other, 1)
    before = copy.deepcopy(other.state_dict())
    values = [
        f"{name}={MODES[mode][1].get(name)!r}" for mode in (saved, own)
        for name in ("bf16", "state_dtype")
    ]  # fmt: skip
    both = "saved with {}, {}, this optimizer has {}, {}".format(*values)
    with pytest.raises(ValueError, match=re.escape(both)) as raised:
        other.load_state_dict(optimizer.state_dict())
    assert "to_fp32_state_dict()" in str(raised.value)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        now = blocks.codes_from_saved(after["state"][index])
        for name, value in blocks.codes_from_saved(state).items():
            assert torch.equal(now[name], value)
    other.load_state_dict(optimizer.to_fp32_state_dict())
    train(others, other, 1)


# options by group


def test_groups_have_their_own_modes():
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(4096).to(t)) for t in (BF16, BF16, FP32, FP32, FP64)]
    groups = [
        {"params": params[:1], "bf16": "split"},
        {"params": params[1:2], "bf16": "stochastic", "state_dtype": "8bit", "seed": 3},
        {"params": params[2:3], "max_grad_norm": 0.1},
        {"params": params[3:4], "state_dtype": BF16},
        {"params": params[4:]},
    ]
    together = ms.Adam([dict(group) for group in groups], in_backward=True)
    others = copies(params)
    alone = []
    for i, group in enumerate(groups):
        own = {"bf16", "state_dtype", "seed", "max_grad_norm"} & together.param_groups[i].keys()
        assert own == group.keys() - {"params"}
        # Random bits depend on where in the optimizer a parameter is.
        before = [nn.Parameter(torch.zeros(1)) for _ in range(i)]
        alone.append(
            ms.Adam([*({"params": [p]} for p in before), {**group, "params": [others[i]]}])
        )
    for number in range(3):
        loss(params, number).backward()
        together.step()
        loss(others, number).backward()
        for optimizer in alone:
            optimizer.step()
            optimizer.zero_grad()
    for p, q, optimizer in zip(params, others, alone, strict=True):
        assert torch.equal(p, q)
        assert together.state[p].keys() == optimizer.state[q].keys()


def test_groups_that_are_added_have_the_optimizers_mode():
    params, optimizer = make(BF16, bf16="split", seed=4)
    more = nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer.add_param_group({"params": [more]})
    assert optimizer.param_groups[1]["bf16"] == "split"
    other = nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [other], "bf16": None})
    train([*params, more, other], optimizer, 1)
    assert "param_rest" in optimizer.state[more] and "param_rest" not in optimizer.state[other]


def test_a_plain_group_has_torchs_keys():
    params, optimizer = make(max_grad_norm=None, bf16=None, state_dtype=None, seed=0)
    plain = torch.optim.Adam(params).state_dict()["param_groups"][0]
    assert optimizer.state_dict()["param_groups"][0].keys() == plain.keys()


# bad input

BAD = {
    "bf16": (FP32, {"bf16": "nearest"}, BF16_CHOICES),
    "bf16 of fp32": (FP32, {"bf16": "split"}, "bf16='split' is for bfloat16 parameters, got"),
    "bf16 of fp16": (FP16, {"bf16": "split8"}, "bf16='split8' is for bfloat16 parameters, got"),
    "state_dtype": (FP32, {"state_dtype": FP16}, "state_dtype must be .* got torch.float16"),
    "state_dtype name": (FP32, {"state_dtype": "4 bit"}, "state_dtype must be .* got '4 bit'"),
    "states of fp64": (FP64, {"state_dtype": "8bit"}, "state_dtype='8bit' is for float32"),
    "states of complex": (torch.complex64, {"state_dtype": BF16}, "state_dtype=torch.bfloat16 is"),
    "amsgrad": (FP32, {"state_dtype": "8bit", "amsgrad": True}, "'8bit' cannot .* amsgrad=True"),
    "seed": (FP32, {"seed": -1}, "seed must be an int"),
    "seed too large": (FP32, {"seed": 2**64}, "seed must be an int"),
    "seed of float": (FP32, {"seed": 1.5}, "seed must be an int"),
    "max_grad_norm": (FP32, {"max_grad_norm": -1.0}, "max_grad_norm must be .* got -1.0"),
    "max_grad_norm of 0": (FP32, {"max_grad_norm": 0}, "max_grad_norm must be .* got 0"),
    "max_grad_norm name": (FP32, {"max_grad_norm": "1"}, "max_grad_norm must be .* got '1'"),
    "clip_global_norm": (FP32, {"clip_global_norm": -0.5}, "clip_global_norm must be"),
    "clip_global_norm nan": (FP32, {"clip_global_norm": math.nan}, "clip_global_norm must be"),
}


@both_ways
@pytest.mark.parametrize("kind", [ms.Adam, ms.AdamW])
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case, kind, in_backward):
    dtype, options, message = BAD[case]
    param = nn.Parameter(torch.ones(2, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        kind([param], in_backward=in_backward, **options)
    assert param._post_accumulate_grad_hooks is None
    if "clip_global_norm" not in options:
        with pytest.raises(ValueError, match=message):
            kind([{"params": [param], **options}], in_backward=in_backward)
        optimizer = kind([nn.Parameter(torch.ones(1))], in_backward=in_backward)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [param], **options})
        assert len(optimizer.param_groups) == 1
        assert param._post_accumulate_grad_hooks is None


def test_split_parameters_are_stepped_as_those_of_float32():
    torch.manual_seed(0)
    split = nn.Parameter(torch.randn(5000, dtype=torch.bfloat16))
    exact = nn.Parameter(split.detach().float())
    ours, plain = ms.AdamW([split], bf16="split"), ms.AdamW([exact])
    for _ in range(20):
        split.grad = torch.randn_like(split)
        exact.grad = split.grad.float()
        ours.step()
        plain.step()
    assert torch.equal(ours.fp32_parameters()[0], exact)
    assert not torch.equal(split.float(), exact)


@every_mode_of_all
def test_under_a_default_device(mode):
    """What a step makes for itself lies beside the parameters."""
    blocks._numbers.cache_clear()
    (params, optimizer), (expected, plain) = make_mode(mode), make_mode(mode)
    for number in range(2):
        loss(params, number).backward()
        loss(expected, number).backward()
        with torch.device("meta"):
            optimizer.step()
            optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    assert all(map(torch.equal, params, expected))


def test_float32_parameters_that_were_bfloat16():
    net = torch.nn.Linear(8, 8).bfloat16()
    optimizer = ms.AdamW(net.parameters(), bf16="split")
    net(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    net.float()
    for one, param in zip(optimizer.fp32_parameters(), net.parameters(), strict=True):
        assert torch.equal(one, param)
