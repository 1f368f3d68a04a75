"""Backwards through what a block dropped."""

import contextlib
import gc
import weakref

import pytest
import torch
from helpers import host_memory_grows, run_threads
from remat_programs import check, everything, layers
from torch import nn

import memsave_ext as ms
from memsave_ext import remat


def test_gradient_penalty():
    model, x = layers()
    x = x.requires_grad_()

    def program(block):
        with block():
            out = model(x).softmax(-1)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            loss = (grad.norm(dim=1) - 1).square().mean() + out.exp().sum()
        return torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)

    check(program)


class IsItsGradient(torch.autograd.Function):
    """Its gradient is what it has saved, as in a fused loss."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]


@pytest.mark.parametrize("partly", [False, True])
def test_a_gradient_that_was_a_saved_value_is_written(partly):
    """Autograd takes it as it is. The next backward must not read it."""
    x, other = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
    with remat(pure=[IsItsGradient], _everything=True) as block:
        y = IsItsGradient.apply(x)
        z = (y * other).sum()
    gradients = []  # whose memory stays
    for number in range(3):
        x.grad = other.grad = None
        if partly and number == 0:
            y.backward(torch.ones_like(y), retain_graph=True)
        else:
            z.backward(retain_graph=True)
        assert torch.equal(x.grad, x.detach().cos())
        gradients.append(x.grad.zero_())
    assert torch.equal(other.grad, x.detach().sin())
    assert block.figures().dropped_bytes > 0


def sparse():
    values = torch.rand(1 << 14, requires_grad=True)
    return torch.sparse_coo_tensor(torch.arange(1 << 14)[None], values, (1 << 14,)).sqrt()


def jagged():
    parts = [torch.rand(1 << 13, 1, requires_grad=True) for _ in range(2)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).sigmoid()


def graph_of_a_gradient():
    x = torch.rand(1 << 14, requires_grad=True) * 0.5
    return torch.autograd.grad(x.acos().sum(), x, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("case", [sparse, jagged, graph_of_a_gradient, "changed in place"])
def test_a_graph_that_no_backward_frees_goes_with_its_result(case):
    buffers = [torch.rand(1 << 14) for _ in range(100)]

    def made():
        if callable(case):
            return case()
        return buffers.pop().mul_(torch.rand(1 << 14, requires_grad=True)).sigmoid_()

    def run():
        for _ in range(20):
            with remat():
                made()

    run()
    assert not host_memory_grows(run, 20 << 14)


def test_parts_of_a_graph():
    model, x = layers()

    def program(block):
        values = [x]
        with block():
            for layer in model:
                values.append(layer(values[-1]))
            middle, out = values[3].sin(), values[-1].exp()
        params = list(model.parameters())
        grads = torch.autograd.grad(middle.sum(), params[:4], retain_graph=True)
        grads += torch.autograd.grad(out.sum(), [values[5]], retain_graph=True)
        return [*grads, *torch.autograd.grad(middle.sum() + out.sum(), params)]

    check(program)


def test_backwards_of_one_graph_at_once():
    model, x = layers(0.0)
    params = list(model.parameters())
    expected = torch.autograd.grad(model(x).exp().sum(), params)
    with everything():
        loss = model(x).exp().sum()
    results = {}

    def work(i):
        results[i] = torch.autograd.grad(loss, params, retain_graph=True)

    run_threads(work, 4)
    assert all(all(map(torch.equal, expected, results[i])) for i in range(4))


def test_a_saved_value_looked_at_in_the_block():
    w, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)

    def program(block):
        with block():
            y = (x + w).tanh()
            z = y.exp()
            seen = [z.grad_fn._saved_result, y.grad_fn._saved_result]
            u = (y + x).sin() * (z + x).sin()
        return [*seen, *torch.autograd.grad(u.sum(), w)]

    check(program)


@pytest.mark.parametrize("blocks", [contextlib.nullcontext, everything])
def test_what_the_graph_of_a_gradient_saved_has_changed(blocks):
    x, weight = torch.randn(8, requires_grad=True), torch.ones(8)
    with blocks():
        (grad,) = torch.autograd.grad((x * x).tanh(), x, weight, create_graph=True)
        weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("changes", [False, True])
def test_a_value_on_the_way_is_kept_and_lost(changes):
    """By then it is needed no more for itself, but others are to be computed from it."""
    w = nn.Parameter(torch.randn(64))

    def program():
        way = w * 2
        large, small = (way.expand(1 << 14, 64) * 1.5).sin(), way.sin()
        if changes:
            with torch.no_grad():
                way.mul_(3)
        return way, large, small

    def grads(way, large, small):
        first = () if changes else torch.autograd.grad(small.sum(), way)
        return *first, *torch.autograd.grad(large.sum(), w)

    expected = grads(*program())
    for _ in range(100):  # what is dropped is decided by a clock
        with remat() as block:
            values = program()
        if block.figures().dropped_bytes:
            break
    assert all(map(torch.equal, expected, grads(*values)))


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_a_step_in_backward_waits_for_what_reads_the_parameter(small_bytes):
    def program(block):
        torch.manual_seed(0)
        first, late = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        params, x = [*first.parameters(), late], torch.randn(4, 8)
        optimizer = ms.Adam(params, in_backward=True, lr=0.1, small_bytes=small_bytes)
        for _ in range(3):
            with block():
                y = (first(x) * 2) * (x * late.detach()).exp()
                loss = y.sum() + (late * 3).sum()  # of which the gradient is there first
            loss.backward()
            assert late.grad is None
            optimizer.step()
        return params

    check(program)


def test_a_step_that_another_backward_cannot_follow():
    late, x = nn.Parameter(torch.rand(8)), torch.randn(4, 8, requires_grad=True)
    optimizer = ms.Adam([late], in_backward=True)
    with everything():
        loss = (x * late.detach().exp()).sum() + (late * 3).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[late], retain_graph=True)
    optimizer.step()
    with pytest.raises(ms.CheckpointError, match=r"aten::exp.*version 0.*version 1"):
        torch.autograd.grad(loss, x)


def test_errors_in_a_recompute_leave_it_as_it_was():
    w, x, scale = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64), torch.randn(64)
    with everything():
        loss = ((x + scale) @ w).exp().sum() + (x * w.tanh()).sin().sum()
    with torch.no_grad():
        scale.add_(1)
    for _ in range(2):
        with pytest.raises(ms.CheckpointError):
            loss.backward(retain_graph=True)
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert top is None


def test_a_kept_value_that_changes():
    w, scale = nn.Parameter(torch.randn(8)), torch.randn(8)
    with everything():
        loss = (w * scale).sum()
    scale.add_(1)
    with pytest.raises(ms.CheckpointError, match=r"has been modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_memory_goes_with_the_graph(drops, backward):
    """At once, without the garbage collector."""
    model, x = layers()
    gc.collect()
    gc.disable()
    try:
        with remat(_everything=drops) as block:
            values = [model[:3](x)]
            values.append(values[0].exp())  # which its own node saves
            loss = model[3:7](values[0]).sum() + values[1].sum()
        left = [weakref.ref(value) for value in (*values, block)]
        del values
        if backward:
            loss.backward()
        del loss, block
        assert [reference() for reference in left] == [None, None, None]
    finally:
        gc.enable()
