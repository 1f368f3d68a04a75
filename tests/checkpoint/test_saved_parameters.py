"""What a custom Function saved comes back in its backward as the objects that it saved."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as torchs

import memsave_ext as ms


class Marked(torch.Tensor):
    pass


class Product(Function):
    """Adds a weight's gradient to its ``main_grad``, as Megatron's linear layers do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, None, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, _, w = ctx.saved_tensors
        seen.append((x, w))
        w.main_grad += x.T @ grad
        return grad @ w.T, None


seen = []


def in_block(context):
    def run(x, w):
        with context():
            return Product.apply(x, w)

    return run


RUNS = {
    "plain": in_block(contextlib.nullcontext),
    "hooks": in_block(lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
    "save_on_cpu": in_block(save_on_cpu),
    "remat": in_block(ms.remat),
    "remat_everything": in_block(lambda: ms.remat(_everything=True)),
    "checkpoint": lambda x, w: ms.checkpoint(Product.apply, x, w),
    "closure": lambda x, w: ms.checkpoint(lambda t: Product.apply(t, w), x),
    "torchs": lambda x, w: torchs.checkpoint(Product.apply, x, w, use_reentrant=False),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_parameters_and_inputs_are_the_objects_that_were_saved(run):
    w = nn.Parameter(torch.randn(4, 4))
    w.main_grad = torch.zeros(4, 4)
    x = torch.randn(3, 4).as_subclass(Marked)
    seen.clear()
    run(x, w).sum().backward()
    assert seen[0][0] is x and seen[0][1] is w
    assert torch.equal(w.main_grad, (x.T @ torch.ones(3, 4)).as_subclass(torch.Tensor))


def test_values_of_a_hook_are_its_own():
    w = nn.Parameter(torch.randn(4, 4))
    w.main_grad = torch.zeros(4, 4)
    seen.clear()
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        y = Product.apply(torch.ones(3, 4), w)
    with pytest.raises(AttributeError, match="main_grad"):
        y.sum().backward()
    assert torch.equal(seen[0][1], w.half().float())


def test_copies_and_transforms():
    w = nn.Parameter(torch.randn(4, 4))
    other = copy.deepcopy(w)
    other.main_grad, w.main_grad = torch.zeros(4, 4), torch.zeros(4, 4)
    seen.clear()
    with ms.remat():
        y = Product.apply(torch.ones(3, 4), w) + Product.apply(torch.ones(3, 4), other)
    y.sum().backward()
    assert {id(saved) for _, saved in seen} == {id(w), id(other)}


class Square(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_transforms_of_torch_func():
    x = torch.randn(5)
    gradient = torch.func.vmap(torch.func.grad(lambda t: Square.apply(t).sum()))(x)
    assert torch.equal(gradient, 2 * x)
    assert torch.equal(torch.func.jacrev(Square.apply)(x), torch.diag(2 * x))


def test_sparse_parameters_that_were_saved():
    class Times(Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx, grad):
            a, _ = ctx.saved_tensors
            return None, a.to_dense().T @ grad

    a = nn.Parameter(torch.eye(4).to_sparse_csr())
    b = torch.randn(4, 4, requires_grad=True)
    Times.apply(a, b).sum().backward()
    assert torch.equal(b.grad, torch.ones(4, 4))
