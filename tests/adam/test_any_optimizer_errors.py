"""What goes wrong in the steps of an optimizer that in_backward() has taken, and threads."""

import pytest
import torch
from helpers import run_threads
from own_steps import TORCHS, Fails, assert_same, loss, model, pair, step
from torch import nn

import memsave_ext as ms
from memsave_ext.adam import owners

SGD = TORCHS["SGD momentum"]


def test_a_second_backward_is_refused():
    (net, optimizer), _ = pair(SGD)
    loss(net, 0).backward()
    with pytest.raises(RuntimeError, match=r"memsave_ext: parameter \d .* receives a second grad"):
        loss(net, 0).backward()
    with pytest.raises(RuntimeError, match=r"the others were not|second gradient"):
        loss(net, 0).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("small_bytes", [0, 1 << 16])
def test_a_step_that_raises(small_bytes):
    net = model()
    optimizer = ms.in_backward(Fails(net.parameters(), lr=0.1), small_bytes=small_bytes)
    optimizer.fails = True
    with pytest.raises(ArithmeticError, match="no"):
        loss(net, 0).backward()
    with pytest.raises(RuntimeError, match="the others were not"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.fails = False
    step(net, optimizer, 0)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.fails = True
    with pytest.raises(ArithmeticError, match="no"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.fails = False
    step(net, optimizer, 0)


def test_sparse_gradients():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = ms.in_backward(torch.optim.SGD(embedding.parameters(), lr=0.1))
    with pytest.raises(
        RuntimeError, match="a parameter with a sparse gradient cannot be stepped in backward"
    ):
        embedding(torch.tensor([1, 2])).sum().backward()
    assert optimizer.step() is None  # which the optimizer's own does with what is left in .grad


@pytest.mark.skipif(not ms._native.available, reason="Python cannot take torch's locks")
def test_backwards_of_several_threads_at_once():
    """Each of its own parameters; the optimizer's step() runs in one thread at a time."""
    params = [nn.Parameter(torch.randn(8)) for _ in range(40)]
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, other = SGD(params), SGD(copies)
    ms.in_backward(optimizer, small_bytes=0)

    def run(mine):
        sum((p * p).sum() for p in mine).backward()

    for _ in range(10):
        run_threads(lambda i: run(params[i::4]), 4)
        optimizer.step()
        run(copies)
        other.step()
        other.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


def test_an_optimizer_that_was_refused_is_none_of_ours():
    """Nothing looks after it: clipping does not, and regions are not told of its steps."""
    net = model()
    optimizer = SGD(net.parameters())
    with pytest.raises(TypeError, match="grad_scaler must be"):
        ms.in_backward(optimizer, grad_scaler="no scaler")
    assert type(optimizer) is torch.optim.SGD and not owners.is_own(optimizer)
    loss(net, 0).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert not all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert ms.in_backward(optimizer) is optimizer


class ByTable(torch.optim.SGD):
    """Reads its rates from a table, which is larger than a parameter."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.rates = lr * torch.linspace(0, 2, 10_001)

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = float(self.rates[5_000])
        return super().step(closure)


def test_a_table_of_an_optimizer():
    ours, theirs = pair(lambda params: ByTable(params, lr=0.1))
    for number in range(3):
        step(*ours, number)
        step(*theirs, number)
    assert_same(ours, theirs)


def test_a_thread_of_its_own():
    ours, theirs = pair(SGD)
    for number in range(3):
        for each in (ours, theirs):
            run_threads(lambda _, each=each, number=number: step(*each, number), 1)
    assert_same(ours, theirs)
