"""checkpoint(chunks=): wrong arguments, functions that do not act on rows, and norms of batches."""

import copy

import numpy
import pytest
import torch
from chunk_programs import MLP
from helpers import leaf, state_unchanged
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunks": 0}, ValueError, "chunks must be a positive int or None, got 0"),
        ({"chunks": -2}, ValueError, "chunks must be a positive int or None, got -2"),
        ({"chunks": 2.0}, TypeError, "chunks must be a positive int or None, got 2.0"),
        ({"chunks": True}, TypeError, "chunks must be a positive int or None, got True"),
        ({"chunks": "2"}, TypeError, "chunks must be a positive int or None, got '2'"),
        ({"chunks": 2, "chunk_dim": "x"}, TypeError, "chunk_dim must be an int, got 'x'"),
        ({"chunks": 2, "chunk_args": "x"}, TypeError, "tuple or list .* got 'x'"),
        ({"chunks": 2, "chunk_args": (1.0,)}, TypeError, "positions and keyword names, got"),
        ({"chunks": 2, "chunk_args": ()}, ValueError, "at least one position .* got \\(\\)"),
        ({"chunks": 2, "chunk_args": (-1,)}, ValueError, "positions from 0 on, got \\(-1,\\)"),
        ({"chunk_args": (0,)}, ValueError, "chunks is None"),
        ({"chunk_dim": 1}, ValueError, "chunks is None"),
    ],
    ids=str,
)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        ms.checkpoint(torch.sin, X, **options)
    with pytest.raises(error, match=message):
        ms.checkpoint_modules(MLP(), MLP, **options)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((1, [X]), {}, ValueError, "with none .parameters are not cut."),
        ((nn.Parameter(X),), {}, ValueError, "with none .parameters are not cut."),
        (
            (torch.ones(()), X),
            {},
            ValueError,
            r"argument 0 has no dimension chunk_dim=0: its shape is \[\]",
        ),
        (
            (X,),
            {"chunk_dim": 2},
            ValueError,
            r"argument 0 has no dimension chunk_dim=2: .* \[4, 3\]",
        ),
        ((X,), {"chunk_args": (1,)}, ValueError, r"names 1, but .* the arguments \[0\]"),
        ((X,), {"chunk_args": ("x",)}, ValueError, r"names 'x', but .* the arguments \[0\]"),
        ((X, 5), {"chunk_args": (1,)}, TypeError, "argument 1 is a int"),
        ((X, X[:3]), {"chunk_args": (0, 1)}, ValueError, r"dimension 0, got \{0: 4, 1: 3\}"),
        ((X, X[0, 0]), {"chunk_args": (0, 1)}, ValueError, r"argument 1 has no dimension .* \[\]"),
    ],
    ids=str,
)
def test_arguments(args, options, error, message):
    with pytest.raises(error, match=message):
        ms.checkpoint(lambda *a: a, *args, chunks=2, **options)


def test_no_function():
    with pytest.raises(TypeError, match="function must be callable, got int"):
        ms.checkpoint(5, X, chunks=2)


def counter():
    calls = []
    return lambda: calls.append(1) or len(calls)


def test_results_that_cannot_be_put_together():
    count, rows = counter(), r"With chunks=n the function must act on each row"
    cases = [
        (lambda a: a.sum(), r"tensor of shape \[\] .* has no dimension chunk_dim=0"),
        (lambda a: {"mean": a.mean(0)}, r"of 2 rows the function returned a tensor of shape \[3\]"),
        (lambda a: a[1:], r"of 2 rows the function returned a tensor of shape \[1, 3\]"),
        (lambda a: a[: count()], r"of 2 rows the function returned a tensor of shape"),
        (lambda a: (a, count()), r"returned \d+ for piece 0 and \d+ for piece 1"),
        (lambda a: (a, count() / 2), r"values that are not tensors must be the same"),
        (lambda a: (a, numpy.ones(2)), r"returned a ndarray for piece 0 and a ndarray for piece 1"),
        (lambda a: (a, object()), r"returned a object for piece 0"),
        (
            lambda a: [a] * count(),
            r"returned a list of another structure for piece 1 than for piece 0",
        ),
        (lambda a: {count(): a}, r"returned a dict of another structure for piece 1"),
        (lambda a: a if count() % 2 else None, r"for piece 0 and a|for piece 1 than"),
    ]
    for function, message in cases:
        with state_unchanged(), pytest.raises(RuntimeError, match=message) as info:
            ms.checkpoint(function, X.clone().requires_grad_(), chunks=2)
        assert info.match(rows)


def test_inside_of_transforms():
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda a: ms.checkpoint(torch.sin, a, chunks=2).sum())(X)


NORMS = {
    "torch": nn.BatchNorm1d,
    "ours": ms.BatchNorm1d,
    "synced": ms.SyncBatchNorm,
    "torch, without running statistics": lambda n: nn.BatchNorm1d(n, track_running_stats=False),
    "ours, without running statistics": lambda n: ms.BatchNorm1d(n, track_running_stats=False),
    "instances, counted": lambda n: nn.InstanceNorm1d(n, track_running_stats=True),
}


CALLS = {
    "called": lambda norm: norm,
    "in a module": lambda norm: nn.Sequential(nn.Linear(5, 5), norm),
    "in a closure": lambda norm: lambda x: norm(x) * 2,
    "forward": lambda norm: norm.forward,
    "forward of the class": lambda norm: lambda x: type(norm).forward(norm, x),
    "nested": lambda norm: lambda x: ms.checkpoint(norm, x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
# torch's norms are known by their call.
@pytest.mark.without(
    case=lambda c: c["norm"][:5] in ("torch", "insta") and c["call"] == "forward of the class"
)
def test_norms_of_batches_raise_before_they_count(norm, call, mode):
    module, x = NORMS[norm](3), leaf(6, 3, 5)
    before = copy.deepcopy(module.state_dict())
    function = CALLS[call](module)
    with state_unchanged(), torch.set_grad_enabled(mode == "grad"):
        with pytest.raises(RuntimeError, match="statistics of the whole batch, and chunks=n"):
            ms.checkpoint(function, x, chunks=2)
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        assert ms.checkpoint(function, x).shape == x.shape  # nothing is left behind
        module(x)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, ms.BatchNorm1d])
def test_norms_of_checkpoint_modules_raise(norm):
    net, x = nn.Sequential(norm(3)), leaf(6, 3)
    ms.checkpoint_modules(net, norm, chunks=2)
    with pytest.raises(RuntimeError, match="statistics of the whole batch, and chunks=n"):
        net(x)
    assert net[0].num_batches_tracked == 0


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, ms.BatchNorm1d, nn.InstanceNorm1d], ids=str)
def test_norms_that_act_on_rows(norm):
    module, x = norm(3), leaf(6, 3, 5)
    if norm is not nn.InstanceNorm1d:
        module(x)
        module.eval()
    before = copy.deepcopy(module.state_dict())
    out = ms.checkpoint(module, x, chunks=4)
    torch.testing.assert_close(out, module(x))
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, ms.BatchNorm1d])
def test_one_piece_is_the_whole_batch(norm):
    module, other, x = norm(3), norm(3), leaf(6, 3)
    ms.checkpoint(module, x, chunks=1).sum().backward()
    other(x).sum().backward()
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, ms.BatchNorm1d])
def test_a_recompute_that_the_function_asks_for_may_have_norms(norm):
    module, x = norm(3), leaf(4, 3)
    y = leaf(6, 3)
    other = ms.checkpoint(lambda a: module(a).sin(), y)

    def function(a):
        (g,) = torch.autograd.grad(other.sum(), y, retain_graph=True)
        return a * g.sum()

    out = ms.checkpoint(function, x, chunks=2)
    out.sum().backward()
    assert module.num_batches_tracked == 1


def test_a_norm_by_its_function_is_not_seen():
    """What the page says."""
    x = leaf(6, 3)
    out = ms.checkpoint(lambda a: F.batch_norm(a, None, None, training=True), x, chunks=2)
    assert not torch.allclose(out, F.batch_norm(x, None, None, training=True))
