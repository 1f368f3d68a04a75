"""Adam's CUDA kernels beside the CPU's; skipped where there is no GPU or no CUDA build."""

import pytest
import torch
from adam_operator import step_
from on_device import another_stream, capture
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or _native.module is None or not _native.module.with_cuda,
    reason="needs a GPU and a CUDA build",
)
SIZES = (1, 3, 31, 32, 1000, 4097, 65536, 1_000_003)


def lists(dtype, state):
    generator = torch.Generator().manual_seed(0)

    def make(kind, positive=False):
        tensors = [torch.randn(n, generator=generator) for n in SIZES]
        return [(t.abs() if positive else t).to(kind) for t in tensors]

    steps = [torch.tensor(float(i)) for i in range(len(SIZES))]
    return [make(dtype), make(dtype), make(state), make(state, True), make(state, True), steps]


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("step_on_device", [False, True])
@pytest.mark.parametrize(
    ("dtype", "state"),
    [
        (torch.float32, torch.float32), (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32), (torch.float16, torch.float16),
    ],
)  # fmt: skip
def test_as_on_the_cpu(dtype, state, decoupled, amsgrad, step_on_device):
    cpu = lists(dtype, state)
    cuda = [[t.cuda() for t in part] for part in cpu[:-1]]
    cuda.append([t.cuda() if step_on_device else t.clone() for t in cpu[-1]])
    for tensors in (cpu, cuda):
        for _ in range(3):
            step_(tensors, decoupled, amsgrad, False)
    unit = max(torch.finfo(dtype).eps, torch.finfo(state).eps)
    for ours, expected in zip(cuda, cpu, strict=True):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=8 * unit, atol=8 * unit)


def test_unaligned_and_many():
    base = [torch.randn(101) for _ in range(300)]
    runs = []
    for device in ("cpu", "cuda"):
        params = [nn.Parameter(b.clone().to(device)[1:]) for b in base]  # stepped in place
        optimizer = ms.AdamW(params, lr=0.1)
        for _ in range(3):
            for p in params:
                p.grad = p.detach().sin()
            optimizer.step()
        runs.append([p.detach().cpu() for p in params])
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_in_backward(options):
    nets = model().cuda(), model().cuda()
    ours = ms.AdamW(nets[0].parameters(), lr=1e-3, in_backward=True, **options)
    theirs = torch.optim.AdamW(nets[1].parameters(), lr=1e-3, **options)
    for step in range(10):
        torch.manual_seed(step)
        x = torch.randn(16, 64, device="cuda")
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(n.parameters() for n in nets), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_on_a_stream_of_its_own_without_synchronising():
    net = model().cuda()
    optimizer = ms.AdamW(net.parameters(), lr=1e-3, in_backward=True, small_bytes=1 << 14)
    x = torch.randn(16, 64, device="cuda")
    net(x).sum().backward()  # makes the states
    optimizer.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                net(x).sum().backward()
                optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_count_on_the_host_is_not_captured(in_backward):
    net = model().cuda()
    optimizer = ms.AdamW(net.parameters(), lr=1e-3, in_backward=in_backward)
    x = torch.randn(16, 64, device="cuda")

    def step():
        net(x).square().mean().backward()
        optimizer.step()

    with another_stream():
        for _ in range(3):
            step()
    before = [int(state["step"]) for state in optimizer.state.values()]
    with (
        pytest.raises(RuntimeError, match="capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step()
    assert [int(state["step"]) for state in optimizer.state.values()] == before


def test_a_captured_training_step():
    nets = model().cuda(), model().cuda()
    lr = torch.tensor(1e-3, device="cuda")
    x = torch.randn(16, 64, device="cuda")
    ours = ms.AdamW(nets[0].parameters(), lr=lr, in_backward=True, capturable=True)
    theirs = ms.AdamW(nets[1].parameters(), lr=lr, in_backward=True, capturable=True)

    def step(net, optimizer):
        net(x).square().mean().backward()
        optimizer.step()

    replay, _ = capture(lambda: step(nets[0], ours))
    lr.fill_(1e-3)
    for _ in range(5):
        replay()
    for _ in range(8):
        step(nets[1], theirs)
    for p, q in zip(*(n.parameters() for n in nets), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert ours.state_dict()["state"][0]["step"].item() == 8
