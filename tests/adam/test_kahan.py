"""``bf16="kahan"`` of version 0.3.0 is "split": as an option, and in what was saved with it.

``saved/kahan-0.3.0.pt`` was written by that version, after five steps of AdamW: "params" in
bfloat16, "state_dict", "optimizer" (its ``torch.save``) and "fp32", its ``fp32_parameters()``.
"""

import copy
import io
import re
from pathlib import Path

import pytest
import torch
from modes import BF16
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import formats, kahan

FILE = Path(__file__).with_name("saved") / "kahan-0.3.0.pt"
KINDS = {"Adam": ms.Adam, "AdamW": ms.AdamW, "SGD": ms.SGD, "Lion": ms.Lion}
WARNING = re.escape("bf16='kahan' now does the same as bf16='split'")
of_kahan = pytest.mark.filterwarnings(f"ignore:memsave_ext. {WARNING}")


def weight(dtype=BF16):
    return nn.Parameter(torch.ones(8, dtype=dtype))


# options


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_is_split_and_warns_on_the_users_line(kind):
    with pytest.warns(FutureWarning, match=WARNING) as raised:
        optimizer = KINDS[kind]([weight()], lr=0.1, bf16="kahan")
    assert [Path(one.filename) for one in raised] == [Path(__file__)]
    assert optimizer.param_groups[0]["bf16"] == "split"
    optimizer.add_param_group({"params": [weight()]})  # has the option, and is silent
    assert optimizer.param_groups[1]["bf16"] == "split"
    assert optimizer.state_dict()["param_groups"][1]["bf16"] == "split"


@pytest.mark.parametrize("kind", KINDS)
def test_so_is_that_of_a_group(kind):
    with pytest.warns(FutureWarning, match=WARNING) as raised:
        optimizer = KINDS[kind]([{"params": [weight()], "bf16": "kahan"}], lr=0.1)
    assert [Path(one.filename) for one in raised] == [Path(__file__)]
    with pytest.warns(FutureWarning, match=WARNING) as raised:
        optimizer.add_param_group({"params": [weight()], "bf16": "kahan"})
    assert [Path(one.filename) for one in raised] == [Path(__file__)]
    assert [group["bf16"] for group in optimizer.param_groups] == ["split", "split"]


def test_what_is_refused_for_split_is_refused():
    with (
        pytest.warns(FutureWarning, match=WARNING),
        pytest.raises(ValueError, match="bf16='split' is for bfloat16 parameters, got"),
    ):
        ms.AdamW([weight(torch.float32)], bf16="kahan")


def test_steps_are_those_of_split():
    runs = []
    for bf16 in ("kahan", "split"):
        param = weight()
        if bf16 == "kahan":
            with pytest.warns(FutureWarning, match=WARNING):
                optimizer = ms.AdamW([param], bf16=bf16, in_backward=True)
        else:
            optimizer = ms.AdamW([param], bf16=bf16, in_backward=True)
        for _ in range(3):
            param.float().square().sum().backward()
            optimizer.step()
        runs.append((param.detach(), *optimizer.state[param].values()))
    assert all(map(torch.equal, *runs))


# what was saved


@pytest.fixture
def saved():
    return torch.load(FILE, weights_only=True)


def made(saved, bf16="split", **options):
    params = [nn.Parameter(p.clone()) for p in saved["params"]]
    groups = [{"params": params[:2]}, {"params": params[2:], "state_dtype": "8bit"}]
    return ms.AdamW(groups, bf16=bf16, **options)


def by_state_dict(saved):
    optimizer = made(saved)
    optimizer.load_state_dict(saved["state_dict"])
    return optimizer


def in_backward(saved):
    optimizer = made(saved, in_backward=True)
    optimizer.load_state_dict(saved["state_dict"])
    return optimizer


def into_kahan(saved):
    optimizer = made(saved, bf16="kahan")
    optimizer.load_state_dict(saved["state_dict"])
    return optimizer


def pickled(saved):
    return torch.load(io.BytesIO(saved["optimizer"]), weights_only=False)


def copied(saved):
    return copy.deepcopy(pickled(saved))


def saved_again(saved):
    again = made(saved)
    again.load_state_dict(by_state_dict(saved).state_dict())
    return again


WAYS = (by_state_dict, in_backward, into_kahan, pickled, copied, saved_again)
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def bits(values):
    return values.detach().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@of_kahan
@every_way
def test_float32_parameters_are_the_saved_ones(saved, way):
    before = copy.deepcopy(saved["state_dict"])
    optimizer = way(saved)
    assert [group["bf16"] for group in optimizer.param_groups] == ["split", "split"]
    for param, old in zip(params_of(optimizer), saved["params"], strict=True):
        assert torch.equal(bits(param), bits(old))
        assert optimizer.state[param]["param_rest"].dtype == torch.int16
    for found, expected in zip(optimizer.fp32_parameters(), saved["fp32"], strict=True):
        assert (bits(found) - bits(expected)).abs().max() <= 1
        assert (found != found.bfloat16().float()).any()
    # What was loaded is the caller's.
    assert before["param_groups"] == saved["state_dict"]["param_groups"]
    for index, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(saved["state_dict"]["state"][index][name], value)


@of_kahan
@every_way
def test_training_goes_on(saved, way):
    """As torch's AdamW with the float32 parameters and the moments that were saved."""
    optimizer = way(saved)
    exact = [nn.Parameter(p.clone()) for p in saved["fp32"]]
    plain = torch.optim.AdamW([{"params": exact[:2]}, {"params": exact[2:]}])
    plain.load_state_dict(copy.deepcopy(optimizer.to_fp32_state_dict()))
    stepped = optimizer._in_backward
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        grads = [torch.randn(p.shape, generator=generator).to(BF16) for p in exact]
        for p, q, grad in zip(params_of(optimizer), exact, grads, strict=True):
            q.grad = grad.float()
            if stepped:
                p.backward(grad)
            else:
                p.grad = grad.to(memory_format=torch.preserve_format)
        optimizer.step()
        plain.step()
    for found, expected in zip(optimizer.fp32_parameters(), exact, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-7)


@of_kahan
def test_another_optimizer_refuses_it(saved):
    for other in ("split8", "stochastic", None):
        optimizer = made(saved, bf16=other)
        with pytest.raises(ValueError, match="saved with bf16='split', .*, this .* has bf16"):
            optimizer.load_state_dict(saved["state_dict"])


# low bits


def test_low_bits_of_bfloat16_numbers():
    """Of every other one, zeros and infinities among them, from minus to plus half of its unit."""
    upper = torch.arange(-(2**15), 2**15, 2, dtype=torch.int32).to(torch.int16).view(BF16)
    above = (bits(upper).int() + 1).to(torch.int16).view(BF16)
    units = torch.where(above.isfinite(), above.float() - upper.float(), 0)
    finite = upper.isfinite()
    for sixteenths in (-16, -11, -8, -1, 0, 1, 5, 8, 16):
        compensation = (units * sixteenths / 32).bfloat16()
        low = kahan.low_bits(upper, compensation)
        assert low.dtype == torch.int16
        found, expected = formats.unsplit(upper, low), upper.float() + compensation.float()
        assert torch.equal(bits(found)[~finite], bits(upper.float())[~finite])
        same_sign = finite & (expected.signbit() == upper.signbit())
        apart = (bits(found).long() - bits(expected).long()).abs()
        # At a power of 2 the unit below is half of the one above.
        inside = same_sign & ((expected - upper.float()).abs() <= units.abs() / 4 + 1e-45)
        assert (apart[inside] <= 1).all()
        assert found[finite].isfinite().all()
        assert not low[finite & ~same_sign].any()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("rest", [0.0, 3.0, -3.0, float("inf"), float("nan")])
def test_low_bits_beside_another_parameter_are_less_than_it_resolves(value, rest):
    param, compensation = torch.tensor([value], dtype=BF16), torch.tensor([rest], dtype=BF16)
    found = formats.unsplit(param, kahan.low_bits(param, compensation))
    torch.testing.assert_close(found, param.float(), rtol=2**-8, atol=1e-38, equal_nan=True)
