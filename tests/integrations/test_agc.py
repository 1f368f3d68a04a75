"""timm's adaptive clipping, which reads .grad: an error after a step in backward, and a hook before
it."""

import copy
import inspect

import pytest
import torch
from torch import nn

import memsave_ext as ms

LIBRARIES = ["timm.utils"]
utils = None  # conftest.py imports it


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2))


def loss(net, number=0):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    return 10 * (net(x) - 1).square().sum()


OURS = {
    "AdamW": lambda p: ms.AdamW(p, in_backward=True),
    "torch's": lambda p: ms.in_backward(torch.optim.AdamW(p)),
}


@pytest.mark.parametrize("kind", OURS)
def test_after_a_step_in_backward_is_an_error(kind):
    by_name = utils.adaptive_clip_grad  # before any optimizer
    net = model()
    optimizer = OURS[kind](net.parameters())
    loss(net).backward()
    before = copy.deepcopy(net.state_dict())
    calls = [
        lambda: by_name(net.parameters()),
        lambda: by_name(parameters=net[0].weight, clip_factor=0.1),
        lambda: utils.adaptive_clip_grad([net[2].bias], 0.1),
        *(lambda m=m: utils.dispatch_clip_grad(net.parameters(), 1.0, m) for m in ("agc", "value")),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="parameters have been stepped in backward.*hook"):
            call()
    optimizer.step()
    for param, value in zip(net.parameters(), before.values(), strict=True):
        assert torch.equal(param, value)
    optimizer.remove_hooks()
    loss(net).backward()  # an ordinary one is clipped
    grads = [p.grad.clone() for p in net.parameters()]
    calls[0]()
    changed = [not torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True)]
    assert all(changed)
    assert by_name.__name__ == "adaptive_clip_grad"
    assert list(inspect.signature(by_name).parameters)[:2] == ["parameters", "clip_factor"]


@pytest.mark.parametrize("small_bytes", [0, 1 << 16])
@pytest.mark.parametrize("clip", ["agc", "value"])
def test_in_a_hook_it_clips_as_after_backward(clip, small_bytes):
    by = {
        "agc": lambda p: utils.adaptive_clip_grad(p, 0.01),
        "value": lambda p: nn.utils.clip_grad_value_(p, 0.1),
    }[clip]

    def hook(p):  # as docs/adam/clipping.md has it
        p.grad = p.grad.clone()
        by(p)

    net, other, unclipped = model(), model(), model()
    ours = torch.optim.AdamW(net.parameters(), eps=1.0)  # so large that the norm is seen
    ms.in_backward(ours, small_bytes=small_bytes)
    theirs = torch.optim.AdamW(other.parameters(), eps=1.0)
    plain = torch.optim.AdamW(unclipped.parameters(), eps=1.0)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for number in range(3):
        loss(net, number).backward()
        loss(other, number).backward()
        loss(unclipped, number).backward()
        assert all(p.grad is None for p in net.parameters())
        by(other.parameters())
        for optimizer in (ours, theirs, plain):
            optimizer.step()
            optimizer.zero_grad()
    for p, q, r in zip(net.parameters(), other.parameters(), unclipped.parameters(), strict=True):
        assert torch.equal(p, q) and not torch.equal(p, r)
