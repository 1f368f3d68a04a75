"""Rows of every length, against float64, on each instruction set that this CPU has.

A row ends with a part of a vector, or with a whole one that overlaps the one before; outputs of 4
to 32 MiB bypass the caches, a cache line at a time.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sampling import share
from torch.nn import functional as F

import memsave_ext as ms

HERE = Path(__file__).resolve().parent
CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
PRECISION = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# With values of 16 bits; (N, C) and (N, C, L) as in check().
STREAMED = [(4200, 512), (1 << 15, 65), (80, 33, 1040), (80, 33, 1024), (122, 20, 1000)]


def step(function, x, residual, grad):
    """Values are multiples of 1/32, as they are the same in every dtype."""
    x, residual = (t.detach().requires_grad_() for t in (x, residual))
    channels = torch.arange(x.shape[1])
    weight = (0.5 + channels % 33 / 32).to(x.dtype).requires_grad_()
    bias = (channels % 65 / 32 - 1).to(x.dtype).requires_grad_()
    output = function(x, residual, weight, bias)
    return output, *torch.autograd.grad(output, (x, residual, weight, bias), grad)


def ours(x, residual, weight, bias):
    of = (x, weight, bias, residual, None, None, None, True, 0.1, 1e-5, "none", 0.0, None)
    return torch.ops.memsave_ext.batch_norm_forward(*of)[0]


def expected(x, residual, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5) + residual


def check(shape, dtypes):
    """Both layouts: (N, C) has its channels last, (N, C, L) first."""
    tensors = [(torch.randn(shape) * 32).round() / 32 for _ in range(3)]
    wanted = step(expected, *(t.double() for t in tensors))
    largest = [b.abs().max().item() for b in wanted]
    for dtype in dtypes:
        found = step(ours, *(t.to(dtype) for t in tensors))
        for a, b, most in zip(found, wanted, largest, strict=True):
            bound = PRECISION[dtype] * (1 + most)
            assert (a.double() - b).abs().max() <= bound, (shape, dtype)


def check_all():
    torch.manual_seed(0)
    for length in range(1, 71):
        check((9, length), PRECISION)
        check((5, 3, length), PRECISION)
    narrow = [dtype for dtype in PRECISION if dtype is not torch.float64]
    for shape in STREAMED:
        assert all(4 << 20 <= math.prod(shape) * d.itemsize < 32 << 20 for d in narrow)
        check(shape, narrow)


@pytest.mark.skipif(not ms._native.available, reason="about the native kernels")
@pytest.mark.parametrize("capability", share(CAPABILITIES, 3, 1))
def test_rows_of_every_length(capability):
    most = torch.backends.cpu.get_cpu_capability()
    if most not in CAPABILITIES or CAPABILITIES.index(capability) > CAPABILITIES.index(most):
        pytest.skip("this CPU does not have it")
    if capability == most:
        return check_all()
    code = (
        f"import sys, torch; sys.path[:0] = {[str(HERE), str(HERE.parent)]}\n"
        f"assert torch.backends.cpu.get_cpu_capability() == {capability!r}\n"
        "import test_batch_norm_rows; test_batch_norm_rows.check_all()"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
