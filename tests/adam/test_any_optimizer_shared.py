"""Gradients whose memory backward goes on with: a step that changes them must not change that."""

import pytest
import torch
from own_steps import assert_same
from torch import nn, optim

import memsave_ext as ms

MAKES = {
    # It adds the momentum to the gradient in place.
    "SGD nesterov foreach": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
}
ALL = pytest.mark.parametrize("name", MAKES)
SIZES = pytest.mark.parametrize(
    ("small_bytes", "bucket_bytes"), [(0, 1), (1 << 16, 1)], ids=["at once", "in a bucket"]
)


class Positions(nn.Module):
    """The gradient of ``positions`` is a view of the one that goes on to the first layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(6, 33), nn.Linear(33, 2)
        self.positions = nn.Parameter(torch.randn(8 * 33))

    def forward(self, x):
        return self.last(self.first(x) + self.positions.view(8, 33))


def pair(make, **options):
    ours, theirs = Positions(), Positions()
    optimizers = [make(list(net.parameters())) for net in (ours, theirs)]
    ms.in_backward(optimizers[0], **options)
    return (ours, optimizers[0]), (theirs, optimizers[1])


def loss(net, number):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    return (net(x) - 1).square().mean()


@ALL
@SIZES
def test_steps(name, small_bytes, bucket_bytes):
    ours, theirs = pair(MAKES[name], small_bytes=small_bytes, bucket_bytes=bucket_bytes)
    for number in range(4):
        for net, optimizer in (ours, theirs):
            loss(net, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(ours, theirs)


@ALL
@SIZES
def test_clipping(name, small_bytes, bucket_bytes):
    options = {"small_bytes": small_bytes, "bucket_bytes": bucket_bytes, "max_grad_norm": 0.05}
    (net, optimizer), (other_net, other) = pair(MAKES[name], **options)
    for number in range(4):
        loss(net, number).backward()
        optimizer.step()
        loss(other_net, number).backward()
        for param in other_net.parameters():
            # Autograd lets two of them share memory, in which each would be clipped for both.
            param.grad = param.grad.clone()
        for param in other_net.parameters():
            nn.utils.clip_grad_norm_([param], 0.05)
        other.step()
        other.zero_grad()
    for p, q in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(p, q)


@ALL
@SIZES
def test_loss_scaling(name, small_bytes, bucket_bytes):
    ours, theirs = pair(MAKES[name], small_bytes=small_bytes, bucket_bytes=bucket_bytes)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    ours[1].grad_scaler = scalers[0]
    for number in range(4):
        for (net, optimizer), scaler in zip((ours, theirs), scalers, strict=True):
            scaler.scale(loss(net, number)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@ALL
@SIZES
def test_norm_pass(name, small_bytes, bucket_bytes):
    """As near as two ways to sum up a norm are."""
    ours, theirs = pair(MAKES[name], small_bytes=small_bytes, bucket_bytes=bucket_bytes)
    for number in range(4):
        with ours[1].norm_pass(0.05):
            loss(ours[0], number).backward()
        for net, optimizer in (ours, theirs):
            loss(net, number).backward()
            if optimizer is theirs[1]:
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
