"""Bad input: torch's messages where it has them, and nothing is updated."""

import copy

import pytest
import torch
from batch_norms import OURS, TORCHS, assert_same_buffers

import memsave_ext as ms


def raised(module, *args):
    with pytest.raises((ValueError, RuntimeError)) as info:
        module(*args)
    return info.value


CASES = {
    "dimensions": ("2d", torch.randn(2, 4)),
    "dimensions of 1d": ("1d", torch.randn(2, 4, 3, 3)),
    "dimensions of 3d": ("3d", torch.randn(2, 4, 3, 3)),
    "one value": ("1d", torch.randn(1, 4)),
    "one value of 2d": ("2d", torch.randn(1, 4, 1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_as_torch(case):
    kind, x = CASES[case]
    bn = OURS[kind](4)
    before = copy.deepcopy(bn)
    ours, theirs = raised(bn, x), raised(TORCHS[kind](4), x)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)
    assert_same_buffers(bn, before)


def other(**buffers):
    bn = ms.BatchNorm2d(4)
    for name, tensor in buffers.items():
        setattr(bn, name, tensor)
    return bn


X = torch.randn(2, 4, 3, 3)
FURTHER = {
    "channels": (other(), (torch.randn(2, 5, 3, 3),), "should contain 5 elements not 4"),
    "integers": (other(), (torch.ones(2, 4, 3, 3).long(),), '"batch_norm" not implemented for'),
    "complex": (other(), (X.to(torch.complex64),), '"batch_norm" not implemented for'),
    "residual shape": (
        other(), (X, X[:1]), r"residual must have the shape and dtype of input, \[2, 4, 3, 3\]",
    ),
    "residual dtype": (other(), (X, X.double()), "residual must have the shape and dtype of input"),
    "device": (other().to("meta"), (X,), "on the same device, but weight is on meta and input on"),
    "running device": (
        other(running_mean=torch.zeros(4, device="meta")), (X,), "running_mean is on meta",
    ),
    "running size": (
        other(running_var=torch.ones(3)), (X,), "running_var should contain 4 elements not 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FURTHER)
def test_what_torch_has_no_message_for(case):
    bn, args, message = FURTHER[case]
    before = {k: v.clone() for k, v in bn.named_buffers() if not v.is_meta}
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        bn(*args)
    for name, buffer in bn.named_buffers():
        if name in before:
            assert torch.equal(buffer, before[name])


@pytest.mark.parametrize("activation", ["gelu", "none", 1])
def test_an_unknown_activation(activation):
    with pytest.raises(ValueError, match="BatchNorm2d: activation must be None, 'relu' or"):
        ms.BatchNorm2d(4, activation=activation)


def forward(**changes):
    arguments = {
        "input": X, "weight": None, "bias": None, "residual": None, "statistics": None,
        "running_mean": None, "running_var": None, "training": True, "momentum": 0.1, "eps": 1e-5,
        "activation": "none", "negative_slope": 0.0, "group": None,
    }  # fmt: skip
    return torch.ops.memsave_ext.batch_norm_forward(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "gelu"}, "activation must be 'none', 'relu' or 'leaky_relu', got 'gelu'"),
        ({"input": torch.randn(3)}, r"expected an input of shape \(N, C, \*\), got \[3\]"),
        ({"training": False}, "expected running_mean and running_var to be given"),
        (
            {"statistics": torch.randn(2, 3)},
            "statistics must be a contiguous Float tensor of shape",
        ),
        ({"statistics": torch.randn(2, 4).double()}, "statistics must be a contiguous Float"),
        ({"weight": torch.ones(4).long()}, "weight must be a floating-point tensor"),
    ],
)
def test_the_operator(changes, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        forward(**changes)


def test_released_graph():
    y = ms.BatchNorm2d(4)(X.clone().requires_grad_())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_weight_changed_before_backward():
    bn = ms.BatchNorm2d(4)
    y = bn(X)
    with torch.no_grad():
        bn.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
