"""BatchNorm: torch.nn's results, and statistics counted once inside a checkpointed region."""

import pytest
import torch
from torch import nn

import memsave_ext as ms

KINDS = {
    "1d": (ms.BatchNorm1d, nn.BatchNorm1d, (6, 4, 5)),
    "2d": (ms.BatchNorm2d, nn.BatchNorm2d, (6, 4, 3, 5)),
    "3d": (ms.BatchNorm3d, nn.BatchNorm3d, (6, 4, 2, 3, 5)),
}
OPTIONS = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"eps": 1e-2, "momentum": 0.5},
]


def make(kind, options):
    ours, theirs, shape = KINDS[kind]
    torch.manual_seed(0)
    a, b = ours(4, **options), theirs(4, **options)
    if a.affine:
        nn.init.normal_(a.weight)
        nn.init.normal_(a.bias)
    b.load_state_dict(a.state_dict())
    return a, b, torch.randn(shape)


def assert_same_buffers(a, b):
    for (name, left), (_, right) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        assert torch.equal(left, right), name


def region(bn, x):
    return ms.CheckpointFunction.apply(lambda t: bn(t).relu(), 1, x, *bn.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_three_steps_as_torch_without_checkpoint(kind, options):
    ours, theirs, x = make(kind, options)
    for scale in (1.0, 3.0, -2.0):
        a = (x * scale).requires_grad_()
        b = a.detach().clone().requires_grad_()
        left, right = region(ours, a), theirs(b).relu()
        assert torch.equal(left, right)
        left.square().sum().backward()
        right.square().sum().backward()
        assert torch.equal(a.grad, b.grad)
        assert_same_buffers(ours, theirs)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    ours.eval()
    theirs.eval()
    assert torch.equal(region(ours, x), theirs(x).relu())
    assert_same_buffers(ours, theirs)


def test_torch_counts_twice():
    """What this module is for: pytorch#96136."""
    bn, x = nn.BatchNorm1d(4), torch.randn(6, 4, requires_grad=True)
    region(bn, x).sum().backward()
    assert bn.num_batches_tracked == 2


def test_nested_retained_and_shared():
    ours, theirs, x = make("2d", {})
    a = x.clone().requires_grad_()

    def outer(t):
        return region(ours, region(ours, t) + 1)

    output = ms.CheckpointFunction.apply(outer, 1, a, *ours.parameters())
    theirs(theirs(x).relu() + 1)
    assert_same_buffers(ours, theirs)
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    assert_same_buffers(ours, theirs)
    assert ours.num_batches_tracked == 2


def test_a_forward_without_backward_counts():
    ours, theirs, x = make("2d", {})
    region(ours, x.requires_grad_())
    theirs(x)
    assert_same_buffers(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_and_repr(kind):
    ours, theirs, _ = make(kind, {})
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, type(theirs))


def test_wrong_input_counts_nothing():
    bn = ms.BatchNorm2d(4)
    with pytest.raises(ValueError, match="expected 4D input"):
        bn(torch.randn(2, 4))
    assert bn.num_batches_tracked == 0


def test_the_original_name():
    assert ms.CpBatchNorm2d is ms.BatchNorm2d
