"""What needs a GPU: random numbers, autocast, devices and streams; the report's probe."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
apply = ms.CheckpointFunction.apply


def region(linear):
    return lambda x: F.dropout(linear(x).relu(), 0.5)


def both(call, linear, x):
    """Gradients of a plain and of a checkpointed call from the same random numbers."""
    tensors = (x, *linear.parameters())
    results = []
    for run in (call, lambda v: apply(call, 1, v, *linear.parameters())):
        torch.manual_seed(1)
        output = run(x)
        after = torch.rand(3, device=x.device)
        results.append((output, after, *torch.autograd.grad(output.float().sum(), tensors)))
    return results


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_dropout_and_autocast_are_replayed(dtype):
    linear = nn.Linear(64, 64, device="cuda")
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        plain, ours = both(region(linear), linear, x)
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a, b)


def test_the_generator_is_left_alone_by_backward():
    linear = nn.Linear(8, 8, device="cuda")
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    output = apply(region(linear), 1, x, *linear.parameters())
    before = torch.cuda.get_rng_state()
    output.sum().backward()
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_a_tensor_only_the_closure_knows_draws_the_same_numbers():
    w = torch.ones(1000, device="cuda")
    x = torch.ones(1000, requires_grad=True)  # on the CPU: no listed tensor is on the GPU
    seen = []

    def function(a):
        seen.append(F.dropout(w, 0.5).cpu())
        return a * seen[-1]

    apply(function, 1, x).sum().backward()
    assert torch.equal(seen[0], seen[1])


def test_the_recompute_runs_on_the_stream_of_the_forward():
    seen = []

    def function(a):
        seen.append(torch.cuda.current_stream())
        for _ in range(20):
            a = a @ a
        return a

    x = (torch.eye(512, device="cuda") * 0.9).requires_grad_()
    expected = torch.autograd.grad(function(x).sum(), x)
    seen.clear()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        output = apply(function, 1, x).sum()
    torch.cuda.current_stream().wait_stream(side)
    got = torch.autograd.grad(output, x)
    torch.cuda.synchronize()
    assert seen == [side, side]
    assert torch.equal(expected[0], got[0])


def test_no_synchronisation():
    linear = nn.Linear(8, 8, device="cuda")
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    apply(region(linear), 1, x, *linear.parameters()).sum().backward()  # lazy initialisation
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply(region(linear), 1, x, *linear.parameters()).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_device_is_replayed():
    x = torch.ones(100, device="cuda:0", requires_grad=True)
    seen = []

    def function(a):
        seen.append(torch.rand(100, device="cuda:1"))
        return a * seen[-1].to(a.device)

    apply(function, 1, x).sum().backward()
    assert torch.equal(seen[0], seen[1])


@pytest.mark.skipif(
    not (_native.module and _native.module.with_cuda), reason="needs a build with CUDA"
)
def test_probe():
    major, minor = torch.cuda.get_device_capability()
    assert 0 < _native.module.probe_cuda() <= major * 100 + minor * 10


# ---- checkpoint -------------------------------------------------------------------------------


def test_checkpoint_replays_dropout_and_autocast():
    linear = nn.Linear(64, 64, device="cuda")
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    tensors = (x, *linear.parameters())
    results = []
    for run in (lambda f, *a: f(*a), ms.checkpoint):
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            output = run(lambda a: region(linear)(a).tanh(), x)
        results.append((output, *torch.autograd.grad(output.float().sum(), tensors)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_checkpoint_does_not_synchronise():
    linear = nn.Linear(8, 8, device="cuda")
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    ms.checkpoint(region(linear), x).sum().backward()  # lazy initialisation
    torch.cuda.set_sync_debug_mode("error")
    try:
        ms.checkpoint(region(linear), x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offload_moves_the_inputs_to_pinned_memory_and_back():
    w = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)

    def function(a):
        return (a @ w).tanh() @ w

    expected = torch.autograd.grad(function(x * 2).sum(), (x, w))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = ms.checkpoint(function, x * 2, offload="cpu").sum()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    got = torch.autograd.grad(output, (x, w))
    assert held < x.nbytes
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


def test_offloaded_regions_in_a_row_reuse_no_memory_too_early():
    x = torch.randn(512, 512, device="cuda", requires_grad=True)

    def chain(run):
        value = x
        for _ in range(20):
            value = run(lambda a: (a * 1.01).sin().cos(), value)
        return torch.autograd.grad(value.sum(), x)[0]

    plain = chain(lambda f, a: f(a))
    for _ in range(3):
        assert torch.equal(plain, chain(lambda f, a: ms.checkpoint(f, a, offload="cpu")))
