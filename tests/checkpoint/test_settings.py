"""Settings of the process are those of the forward in a recompute, and as before after it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

SETTINGS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (True, True),
    ),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "flash": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
        False,
    ),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
        False,
    ),
    "cudnn attention": (
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.enable_cudnn_sdp,
        False,
    ),
}


def attribute(owner, name, value):
    return (lambda: getattr(owner, name)), (lambda new: setattr(owner, name, new)), value


SETTINGS |= {
    "fill": attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "mkldnn": attribute(torch.backends.mkldnn, "enabled", False),
    "mkldnn deterministic": attribute(torch.backends.mkldnn, "deterministic", True),
    "nnpack": (torch._C._get_nnpack_enabled, torch.backends.nnpack.set_flags, False),
    "cudnn": attribute(torch.backends.cudnn, "enabled", False),
    "cudnn deterministic": attribute(torch.backends.cudnn, "deterministic", True),
    "cudnn benchmark": attribute(torch.backends.cudnn, "benchmark", True),
    "cudnn tf32": attribute(torch.backends.cudnn, "allow_tf32", False),
    "cublas tf32": attribute(torch.backends.cuda.matmul, "allow_tf32", True),
    "cublas fp16": attribute(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "cublas bf16": attribute(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, False)
    ),
    "cublas accumulation": attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "precision": attribute(torch.backends, "fp32_precision", "tf32"),
    "mkldnn precision": attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn rnn": attribute(torch.backends.mkldnn.rnn, "fp32_precision", "bf16"),
    "mkldnn conv": attribute(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "cuda conv": attribute(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}
REGIONS = {
    "checkpoint": lambda f, x: ms.checkpoint(f, x),
    "function": lambda f, x: ms.CheckpointFunction.apply(f, 1, x),
}


@contextlib.contextmanager
def setting(name):
    read, write, value = SETTINGS[name]
    before = read()
    # torch's own test utilities, where another test has imported them, forbid to set flags plainly.
    allowed = torch.backends.__allow_nonbracketed_mutation
    with allowed():
        write(value)
    try:
        yield
    finally:
        with allowed():
            write(before)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS.keys())
@pytest.mark.parametrize("name", SETTINGS)
def test_a_recompute_runs_under_the_settings_of_its_forward(name, region, raises):
    read = SETTINGS[name][0]
    outside, seen = read(), []

    def function(x):
        seen.append(read())
        if raises and len(seen) > 1:
            raise ValueError("in the recompute")
        return x.sin().exp()

    x = torch.randn(3, dtype=torch.float32, requires_grad=True)
    with setting(name):
        y = region(function, x)
    assert read() == outside
    with pytest.raises(ValueError, match="recompute") if raises else contextlib.nullcontext():
        y.sum().backward()
    assert len(seen) == 2 and seen[0] == seen[1] != outside
    assert read() == outside


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS.keys())
def test_other_settings_around_backward(region):
    seen = []

    def function(x):
        seen.append(torch.get_default_dtype())
        return x.sin().exp()

    y = region(function, torch.randn(3, requires_grad=True))
    with setting("default dtype"):
        y.sum().backward()
        assert torch.get_default_dtype() is torch.float64
    assert seen == [torch.float32] * 2


@pytest.fixture
def no_autocast():
    before = torch.get_autocast_dtype("cpu")
    yield before
    torch.set_autocast_dtype("cpu", before)


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS.keys())
def test_the_type_of_autocast_stays(region, no_autocast):
    seen = []

    def function(x):
        with torch.autocast("cpu"):
            seen.append(torch.get_autocast_dtype("cpu"))
            return (x @ x).float().sin()

    x = torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        y = region(function, x)
    y.sum().backward()
    assert torch.get_autocast_dtype("cpu") is no_autocast
    # The same where autocast is off around both, and the type is another one meanwhile.
    y = region(function, x)
    torch.set_autocast_dtype("cpu", torch.float16)
    y.sum().backward()
    assert torch.get_autocast_dtype("cpu") is torch.float16
    assert seen == [torch.float16] * 2 + [no_autocast] * 2


def lstm(x):
    torch.manual_seed(0)
    return nn.LSTM(64, 64)(x[None])[0]


PROGRAMS = {
    "default dtype": lambda x: x * ((x > 0).long() / 7).sin(),
    "matmul precision": lambda x: (x @ x).sin(),
    "mkldnn precision": lambda x: (x @ x).sin(),
    "mkldnn": lambda x: F.conv2d(x[None, None], x[None, None, :5, :5]).sin(),
    "mkldnn rnn": lambda x: lstm(x).sin(),
}


@pytest.mark.skipif(not _native.module, reason="without the native part remat keeps everything")
@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_that_run_again_do_so_under_their_settings(name):
    x = torch.randn(64, 64, requires_grad=True)

    def gradient(block):
        with block as figures, setting(name):
            y = PROGRAMS[name](x).exp()
        return torch.autograd.grad(y.double().sum(), x)[0], figures

    plain = gradient(contextlib.nullcontext())[0]
    ours, block = gradient(ms.remat(_everything=True))
    assert torch.equal(plain, ours)
    assert block.figures().recomputed_operators > 0
    assert read_is_unchanged(name)


def read_is_unchanged(name):
    read, _, value = SETTINGS[name]
    return read() != value
