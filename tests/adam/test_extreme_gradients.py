"""A gradient of one element that is no number, or of any size, costs that element alone."""

import copy
import functools
import math

import pytest
import torch
from modes import BF16, FP16, FP32
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.adam import formats
from memsave_ext.adam.fallback.rules import update

NUMEL, AT = 4096 + 300, 700  # blocks of 256 and 128, the last of which are not whole
STEPS, BAD_STEP = 5, 2
BLOCK = slice(512, 768)
EXTREMES = [1e21, 1e25, -3e38, 1e-45, -1e-38, math.inf, -math.inf, math.nan]
RULES = {
    "Adam": (ms.Adam, {}),
    "AdamW": (ms.AdamW, {"weight_decay": 0.1}),
    "SGD": (ms.SGD, {"momentum": 0.9, "nesterov": True}),
    "Lion": (ms.Lion, {"weight_decay": 0.1}),
}
PARAMS = {
    "fp32": (FP32, {}),
    "fp16": (FP16, {}),
    **{f"bf16 {row.name}": (BF16, {"bf16": row.name}) for row in formats.PARAM_FORMATS},
}
STATES = [row.option for row in formats.STATE_FORMATS if row.name != "as_param"]
MODES = [
    (rule, of, states)
    for rule in RULES
    for of in PARAMS
    for states in dict.fromkeys(STATES)
    if states != "4bit" or rule.startswith("Adam")
]


def trained(rule, of, states, bad, where=AT):
    """The float32 copies after each step. Where the gradient is ``bad`` once it is 0 else; None: it
    is that throughout."""
    kind, options = RULES[rule]
    dtype, of_params = PARAMS[of]
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(NUMEL).to(dtype))
    optimizer = kind([param], lr=0.01, state_dtype=states, **options, **of_params)
    found = []
    for step in range(STEPS):
        grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        grad[where] = bad if bad is not None and step == BAD_STEP else 0
        param.grad = grad.to(dtype)
        optimizer.step()
        found.append(optimizer.fp32_parameters()[0])
    return found, optimizer


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays():
    yield
    trained_plainly.cache_clear()


@functools.cache
def trained_plainly(rule, of, bad, first, last):
    """As `trained` with float32 states, the same beside all formats of states."""
    return trained(rule, of, None, bad, slice(first, last))[0]


def others(values, where):
    kept = torch.ones(NUMEL, dtype=torch.bool)
    kept[where] = False
    return values[kept]


@pytest.mark.parametrize("where", [slice(AT, AT + 1), BLOCK], ids=["one", "all of a block"])
@pytest.mark.parametrize("bad", EXTREMES)
@pytest.mark.parametrize("states", dict.fromkeys(STATES), ids=str)
@pytest.mark.parametrize("of", PARAMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.without(case=lambda c: c["states"] == "4bit" and not c["rule"].startswith("Adam"))
def test_costs_that_element_alone(rule, of, states, bad, where):
    expected, _ = trained(rule, of, states, None, where)
    found, optimizer = trained(rule, of, states, bad, where)
    plain = trained_plainly(rule, of, bad, where.start, where.stop)
    for step in range(STEPS):
        assert torch.equal(others(found[step], where), others(expected[step], where))
    assert not torch.equal(others(found[-1], where), others(found[BAD_STEP], where))
    # The step with it is that of float32 states, which are 0 before it, too.
    torch.testing.assert_close(
        found[BAD_STEP][where], plain[BAD_STEP][where], rtol=1e-5, atol=0, equal_nan=True
    )
    row = formats.state_format(states)
    if row is not None and row.codes is not None:
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        scales = [v for name, v in state.items() if name.endswith("_scale")]
        assert all(v.isfinite().all() for v in scales) and len(scales) in (1, 2)
        assert not optimizer.to_fp32_state_dict()["state"][0][scale_of(rule)][where].any() or (
            abs(bad) < 1
        )


def scale_of(rule):
    return "momentum_buffer" if rule == "SGD" else "exp_avg"


@pytest.mark.skipif(
    not _native.available or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="of the native part, where it fuses products and sums",
)
@pytest.mark.parametrize(
    ("rule", "states"), [(rule, s) for rule, of, s in MODES if of == "fp32" and isinstance(s, str)]
)
def test_is_the_references_bit_for_bit(rule, states):
    for bad in EXTREMES:
        _, optimizer = trained(rule, "fp32", states, bad)
        (param,) = optimizer.param_groups[0]["params"]
        expected, state = param.detach().clone(), copy.deepcopy(optimizer.state[param])
        param.grad[AT - 300 :: 300] = bad
        update(expected, param.grad, state, optimizer.param_groups[0])
        optimizer.step()
        for name, value in {"param": param.detach(), **optimizer.state[param]}.items():
            torch.testing.assert_close(
                value, {"param": expected, **state}[name], rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("states", ["8bit", "4bit"])
def test_states_that_are_no_numbers_load_into_blocks(states):
    torch.manual_seed(2)
    param = nn.Parameter(torch.randn(NUMEL))
    plain = torch.optim.Adam([param])
    param.grad = torch.randn(NUMEL)
    plain.step()
    found = []
    for exp_avg, exp_avg_sq in ((0, 0), (1e24, math.inf), (math.nan, math.nan), (-math.inf, 1.0)):
        plain.state[param]["exp_avg"][AT] = exp_avg
        plain.state[param]["exp_avg_sq"][AT] = exp_avg_sq
        optimizer = ms.Adam([nn.Parameter(param.detach().clone())], state_dtype=states)
        optimizer.load_state_dict(plain.state_dict())
        found.append(optimizer.to_fp32_state_dict()["state"][0])
    for state in found:
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], found[0][name])
            assert state[name].isfinite().all() and state[name].any()
