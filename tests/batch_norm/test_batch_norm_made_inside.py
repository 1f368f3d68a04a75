"""Batch norms that are made inside a region, at each run anew, keep their own statistics."""

import copy

import pytest
import torch
from batch_norms import CHECKPOINTS, FUNCTIONS, KINDS, SAVED, plain
from helpers import assert_equal, run_threads

import memsave_ext as ms


def fresh(t, count=6):
    """Modules made inside the function, of the same shape, each run anew."""
    for i in range(count):
        norm = ms.BatchNorm2d(4)
        t = (norm(t * (i + 1)) + t).tanh()
    return t


def copies(norm):
    def function(t):
        for i in range(6):
            t = (copy.deepcopy(norm)(t + i * t * t) + t.sin()).tanh()
        return t

    return function


def copies_and_the_original(norm):
    def function(t):
        for i in range(4):
            t = (copy.deepcopy(norm)(t + i * t * t) + norm(t.exp())).tanh()
        return t

    return function


def kept(norm):
    others = []

    def function(t):
        for i in range(4):
            others.append(copy.deepcopy(norm))
            t = (others[-1](t + i * t * t) * others[0](t) + norm(t.exp())).tanh()
        return t

    return function


def evaluated(norm):
    def function(t):
        for i in range(4):
            other = copy.deepcopy(norm).train(i % 2 == 0)
            other.running_mean += i
            t = (other(t + i * t * t) + norm(t.exp())).tanh()
        return t

    return function


@pytest.mark.each_value
@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n != SAVED])
@pytest.mark.parametrize("make", [copies, copies_and_the_original, kept, evaluated, None])
# In eval mode the forwards of other people's Functions are not looked for.
@pytest.mark.without(case=lambda c: c["make"] is evaluated and c["name"] in FUNCTIONS)
def test_modules_made_inside_the_function(make, name):
    def result(run):
        torch.manual_seed(4)
        norm, x = ms.BatchNorm2d(4), torch.randn(3, 4, 5, 5, requires_grad=True)
        function = fresh if make is None else make(norm)
        y = run(function, x, [] if make is None else list(norm.parameters()))
        y.square().sum().backward()
        return [x.grad, norm.running_mean, norm.running_var, norm.num_batches_tracked]

    expected = result(plain)
    for _ in range(5):  # addresses differ from run to run
        assert_equal(result(CHECKPOINTS[name]), expected)


@pytest.mark.parametrize("name", [n for n in KINDS if n != "reentrant"])
def test_modules_made_inside_of_nested_regions(name):
    def result(run):
        torch.manual_seed(4)
        norm, x = ms.BatchNorm2d(4), torch.randn(3, 4, 5, 5, requires_grad=True)

        def inner(t):
            return copies_and_the_original(norm)(t * 2)

        def outer(t):
            t = copy.deepcopy(norm)(t)
            t = run(inner, norm(t), list(norm.parameters()))
            return run(inner, t, list(norm.parameters())).sin()

        run(outer, x, list(norm.parameters())).square().sum().backward()
        return [x.grad, norm.running_mean, norm.running_var, norm.num_batches_tracked]

    assert_equal(result(CHECKPOINTS[name]), result(plain))


@pytest.mark.parametrize("early_stop", [True, False])
def test_modules_made_inside_with_a_retained_graph(early_stop):
    def result(run):
        torch.manual_seed(4)
        norm, x = ms.BatchNorm2d(4), torch.randn(3, 4, 5, 5, requires_grad=True)
        y = run(copies_and_the_original(norm), x).square()
        grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(3)]
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [*grads, *torch.autograd.grad(g.square().sum(), x), norm.running_var]

    def run(function, x):
        return ms.checkpoint(function, x, early_stop=early_stop)

    assert_equal(result(run), result(lambda f, x: f(x)))


def test_regions_in_threads_share_modules():
    norm = ms.BatchNorm2d(4, momentum=None)
    xs = [torch.randn(3, 4, 5, 5, requires_grad=True) for _ in range(4)]
    function = copies(norm)
    expected = [torch.autograd.grad(function(x).square().sum(), x)[0] for x in xs]
    found = [None] * 4

    def work(i):
        for _ in range(5):
            (found[i],) = torch.autograd.grad(ms.checkpoint(function, xs[i]).square().sum(), xs[i])

    run_threads(work, 4)
    assert_equal(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_another_order_is_an_error(name):
    norm, runs = ms.BatchNorm2d(4), []

    def function(t):
        runs.append(1)
        if len(runs) == 1:
            t = norm(t).sin()
            return (copy.deepcopy(norm)(t)).sin()
        t = copy.deepcopy(norm)(t).sin()
        return norm(t).sin()

    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    y = CHECKPOINTS[name](function, x, list(norm.parameters()))
    with pytest.raises(RuntimeError, match="calls its batch norms in another order"):
        y.sum().backward()
