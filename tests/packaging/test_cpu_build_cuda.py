"""A build without CUDA beside a GPU: what works there, and what is said where it does not.

benchmarks/gpu.sh makes such a build for these tests; in another one they are skipped.
"""

import pytest
import torch
from on_device import FORMS, HAS_CUDA, every_form, network, values
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.report import report

pytestmark = pytest.mark.skipif(
    not (HAS_CUDA and _native.available) or _native.build_info.get("cuda", False),
    reason="needs a CUDA device and a native build without CUDA",
)


@pytest.mark.parametrize("in_backward", [False, True])
def test_adam_says_which_build_it_needs(in_backward):
    param = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = ms.AdamW([param], in_backward=in_backward)

    def step():
        param.sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="this build of memsave_ext has no kernel for cuda"):
        step()
    assert torch.equal(param, torch.ones_like(param))
    assert not optimizer.state[param]


def test_the_report_says_what_was_built():
    lines = report()
    assert "CUDA: built without it; torch sees 1 device" in lines
    assert "no kernels of this package in use" in lines


def test_batch_norm_runs_on_torchs_operators():
    torch.manual_seed(0)
    x = torch.randn(6, 5, 7, 7)
    found = []
    for device in ("cpu", "cuda"):
        norm = ms.BatchNorm2d(5, activation="relu").to(device)
        leaf = x.to(device).requires_grad_()
        output = norm(leaf)
        found.append([output, *torch.autograd.grad(output.square().sum(), [leaf, norm.weight])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-4, atol=1e-4)


@every_form
def test_checkpointing_is_native_there_too(form):
    results = []
    for run in ("plain", form):
        net = network(FORMS[run] if run in FORMS else lambda f, n, *a: f(*a[:n]), "cuda")
        torch.manual_seed(1)
        loss = net(torch.ones(8, 16, device="cuda")).square().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()))
        results.append([loss, *grads, *values(net).values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_capture_needs_the_other_build():
    x = torch.ones(8, device="cuda", requires_grad=True)
    ms.checkpoint(torch.sin, x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="a build of memsave_ext with CUDA"),
        torch.cuda.graph(graph),
    ):
        ms.checkpoint(torch.sin, x)
