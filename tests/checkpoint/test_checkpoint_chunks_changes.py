"""checkpoint(chunks=): changes between forward and recompute, exceptions, threads, copies."""

import copy
import pickle

import pytest
import torch
from chunk_programs import MLP, as_pieces, gradients, in_pieces
from helpers import assert_equal, leaf, run_threads
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms


def test_a_change_in_place_of_an_argument():
    net, x = MLP(), torch.randn(8, 6)
    out = ms.checkpoint(net, x, chunks=3)
    x[0] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def change_weight(net):
    with torch.no_grad():
        net.down.weight.mul_(2)


def change_bias(net):
    with torch.no_grad():
        net.norm.bias.add_(1)


def replace(net):
    net.up.bias = nn.Parameter(torch.ones(24))


def grow(net):
    net.extra = 1


@pytest.mark.parametrize("change", [change_weight, change_bias, replace, grow])
def test_a_change_between_forward_and_recompute(change):
    net, x = MLP(), leaf(8, 6)
    net.extra = 0

    def function(a):
        return net(a) if net.extra == 0 else net(a).exp()

    out = ms.checkpoint(function, x, chunks=3)
    change(net)
    if change is grow:  # the same up to where the recompute stops
        out.sum().backward()
        return
    with pytest.raises((ms.CheckpointError, RuntimeError), match="inplace operation|replaced"):
        out.sum().backward()


def test_another_recompute():
    x, widths = leaf(8, 6), [2.0]

    def function(a):
        return (a.exp() if widths[0] == 2.0 else a[:, :3].exp().repeat(1, 2)).sin()

    out = ms.checkpoint(function, x, chunks=3)
    widths[0] = 3.0
    with pytest.raises(ms.CheckpointError, match="different metadata"):
        out.sum().backward()


@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_in_the_forward(at):
    net, x, calls = MLP(), leaf(8, 6), []

    def function(a):
        calls.append(1)
        if len(calls) == at + 1:
            raise KeyError("mine")
        return net(a)

    with pytest.raises(KeyError, match="mine"):
        ms.checkpoint(function, x, chunks=3)
    assert not ms.is_recomputing()
    as_pieces(lambda run: run(net, x, chunks=3), (x, *net.parameters()))


def test_an_exception_in_a_recompute_and_another_backward():
    net, x, calls = MLP(), leaf(8, 6), []

    def function(a):
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("mine")
        return net(a)

    steps = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(1))
    out = ms.checkpoint(function, x, chunks=3)
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward(retain_graph=True)
    assert x.grad is None and not steps and all(p.grad is None for p in net.parameters())
    found = torch.autograd.grad(out.sum(), (x, *net.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(net(x).sum(), (x, *net.parameters())))


def test_arguments_changed_by_the_function():
    x = leaf(6, 3)
    out = ms.checkpoint(lambda a: a.relu_().exp(), torch.randn(6, 3), chunks=2)  # nobody needs it
    assert out.shape == (6, 3)
    with pytest.raises(RuntimeError, match="multiple views"):
        ms.checkpoint(lambda a: a.mul_(2).exp(), x * 1, chunks=2)


def test_threads():
    net, x = MLP(), leaf(12, 6)
    tensors = (x, *net.parameters())
    expected = gradients(in_pieces(net, x, chunks=4), tensors)
    norm = nn.BatchNorm1d(6)

    def work(i):
        for _ in range(10):
            assert_equal(gradients(ms.checkpoint(net, x, chunks=4), tensors), expected)
            norm(x)  # beside the pieces of other threads
            with pytest.raises(RuntimeError, match="chunks=n"):
                ms.checkpoint(norm, x, chunks=2)

    run_threads(work, 4)


def test_a_backward_in_several_threads():
    net, x = MLP(), leaf(12, 6)
    tensors = (x, *net.parameters())
    out = ms.checkpoint(net, x, chunks=4)
    expected = gradients(in_pieces(net, x, chunks=4), tensors)

    def work(i):
        for _ in range(5):
            assert_equal(gradients(out, tensors, retain_graph=True), expected)

    run_threads(work, 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate):
    net, x = nn.Sequential(MLP(), MLP()), torch.randn(7, 6)
    ms.checkpoint_modules(net, MLP, chunks=3, chunk_args=(0,))
    other = duplicate(net)
    for model in (net, other):
        model(x).square().sum().backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert p is not q and torch.equal(p.grad, q.grad)


def test_torch_library_functions():
    """Softmax heads, embeddings and attention over another dimension act on rows."""
    x = leaf(5, 3, 4)

    def attend(a):
        return F.scaled_dot_product_attention(a, a, a)

    out = ms.checkpoint(attend, x, chunks=2)
    torch.testing.assert_close(out, attend(x))
    torch.testing.assert_close(gradients(out, (x,)), gradients(attend(x), (x,)))
