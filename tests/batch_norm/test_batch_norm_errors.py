"""Bad input: torch's messages where it has them, and nothing is updated."""

import copy

import pytest
import torch
import torch.nn.functional as F
from batch_norms import OURS, TORCHS, assert_same_buffers

import memsave_ext as ms
from memsave_ext import _native


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


KINDS = [ms.BatchNorm1d, ms.BatchNorm2d, ms.BatchNorm3d, ms.SyncBatchNorm]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eps": "x"}, TypeError, "eps must be a number, got str"),
        ({"eps": None}, TypeError, "eps must be a number, got NoneType"),
        ({"eps": float("nan")}, ValueError, "eps must be finite, got nan"),
        ({"momentum": "x"}, TypeError, "momentum must be a number or None, got str"),
        ({"momentum": True}, TypeError, "momentum must be a number or None, got bool"),
        ({"momentum": -0.1}, ValueError, "momentum must be between 0 and 1, got -0.1"),
        ({"momentum": 1.5}, ValueError, "momentum must be between 0 and 1, got 1.5"),
        ({"momentum": float("inf")}, ValueError, "momentum must be finite, got inf"),
        ({"negative_slope": "x"}, TypeError, "negative_slope must be a number, got str"),
        ({"negative_slope": float("nan")}, ValueError, "negative_slope must be finite, got nan"),
        ({"num_features": "x"}, TypeError, "num_features must be an int, got str"),
        ({"num_features": 3.0}, TypeError, "num_features must be an int, got float"),
        ({"num_features": -3}, ValueError, "num_features must not be negative, got -3"),
    ],
)
def test_options(kind, options, error, message):
    with pytest.raises(error, match=f"^{kind.__name__}: {message}"):
        kind(**{"num_features": 4, **options})


@pytest.mark.parametrize("kind", ["1d", "2d", "3d"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("eps", [-1.0, -1, 0.0, 0, 1e-300])
def test_eps_as_torch(eps, training, kind):
    """torch raises in the call, and 0 is allowed in eval mode.

    Here too beside versions of torch that refuse 0 there as well, and say so in other words.
    """
    x = torch.randn({"1d": (4, 4), "2d": X.shape, "3d": (2, 4, 3, 3, 2)}[kind])
    ours, theirs = (m[kind](4, eps=eps).train(training) for m in (OURS, TORCHS))
    try:
        F.batch_norm(X, torch.zeros(4), torch.ones(4), eps=0.0)
        words = "positive during training" if training else "non-negative"
    except ValueError:
        words = "positive"
    if eps < 0 or (eps == 0 and training):
        before = copy.deepcopy(ours)
        a, b = raised(ours, x), raised(theirs, x)
        assert type(a) is type(b) is ValueError
        assert str(b) == f"batch_norm eps must be {words}, but got {eps}"
        now = "positive during training" if training else "non-negative"
        assert str(a) == f"batch_norm eps must be {now}, but got {eps}"
        assert_same_buffers(ours, before)
    elif eps == 0 and words == "positive":
        assert type(raised(theirs, x)) is ValueError
        theirs.eps = 1e-30
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_float64_beside_float32(affine, training):
    ours, theirs = (m["2d"](4, affine=affine).train(training) for m in (OURS, TORCHS))
    before = copy.deepcopy(ours)
    name = "weight" if affine else "running_mean"
    assert type(raised(theirs, X.double())) is RuntimeError
    error = raised(ours, X.double())
    assert f"input and {name} must both be float64 or neither of them, got torch.float64" in str(
        error
    )
    assert "neither of them, got torch.float32 and torch.float64" in str(raised(ours.double(), X))
    assert_same_buffers(ours.float(), before)


def test_a_residual_that_is_no_tensor():
    with pytest.raises(TypeError, match="BatchNorm2d: residual must be a tensor or None, got int"):
        ms.BatchNorm2d(4)(X, 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_torch_jit_script():
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), ms.BatchNorm2d(4))
    for module in (model, model[1]):
        with pytest.raises(RuntimeError, match="cannot compile memsave_ext.BatchNorm2d. Use torch"):
            torch.jit.script(module)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sync": "x"}, TypeError, "sync must be True or False, got 'x'"),
        ({"sync": 1}, TypeError, "sync must be True or False, got 1"),
        ({"dry_run": "no"}, TypeError, "dry_run must be True or False, got 'no'"),
        (
            {"sync": True, "process_group": 3},
            TypeError,
            "process_group must be a torch.distributed.ProcessGroup or None, got int",
        ),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
    ],
)
def test_convert_batch_norm(options, error, message):
    model = torch.nn.BatchNorm2d(4)
    with pytest.raises(error, match=f"^convert_batch_norm: {message}"):
        ms.convert_batch_norm(**{"model": model, **options})
    assert type(model) is torch.nn.BatchNorm2d


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad": X[:1]}, "grad must have the shape and dtype of input"),
        ({"grad": X.double()}, "grad must have the shape and dtype of input"),
        ({"statistics": torch.randn(4, 2)}, "statistics must be a contiguous Float tensor"),
        ({"means": torch.randn(2, 3)}, "means must be a contiguous Float tensor"),
        ({"activation": "gelu"}, "activation must be 'none', 'relu' or 'leaky_relu', got 'gelu'"),
    ],
)
def test_the_operators_of_backward(changes, message):
    arguments = {
        "grad": X, "input": X, "weight": None, "bias": None, "residual": None,
        "statistics": torch.rand(2, 4), "means": torch.rand(2, 4), "activation": "none",
        "negative_slope": 0.0, "output_mask": [True, True], **changes,
    }  # fmt: skip
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.ops.memsave_ext.batch_norm_backward_input(**arguments)
    del arguments["means"]
    arguments |= {"training": True, "eps": 1e-5, "output_mask": [True] * 4}
    if "means" not in changes:
        with pytest.raises((RuntimeError, ValueError), match=message):
            torch.ops.memsave_ext.batch_norm_backward(**arguments)


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


def test_what_cannot_be_saved_for_backward():
    """It raises before anything is updated."""
    with torch.inference_mode():
        x = torch.randn(8, 4, 3, 3)
    bn = ms.BatchNorm2d(4)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        bn(x)
    assert_same_buffers(bn, ms.BatchNorm2d(4))
    with torch.no_grad():
        assert torch.equal(bn(x), ms.BatchNorm2d(4)(x.clone()))
        assert torch.equal(bn.eval()(x), bn(x.clone()))
    assert bn.num_batches_tracked == 1
    bn = ms.BatchNorm2d(4, activation="relu")
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        bn(torch.randn(8, 4, 3, 3), residual=x)
    assert_same_buffers(bn, ms.BatchNorm2d(4))


@pytest.mark.skipif(not _native.available, reason="torch runs a Function before its hooks")
def test_a_hook_that_finds_no_room():
    def full(_):
        raise MemoryError

    bn = ms.BatchNorm2d(4)
    with (
        pytest.raises(MemoryError),
        torch.autograd.graph.saved_tensors_hooks(full, lambda x: x),
    ):
        bn(torch.randn(8, 4, 3, 3))
    assert_same_buffers(bn, ms.BatchNorm2d(4))
