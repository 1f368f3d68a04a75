"""``grads_on=`` for parameters on CUDA; skipped where there is no GPU."""

import pytest
import torch
from on_device import needs_cuda
from torch import nn

import memsave_ext as ms
from memsave_ext.elsewhere.gradient import GradientElsewhere

pytestmark = needs_cuda


@pytest.fixture(params=["on the host", "in a file"])
def place(request, tmp_path):
    return "cpu" if request.param == "on the host" else tmp_path


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 300), nn.Tanh(), nn.Linear(300, 256)).cuda()


def train(net, optimizer, norm_type=2.0):
    norms = []
    for step in range(4):
        for number in range(2):
            generator = torch.Generator().manual_seed(2 * step + number)
            net(torch.randn(8, 128, generator=generator).cuda()).square().mean().backward()
        params = [*net.parameters()]
        norms.append(torch.nn.utils.clip_grad_norm_(params, 0.01, norm_type, foreach=False))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("states", ["on the device", "elsewhere"])
def test_bits(states, norm_type, place):
    results = []
    for grads_on in (None, place):
        net = network()
        states_on = place if states == "elsewhere" else None
        optimizer = ms.AdamW(net.parameters(), grads_on=grads_on, states_on=states_on)
        results.append([*train(net, optimizer, norm_type), *net.parameters()])
    assert_same(*results)


def test_what_is_written_to_it_is_there(place):
    values = []
    for grads_on in (None, place):
        net = network()
        optimizer = ms.AdamW(net.parameters(), grads_on=grads_on)
        net(torch.ones(8, 128, device="cuda")).square().mean().backward()
        grad = net[0].weight.grad
        assert isinstance(grad, GradientElsewhere) == (grads_on is not None)
        grad.add_(1).mul_(0.5).clamp_(max=0.7)
        grad[0].zero_()  # a view, with which it is back for good
        grad.mul_(2)
        optimizer.step()
        values.append([grad.clone(), *net.parameters()])
    assert_same(*values)


def test_graphs_are_refused(place):
    net = network()
    optimizer = ms.AdamW(net.parameters(), grads_on=place)
    train(net, optimizer)
    x = torch.ones(8, 128, device="cuda")
    for captured in (lambda: net(x).square().mean().backward(), optimizer.step):
        with (
            pytest.raises(RuntimeError, match="grads_on=.*cannot be captured in a CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            captured()
        optimizer.zero_grad()
        net(x).square().mean().backward()  # kept before the step is captured
