"""The loss head on a GPU: beside float64, beside the pure-Python kernels, streams, rows stepped."""

import pytest
import torch
import torch.nn.functional as F
from on_device import (
    another_stream,
    needs_cuda,
    needs_kernels,
    no_synchronisation,
    on_every_device,
)
from torch import nn

import memsave_ext as ms
from memsave_ext.check import kernels
from memsave_ext.check.rows import Row

FP32, BF16 = torch.float32, torch.bfloat16
OPTIONS = {
    "plain": {},
    "smooth, capped": {"label_smoothing": 0.1, "softcap": 5.0},
    "ignored, sum": {"ignore_index": 3, "reduction": "sum"},
}


def problem(device, dtype, tokens=33, features=24, classes=1003):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, features), torch.randn(classes, features) / 5
    target = torch.randint(classes, (tokens,))
    target[::7] = 3
    made = (value.to(device, dtype).requires_grad_() for value in (x, weight))
    return *made, target.to(device)


def exact(x, weight, target, softcap=None, **options):
    """The loss and its gradients in float64, on the CPU."""
    x, weight = (value.detach().cpu().double().requires_grad_() for value in (x, weight))
    logits = x @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target.cpu(), **options)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


@on_every_device
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_beside_float64(options, dtype, device):
    x, weight, target = problem(device, dtype)
    loss = ms.linear_cross_entropy(x, weight, target, chunk_size=256, **OPTIONS[options])
    found = (loss, *torch.autograd.grad(loss, (x, weight)))
    bound = max(4 * torch.finfo(dtype).eps, 1e-12 if dtype == torch.float64 else 2e-6)
    for f, e in zip(found, exact(x, weight, target, **OPTIONS[options]), strict=True):
        assert (f.detach().cpu().double() - e).norm() <= bound * e.norm()


@on_every_device
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [33, 2100], ids=["one block", "blocks"])
def test_a_low_rank_product_beside_float64(tokens, dtype, device):
    """On CUDA 2100 tokens of narrow layers are cut into blocks."""
    x, weight, target = problem(device, dtype, tokens)
    weight.requires_grad_(False)
    a = (torch.randn(4, 24) / 5).to(device, dtype).requires_grad_()
    b = torch.randn(1003, 4).to(device, dtype).requires_grad_()
    tensors = [v.detach().cpu().double().requires_grad_() for v in (x, a, b)]
    logits = F.linear(tensors[0], weight.cpu().double() + tensors[2] @ tensors[1])
    right = F.cross_entropy(logits, target.cpu())
    right = right, *torch.autograd.grad(right, tensors)
    loss = ms.linear_cross_entropy(x, weight, target, low_rank=(F.linear(x, a), b))
    found = loss, *torch.autograd.grad(loss, (x, a, b))
    bound = max(4 * torch.finfo(dtype).eps, 1e-12 if dtype == torch.float64 else 2e-6)
    for f, e in zip(found, right, strict=True):
        assert (f.detach().cpu().double() - e).norm() <= bound * e.norm()


@on_every_device
@pytest.mark.parametrize(
    "kernel", [k for k in kernels.KERNELS if k.part == "loss_head"], ids=lambda k: k.what
)
def test_kernels_beside_pure_python(kernel, device):
    row = Row(kernel.part, kernel.what, device, "")
    kernel.check(row, torch.device(device))
    assert row.cases == 6
    assert not row.problem


@needs_kernels
def test_on_another_stream():
    x, weight, target = problem("cuda", FP32)
    expected = exact(x, weight, target)
    with another_stream():
        loss = ms.linear_cross_entropy(x, weight, target, chunk_size=256)
        found = (loss.detach(), *torch.autograd.grad(loss, (x, weight)))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.cpu().double(), e, rtol=1e-4, atol=1e-5)


@on_every_device
def test_rows_are_stepped(device):
    """As soon as they are complete: the bits of a step of the whole weight."""

    def train(in_backward):
        x, weight, target = problem(device, FP32)
        weight = nn.Parameter(weight.detach())
        optimizer = ms.AdamW([weight], lr=1e-2, in_backward=in_backward)
        for _ in range(3):
            ms.linear_cross_entropy(x, weight, target, chunk_size=256).backward()
            assert (weight.grad is None) == in_backward
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    assert torch.equal(train(True), train(False))


@needs_cuda
def test_nothing_waits_for_the_gpu():
    x, weight, target = problem("cuda", FP32)

    def step():
        ms.linear_cross_entropy(x, weight, target, chunk_size=256).backward()

    step()
    with no_synchronisation():
        step()
