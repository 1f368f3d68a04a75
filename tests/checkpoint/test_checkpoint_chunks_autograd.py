"""checkpoint(chunks=) and autograd: hooks, order, memory, higher derivatives."""

import pytest
import torch
from chunk_programs import MLP, as_pieces, gradients
from helpers import leaf
from torch import nn

import memsave_ext as ms


def test_gradients_arrive_once():
    net, x = MLP(), leaf(9, 6)
    scale = leaf(6)
    computed = scale * 2
    calls = []
    for name, tensor in [
        ("x", x),
        ("scale", scale),
        ("computed", computed),
        *net.named_parameters(),
    ]:
        tensor.register_hook(lambda g, n=name: calls.append((n, g.clone())))
        if tensor.is_leaf:
            tensor.register_post_accumulate_grad_hook(lambda p, n=name: calls.append((n, None)))
    (net(x) * computed).square().sum().backward(retain_graph=True)
    expected = {name: grad for name, grad in calls if grad is not None}
    calls.clear()
    ms.checkpoint(lambda a: net(a) * computed, x, chunks=4).square().sum().backward()
    assert sorted(n for n, g in calls if g is not None) == sorted(expected)
    assert sorted(n for n, g in calls if g is None) == sorted(set(expected) - {"computed"})
    for name, grad in calls:
        if grad is not None:
            torch.testing.assert_close(grad, expected[name])


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, log):
        log.append(f"forward {name}" if not ms.is_recomputing() else f"recompute {name}")
        ctx.save_for_backward(x)
        ctx.label, ctx.log = name, log
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.log.append(f"backward {ctx.label}")
        return grad * x.exp(), None, None


@pytest.mark.parametrize("outputs", [1, 2])
def test_one_piece_after_the_other(outputs):
    log, x = [], torch.arange(3.0).requires_grad_()

    def function(a):
        first = Logs.apply(a * 1, f"a{int(a)}", log)
        second = Logs.apply(first * 1, f"b{int(a)}", log)
        return (first, second) if outputs == 2 else second

    out = ms.checkpoint(function, x, chunks=3)
    total = out.sum() if outputs == 1 else (out[0] * out[1]).sum()
    assert log == [f"forward {n}{i}" for i in range(3) for n in "ab"]
    log.clear()
    total.backward()
    runs = ["recompute a", "recompute b", "backward b", "backward a"]
    assert log == [f"{run}{i}" for i in (2, 1, 0) for run in runs]


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_peak_is_that_of_a_piece(outputs):
    torch.manual_seed(0)
    rows, width, hidden, chunks = 1024, 32, 512, 8
    net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
    x = leaf(rows, width)

    def function(a):
        out = net(a)
        return (out, out.sin()) if outputs == 2 else out

    peaks = []
    for options in ({}, {"chunks": chunks}):
        x.grad = None
        net.zero_grad()
        with ms.memory.track() as track:
            out = ms.checkpoint(function, x, **options)
            total = out.sum() if outputs == 1 else (out[0] * out[1]).sum()
            del out
            total.backward()
        peaks.append(track.peak)
    # Of either: outputs and their gradients, the input's. Above it three tensors as wide as the
    # layer, and the parameters' gradients, twice where the next piece's are added.
    beside = (3 * outputs + 2) * x.nbytes
    params = sum(p.nbytes for p in net.parameters())
    assert peaks[0] > 3 * rows * hidden * 4
    assert peaks[1] < 3 * rows * hidden * 4 / chunks + beside + 2 * params


def test_only_pieces_of_arguments_are_saved():
    net, x = MLP(), leaf(8, 6)
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t):
        out = ms.checkpoint(net, x, chunks=4)
    assert packed == [(2, 6)] * 4
    assert len(gradients(out, (x,))) == 1


@pytest.mark.parametrize("chunks", [2, 3])
def test_double_backward(chunks):
    w = leaf(3, dtype=torch.float64)

    def function(a, w):
        return ms.checkpoint(lambda b: (b * w).sin() * b, a, chunks=chunks)

    x = leaf(4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


def test_create_graph():
    net, x = MLP(dtype=torch.float64), leaf(7, 6, dtype=torch.float64)
    tensors = (x, *net.parameters())
    results = []
    for run in (lambda: net(x), lambda: ms.checkpoint(net, x, chunks=3)):
        first = gradients(run(), tensors, create_graph=True)
        results.append([*first, *gradients(sum(g.square().sum() for g in first), tensors)])
    torch.testing.assert_close(*results)


def test_inputs_retain_graph_and_a_freed_graph():
    net, x = MLP(), leaf(7, 6)
    out = ms.checkpoint(net, x, chunks=3).square().sum()
    weight = net.up.weight
    out.backward(inputs=[weight], retain_graph=True)
    assert x.grad is None and net.down.weight.grad is None
    (again,) = torch.autograd.grad(out, weight, retain_graph=True)
    torch.testing.assert_close(again, weight.grad)
    out.backward()
    torch.testing.assert_close(weight.grad, 2 * again)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_a_part_of_the_output():
    net, x = MLP(), leaf(9, 6)
    calls = []
    out = ms.checkpoint(lambda a: calls.append(len(a)) or net(a), x, chunks=3)
    found = torch.autograd.grad(out[:2].sum(), (x, net.up.weight))
    torch.testing.assert_close(found, torch.autograd.grad(net(x)[:2].sum(), (x, net.up.weight)))
    assert not found[0][3:].any()


def test_forward_mode():
    net, x, tangent = MLP(), torch.randn(5, 6), torch.randn(5, 6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(ms.checkpoint(net, dual, chunks=2)).tangent
        expected = torch.autograd.forward_ad.unpack_dual(net(dual)).tangent
    torch.testing.assert_close(found, expected)


def test_tied_frozen_and_computed_weights():
    net, x = MLP(6, 6), leaf(7, 6)
    net.down.weight = net.up.weight
    net.up.bias.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(net.norm)
    tensors = [x, *(p for p in net.parameters() if p.requires_grad)]

    def program(run):
        return run(net, x * net.up.weight.sum(), chunks=3) @ net.up.weight

    as_pieces(program, tensors)
    out = ms.checkpoint(net, x, chunks=3)
    out.sum().backward()
    assert net.up.bias.grad is None


def test_inputs_without_a_gradient():
    net, x = MLP(), torch.randn(7, 6)
    as_pieces(lambda run: run(net, x, chunks=3), tuple(net.parameters()))
    ids = torch.tensor([1, 0, 2, 2, 1])
    table = leaf(3, 4)
    as_pieces(lambda run: run(lambda i: table[i].sin(), ids, chunks=2), (table,))
    assert not ms.checkpoint(torch.sin, x, chunks=2).requires_grad
