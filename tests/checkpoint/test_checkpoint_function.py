"""CheckpointFunction against plain autograd: the same values and gradients, bitwise."""

import functools
import threading
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import random_programs as programs
import torch
from helpers import assert_equal, leaf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import _native

apply = ms.CheckpointFunction.apply


def gradients(output, tensors, **kwargs):
    outputs = [output] if isinstance(output, torch.Tensor) else list(output)
    outputs = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    weights = [torch.linspace(-1, 1, o.numel()).reshape(o.shape).to(o.dtype) for o in outputs]
    return torch.autograd.grad(outputs, tensors, weights, allow_unused=True, **kwargs)


def assert_as_plain(function, inputs, parameters=()):
    """Outputs, gradients and the random numbers that follow are those of a plain call."""
    tensors = [t for t in (*inputs, *parameters) if t.requires_grad]
    torch.manual_seed(1)
    plain = function(*inputs)
    after_plain = torch.rand(2)
    expected = gradients(plain, tensors)
    torch.manual_seed(1)
    ours = apply(function, len(inputs), *inputs, *parameters)
    after_ours = torch.rand(2)
    got = gradients(ours, tensors)
    assert torch.equal(after_plain, after_ours)
    assert type(ours) is type(plain)
    as_tuple = (lambda r: (r,)) if isinstance(plain, torch.Tensor) else tuple
    for a, b in zip(as_tuple(plain), as_tuple(ours), strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
            assert a.requires_grad == b.requires_grad
        else:
            assert a is b
    assert_equal(expected, got)
    return ours


Pair = namedtuple("Pair", "left right")
MARKER = object()

FUNCTIONS = {
    "one op": lambda x, y: x * y,
    "reuse": lambda x, y: (x * y).sin() + x * x.exp(),
    "view": lambda x, y: (x * y).t()[1:].reshape(-1),
    "in place": lambda x, y: (x * y).mul_(2).relu_() + x,
    "in place on a view": lambda x, y: _write_into_view(x * y),
    "dropout": lambda x, y: F.dropout(x, 0.5) + F.dropout(y, 0.3) * torch.randn_like(x),
    "tuple": lambda x, y: (x + y, x * y),
    "list": lambda x, y: [x + y, y.cos()],
    "named tuple": lambda x, y: Pair(x + y, x * y),
    "views of one tensor": lambda x, y: (x * y).chunk(2),
    "others among outputs": lambda x, y: (None, x * y, 3, (x > 0), MARKER),
    "an input": lambda x, y: x,
    "an input among outputs": lambda x, y: (x, x * y),
    "a view of an input": lambda x, y: x[1:],
    "an input not used": lambda x, y: y.tanh(),
    "one tensor twice": lambda x, y: (lambda z: (z, z))(x * y),
    "an integer output": lambda x, y: (x * y, x.argmax(0)),
}


def _write_into_view(x):
    x[0].mul_(3)
    return x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    assert_as_plain(FUNCTIONS[name], (leaf(4, 5), leaf(4, 5)))


@pytest.mark.parametrize("needs_grad", [(True, False), (False, True)])
def test_inputs_without_gradient(needs_grad):
    inputs = [torch.randn(4, 5).requires_grad_(need) for need in needs_grad]
    assert_as_plain(FUNCTIONS["reuse"], inputs)


def test_integer_input():
    weight = leaf(7, 3)
    index = torch.tensor([1, 5, 1])
    assert_as_plain(lambda i: F.embedding(i, weight).exp(), (index,), (weight,))


def test_no_input_at_all():
    weight = leaf(3)
    assert_as_plain(lambda: weight.exp(), (), (weight,))


def test_non_leaf_inputs_and_parameters():
    x, w = leaf(4, 5), leaf(5, 5)
    scaled = w * 2
    hidden = x.sin()
    expected = torch.autograd.grad((hidden @ scaled).cos().sum(), (x, w), retain_graph=True)
    ours = apply(lambda a: (a @ scaled).cos(), 1, hidden, scaled)
    assert_equal(expected, torch.autograd.grad(ours.sum(), (x, w)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes(dtype):
    assert_as_plain(lambda x, y: (x * y).sin() * y, (leaf(6, dtype=dtype), leaf(6, dtype=dtype)))


def test_modules_and_accumulation():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    x = leaf(5, 6)
    model(x).pow(2).sum().backward()
    expected = [p.grad.clone() for p in (*model.parameters(), x)]
    for p in (*model.parameters(), x):
        p.grad = None
    apply(model, 1, x, *model.parameters()).pow(2).sum().backward()
    assert_equal(expected, [p.grad for p in (*model.parameters(), x)])


def test_a_tensor_listed_twice_counts_once():
    x, w = leaf(4), leaf(4)
    expected = torch.autograd.grad((x * w).sum(), (x, w))
    assert_equal(expected, torch.autograd.grad(apply(lambda a: a * w, 1, x, w, w).sum(), (x, w)))
    # As two inputs it is used twice.
    expected = torch.autograd.grad((x * x).sum(), x)
    assert_equal(expected, torch.autograd.grad(apply(lambda a, b: a * b, 2, x, x).sum(), x))
    # As input and as parameter: the sum of both uses.
    expected = torch.autograd.grad((x * x.exp()).sum(), x)
    got = torch.autograd.grad(apply(lambda a: a * x.exp(), 1, x, x).sum(), x)
    torch.testing.assert_close(got[0], expected[0])


def test_unused_outputs():
    x, y = leaf(4), leaf(4)
    first, second = apply(lambda a, b: (a.exp(), b.sin()), 2, x, y)
    assert_equal(torch.autograd.grad(first.sum(), (x, y), allow_unused=True), (x.exp(), None))
    assert second.requires_grad


def test_only_what_is_asked_for():
    x, w, v = leaf(4), leaf(4), leaf(4)
    output = apply(lambda a: a * w * v, 1, x, w, v).sum()
    output.backward(inputs=[w])
    assert x.grad is None and v.grad is None
    assert torch.equal(w.grad, x * v)


def test_outputs_can_be_changed_in_place():
    x = leaf(4, 6)

    def changed(outputs):
        a, b = outputs
        a.mul_(2)
        return a * 3 + b

    def halves(t):
        return (t.exp()[:2] * 1, t.sin()[2:])

    expected = torch.autograd.grad(changed(halves(x)).sum(), x)
    assert_equal(expected, torch.autograd.grad(changed(apply(halves, 1, x)).sum(), x))


def test_retain_graph():
    x, w = leaf(4), leaf(4)
    output = apply(lambda a: F.dropout(a * w, 0.5).exp(), 1, x, w).sum()
    first = torch.autograd.grad(output, (x, w), retain_graph=True)
    second = torch.autograd.grad(output, (x, w))
    assert_equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, (x, w))


def test_second_backward_without_inputs_raises_too():
    w = leaf(4)
    output = apply(lambda: w.exp(), 0, w).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


def test_nested_regions():
    x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)

    def inner(a):
        return F.dropout(a @ w, 0.4).tanh()

    def outer(a):
        return F.dropout(apply(inner, 1, a, w) * v, 0.2) + a

    def plain(a):
        return F.dropout(inner(a) * v, 0.2) + a

    torch.manual_seed(5)
    expected = torch.autograd.grad(plain(x).sum(), (x, w, v))
    torch.manual_seed(5)
    got = torch.autograd.grad(apply(outer, 1, x, w, v).sum(), (x, w, v))
    assert_equal(expected, got)


def test_a_chain_of_regions_deeper_than_the_engine_recurses():
    x, w = leaf(8), leaf(8)
    y = plain = x
    for _ in range(200):
        y = apply(lambda a: (a * w).tanh(), 1, y, w)
        plain = (plain * w).tanh()
    assert_equal(gradients(plain, (x, w)), gradients(y, (x, w)))


def test_backward_inside_the_function():
    x = leaf(3)

    def function(a):
        with torch.enable_grad():
            b = a.detach().requires_grad_()
            (b**3).sum().backward()
        return a * b.grad

    assert torch.equal(torch.autograd.grad(apply(function, 1, x).sum(), x)[0], 3 * x.detach() ** 2)


@given(steps=programs.STEPS, outputs=st.integers(1, 3))
@settings(max_examples=100)
def test_random_programs(steps, outputs):
    results = []
    for checkpointed in (False, True):
        inputs, weight = programs.tensors(torch.float64)

        def run(function, *args, checkpointed=checkpointed, weight=weight):
            return apply(function, len(args), *args, weight) if checkpointed else function(*args)

        function = programs.build(steps, outputs, run, weight)
        torch.manual_seed(7)
        out = run(function, *inputs)
        results.append((out, programs.gradients(out, [inputs[0], inputs[2], weight])))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        # One node stands for the region, so that gradients are summed in another order; and an
        # output that needs no gradient in the plain run has a zero one here.
        if a is None or b is None:
            assert a is b or not (b if a is None else a).any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


# ---- what the function returns, and what it uses -------------------------------------------------


def wrapped(function):
    """One code object, and so one call site, for every function."""
    return lambda *tensors: ms.CheckpointFunction.apply(function, len(tensors), *tensors)


def test_each_function_at_a_line_is_looked_at():
    a, b = torch.randn(4, requires_grad=True), torch.randn(5, requires_grad=True)
    warned = []
    for function in (lambda x: x.sin(), lambda x: x * a, lambda x: x[:1] * b, lambda x: x * a):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(function)(torch.randn(4, requires_grad=True)).sum().backward()
        warned.append([f"shape [{n}]" in str(w.message) for w in caught for n in (4, 5)])
    assert warned == [[], [True, False], [False, True], []]  # each of them once


@pytest.mark.parametrize("first", ["complete", "incomplete"])
def test_what_was_seen_before_does_not_decide(first):
    """A graph from outside is neither run nor freed, whatever was called at this line before."""
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    outside = w * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = wrapped(lambda x: x.sin() if first == "complete" else x * outside)
        run(x).sum().backward()
        out = wrapped(lambda x: x * outside)(x)
        x.grad = None
        (out.sum() + outside.sum()).backward()
    torch.testing.assert_close(x.grad, outside.detach())
    assert w.grad.tolist() == [2] * 4


def test_a_tensor_from_outside_stays_as_it_is():
    w, b = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    y, same = ms.CheckpointFunction.apply(lambda a: (a * b, b), 1, w)
    assert not b.requires_grad
    assert b.grad_fn is None
    assert same.data_ptr() == b.data_ptr()
    y.sum().backward()  # the recompute reads b again
    assert w.grad.tolist() == [1] * 3


@pytest.mark.parametrize(
    "function",
    [
        lambda h, p: h,
        lambda h, p: h[1:],
        lambda h, p: p,
        lambda h, p: p.view(2, 2),
        lambda h, p: (lambda y: (y, y))(h * p)[0:2],
        lambda h, p: (lambda y: (y, y[1:]))(h * p),
    ],
    ids=["input", "view of input", "parameter", "view of parameter", "twice", "with a view"],
)
def test_memory_with_another_history_cannot_be_changed_in_place(function):
    x, p = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    h = x * 2
    result = ms.CheckpointFunction.apply(lambda h: function(h, p), 1, h, p)
    outputs = result if isinstance(result, tuple) else (result,)

    def change():
        for output in outputs[::-1]:
            output.mul_(2)
        sum(o.sum() for o in (*outputs, h)).backward()

    with pytest.raises(RuntimeError, match="view|in-place"):
        change()


def test_outputs_of_its_own_can_be_changed_in_place():
    x = torch.randn(4, 3, requires_grad=True)
    for function in (lambda x: x.sin(), lambda x: x.sin().t(), lambda x: x.sin()[1:]):
        y = ms.CheckpointFunction.apply(function, 1, x).mul_(3).exp()
        expected = torch.autograd.grad((function(x) * 3).exp().sum(), x)
        assert_equal(expected, torch.autograd.grad(y.sum(), x))


class Named(torch.Tensor):
    """A subclass without memory or operators of its own."""


def test_subclasses_of_tensor():
    seen = []

    def function(a):
        seen.append(type(a))
        return a.sin(), a, a[1:]

    x = torch.randn(4).as_subclass(Named).requires_grad_()
    outputs = ms.CheckpointFunction.apply(function, 1, x)
    assert [type(o) for o in outputs] == [Named] * 3
    sum(o.sum() for o in outputs).backward()
    assert seen == [Named, Named]
    expected = (x.detach().cos() + 1 + torch.tensor([0.0, 1, 1, 1])).as_subclass(torch.Tensor)
    torch.testing.assert_close(x.grad.as_subclass(torch.Tensor), expected)
    frozen = ms.CheckpointFunction.apply(lambda a: a.sin(), 1, x.detach())
    assert type(frozen) is Named
    plain = ms.CheckpointFunction.apply(lambda a: a, 1, torch.nn.Parameter(torch.ones(2)))
    assert type(plain) is torch.Tensor


@pytest.mark.parametrize("made", [lambda w: w + 0, lambda w: w * 2])
def test_a_listed_tensor_that_was_computed_from_another(made):
    w, x = torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    v = made(w)
    y = ms.CheckpointFunction.apply(lambda a: a * v * w, 1, x, v, w)
    if not _native.available:
        with pytest.raises(RuntimeError, match="computed from another listed"):
            y.sum().backward()
        return
    expected = torch.autograd.grad((x * made(w) * w).sum(), (x, w))
    assert_equal(expected, torch.autograd.grad(y.sum(), (x, w)))


def test_what_a_thread_of_the_function_computes():
    """What it uses of listed tensors has their gradients; what is not listed is told and cut."""
    x, w, unlisted = leaf(8, 8), leaf(8, 8), leaf(8, 8)

    def function(x, uses=False):
        with ThreadPoolExecutor(1) as pool:
            thread = pool.submit(lambda: (x @ w).sin() + (x @ unlisted if uses else 0))
            return x @ w + thread.result().cos()

    with warnings.catch_warnings():
        if _native.module is not None:  # pure Python warns, as it cannot tell
            warnings.simplefilter("error")
        assert_as_plain(function, (x,), (w,))
    with pytest.warns(UserWarning, match=r"not listed.*shape \[8, 8\]"):
        apply(functools.partial(function, uses=True), 1, x, w).sum().backward()
    assert x.grad is not None and w.grad is not None


def test_a_graph_from_outside_stays_whole_where_backward_runs_in_a_thread():
    """The recompute's thread has not made it. A mask needs no gradient, nor does a factor."""
    w, x = leaf(8, 8), leaf(8, 8)

    def gradient(run, in_thread):
        h = w.exp() * 2
        loss = run(lambda x, mask: x * mask * h.detach() + (x * h), x, torch.ones(8, 8)).sum()

        def work():
            found.append(torch.autograd.grad(loss + (3 * h).sum(), [w, x]))

        found = []
        if in_thread:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
        return found[0]

    def explicit(function, *inputs):
        return apply(function, len(inputs), *inputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # h is not listed
        expected = gradient(explicit, False)  # of w by what is outside alone
        assert_equal(expected, gradient(explicit, True))
    (outside,) = torch.autograd.grad((3 * (w.exp() * 2)).sum(), w)
    assert torch.equal(expected[0], outside)
