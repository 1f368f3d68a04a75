"""Steps by the reference's formulas, and how near to them others must be."""

import copy

import torch
from modes import BF16, FP16, FP32, FP64, gradients

from memsave_ext.adam import formats
from memsave_ext.adam.fallback.rules import update


def oracle(params, optimizer, number):
    """One step by the reference's formulas, on copies."""
    group = optimizer.param_groups[0]
    results = []
    for position, (param, grad) in enumerate(zip(params, gradients(params, number), strict=True)):
        param, state = param.detach().clone(), copy.deepcopy(optimizer.state[param])
        factor = None
        if (max_norm := group.get("max_grad_norm")) is not None:
            factor = min(1.0, max_norm / (grad.double().norm().item() + 1e-6))
        update(param, grad, state, group, position=position, factor=factor)
        results.append({"param": param, **state})
    return results


def assert_codes_alike(found, expected):
    """Where what was rounded differs by an ulp of float32, few are rounded to a neighbour."""
    apart = (found.int() - expected.int()).abs()
    assert apart.max() <= 1 and (apart > 0).double().mean() <= 2e-3


def assert_rounded_alike(found, expected):
    """Where what was rounded differs by an ulp of float32, few are rounded to a neighbour."""
    unit = torch.finfo(found.dtype).eps
    found, expected = found.double(), expected.double()
    assert (found != expected).double().mean() <= 2e-3
    torch.testing.assert_close(found, expected, rtol=unit, atol=unit * 1e-6)


def assert_few_ulps_apart(found, expected):
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * unit, atol=8 * unit)


IS_NEAR = {
    torch.uint8: assert_codes_alike,
    BF16: assert_rounded_alike,
    FP16: assert_rounded_alike,
    FP32: assert_few_ulps_apart,
    FP64: assert_few_ulps_apart,
}


def not_close(found, expected, rtol):
    return ~torch.isclose(found, expected, rtol=rtol, atol=1e-8)


UNIT_OF_BOTH_HALVES = {"split8": 2**-15}  # the other keeps a float32


def assert_is_the_references(param, optimizer, state):
    """Float32 within a few ulps, as not every machine fuses; the same random bits."""
    found = {"param": param.detach(), **optimizer.state[param]}
    assert found.keys() == state.keys()
    if "param_rest" in found:  # what both halves stand for
        row = formats.param_format_of(param, optimizer.param_groups[0])
        values = [row.load(d["param"], d.pop("param_rest")) for d in (found, state)]
        unit = UNIT_OF_BOTH_HALVES.get(row.name, 5e-7)
        torch.testing.assert_close(*values, rtol=unit, atol=1e-8)
        if row.at_random:  # few are rounded to a neighbour
            assert not_close(*values, rtol=5e-7).double().mean() <= 5e-3
    for name, value in found.items():
        if name == "moments":  # the codes of both
            assert_codes_alike(value & 0xF, state[name] & 0xF)
            assert_codes_alike(value >> 4, state[name] >> 4)
        else:
            IS_NEAR[value.dtype](value, state[name])
