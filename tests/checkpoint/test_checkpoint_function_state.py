"""CheckpointFunction and what surrounds it: random numbers, autocast, hooks, memory, threads."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from helpers import assert_equal, leaf, run_threads, state_unchanged
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

apply = ms.CheckpointFunction.apply


def test_random_numbers_are_replayed_and_left_alone():
    x = leaf(64)
    seen = []

    def function(a):
        seen.append(torch.rand(3))
        return a * seen[-1][0]

    output = apply(function, 1, x)
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    linear = nn.Linear(8, 8)
    x = leaf(4, 8)
    types = []

    def function(a):
        types.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return linear(a).float().tanh()

    with torch.autocast("cpu", dtype):
        expected = torch.autograd.grad(function(x).sum(), (x, *linear.parameters()))
        ours = apply(function, 1, x, *linear.parameters())
    assert not torch.is_autocast_enabled("cpu")
    assert_equal(expected, torch.autograd.grad(ours.sum(), (x, *linear.parameters())))
    assert types == [(True, dtype)] * 3
    # Outside autocast in forward, inside it in backward: the forward decides.
    types.clear()
    ours = apply(function, 1, x, *linear.parameters())
    with torch.autocast("cpu", dtype):
        ours.sum().backward()
    assert [enabled for enabled, _ in types] == [False, False]


def test_autocast_cache_is_not_poisoned():
    """A cast made without a graph inside the region must not serve the same weight outside."""
    linear = nn.Linear(4, 4)
    x = leaf(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = apply(linear, 1, x, *linear.parameters())
        outside = linear(x)
        assert torch.is_autocast_cache_enabled()
    outside.sum().backward()
    assert linear.weight.grad is not None
    inside.sum().backward()


def test_is_recomputing():
    x = leaf(3)
    seen = []

    def inner(a):
        seen.append(("inner", ms.is_recomputing()))
        return a * 2

    def function(a):
        seen.append(("outer", ms.is_recomputing()))
        return apply(inner, 1, a)

    output = apply(function, 1, x)
    output.register_hook(lambda grad: seen.append(("hook", ms.is_recomputing())))
    output.sum().backward()
    assert seen == [
        ("outer", False),
        ("inner", False),
        ("hook", False),
        ("outer", True),
        ("inner", True),
        ("inner", True),
    ]
    assert not ms.is_recomputing()


class BoomError(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_exceptions_come_out_as_they_are(where):
    x = leaf(3)
    error = BoomError("from the function")

    def function(a):
        torch.rand(1)
        if (where == "recompute") == ms.is_recomputing():
            raise error
        return a * 2

    with state_unchanged(), torch.autocast("cpu"):
        if where == "forward":
            with state_unchanged(), pytest.raises(BoomError) as caught:
                apply(function, 1, x)
        else:
            output = apply(function, 1, x)
            rng = torch.get_rng_state()
            with state_unchanged(), pytest.raises(BoomError) as caught:
                output.sum().backward()
            assert torch.equal(rng, torch.get_rng_state())
        assert caught.value is error
    assert x.grad is None


def test_hooks_see_each_gradient_once():
    x, w = leaf(4), leaf(4)
    calls = []

    def hook(name, factor=1):
        def run(grad):
            calls.append(name)
            return grad * factor

        return run

    w.register_hook(hook("w", 2))
    x.register_hook(hook("x", 3))
    w.register_post_accumulate_grad_hook(lambda p: calls.append("w accumulated"))
    hidden = x * 1
    hidden.register_hook(hook("hidden", 5))
    first = apply(lambda a: a * w, 1, hidden, w)
    second = apply(lambda a: a * w, 1, first, w)
    second.sum().backward()
    assert sorted(calls) == ["hidden", "w", "w accumulated", "x"]
    torch.testing.assert_close(w.grad, (2 * 2 * x * w).detach())
    torch.testing.assert_close(x.grad, (3 * 5 * w * w).detach())


def test_hooks_of_a_non_leaf_parameter_run_once():
    w = leaf(4)
    scaled = w * 2
    scaled.retain_grad()
    calls = []
    scaled.register_hook(lambda grad: calls.append(1))
    x = leaf(4)
    apply(lambda a: a * scaled, 1, x, scaled).sum().backward()
    assert calls == [1]
    assert torch.equal(scaled.grad, x)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_saved_tensor_hooks(where):
    x, w = leaf(4), leaf(4)
    packed = []

    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t.shape) or t.clone(), lambda t: t
        )

    def function(a):
        with hooks() if where == "inside" else contextlib.nullcontext():
            return (a * w).sin()

    with hooks() if where == "around" else contextlib.nullcontext():
        output = apply(function, 1, x, w)
    assert len(packed) == (where == "around")  # the input, and nothing of the region
    expected = torch.autograd.grad((x * w).sin().sum(), (x, w))
    assert_equal(expected, torch.autograd.grad(output.sum(), (x, w)))


def test_save_on_cpu():
    x, w = leaf(4), leaf(4)
    with torch.autograd.graph.save_on_cpu():
        output = apply(lambda a: (a * w).sin(), 1, x * 1, w)
    expected = torch.autograd.grad((x * w).sin().sum(), (x, w))
    assert_equal(expected, torch.autograd.grad(output.sum(), (x, w)))


def test_without_grad_mode_it_is_a_plain_call():
    x = leaf(3)
    calls = []

    def function(a):
        calls.append(torch.is_grad_enabled())
        return a * 2

    with torch.no_grad():
        assert not apply(function, 1, x).requires_grad
    with torch.inference_mode():
        assert apply(function, 1, x).is_inference()
    assert calls == [False, False]


def test_forward_mode():
    x, tangent = torch.randn(4), torch.randn(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        output = apply(lambda a: a.sin(), 1, dual)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(output).tangent, x.cos() * tangent)


@pytest.mark.parametrize("listed", ["input", "parameter"])
def test_forward_mode_with_a_gradient_raises(listed):
    x, w = leaf(4), leaf(4)
    with torch.autograd.forward_ad.dual_level():
        tensors = {"input": x, "parameter": w}
        dual = torch.autograd.forward_ad.make_dual(tensors[listed], torch.ones(4))
        tensors[listed] = dual
        a, b = tensors.values()
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            apply(lambda a: a.sin() * b, 1, a, b)


def test_an_input_that_is_frozen_before_backward():
    x, w = leaf(4), leaf(4)
    out = apply(lambda a: (a * w).sin(), 1, x, w)
    x.requires_grad_(False)
    out.sum().backward()
    assert x.grad is None
    assert torch.equal(w.grad, (x * w).cos() * x)


def test_it_holds_the_inputs_and_nothing_else():
    x = leaf(256, 256)
    w = leaf(256, 256)

    def function(a):
        for _ in range(10):
            a = (a @ w).tanh()
        return a.sum()

    with ms.memory.track() as tracked:
        output = apply(function, 1, x.neg(), w)
    # The input and the output; w was there before.
    assert tracked.live == x.nbytes + output.nbytes
    with ms.memory.track() as tracked:
        output.backward()
    x.grad = w.grad = None


def test_nothing_is_left_behind():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a):
            return apply(self.linear, 1, a, *self.linear.parameters())

    x = leaf(2, 4)
    dropped = Block()
    dropped(x)  # a forward without a backward
    used = Block()
    used(x).sum().backward()
    kept = Block()
    output = kept(x).sum()
    output.backward()  # releases the function, though the output lives on
    references = [weakref.ref(m) for m in (dropped, used, kept)]
    del dropped, used, kept
    gc.collect()
    assert [r() for r in references] == [None] * 3


def test_no_growth():
    x, w = leaf(8), leaf(8)
    with ms.memory.track() as tracked:
        for _ in range(200):
            torch.autograd.grad(apply(lambda a: F.dropout(a * w), 1, x, w).sum(), (x, w))
        gc.collect()
    assert tracked.live == 0


def test_threads():
    linear = nn.Linear(16, 16)
    parameters = list(linear.parameters())
    inputs = [leaf(8, 16) for _ in range(4)]
    expected = [torch.autograd.grad(linear(x).tanh().sum(), (x, *parameters)) for x in inputs]
    failures = []

    def work(i):
        try:
            for _ in range(50):
                output = apply(lambda a: linear(a).tanh(), 1, inputs[i], *parameters)
                got = torch.autograd.grad(output.sum(), (inputs[i], *parameters))
                assert_equal(expected[i], got)
                assert not ms.is_recomputing()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(t.is_alive() for t in threads)


def test_two_backwards_of_one_graph_at_once():
    x, w = leaf(64), leaf(64)
    output = apply(lambda a: (a * w).tanh(), 1, x, w).sum()
    expected = torch.autograd.grad(output, (x, w), retain_graph=True)
    results = [None, None]

    def work(i):
        for _ in range(50):
            results[i] = torch.autograd.grad(output, (x, w), retain_graph=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        assert_equal(expected, result)


def test_two_backwards_at_once_that_free_the_graph():
    """One of them may find the region released; neither may find half of it."""
    x, w = leaf(64), leaf(64)
    errors = []
    for _ in range(50):
        output = apply(lambda a: F.dropout(a * w).tanh(), 1, x, w).sum()
        start = threading.Barrier(2)

        def work(i, output=output, start=start):
            start.wait()
            try:
                torch.autograd.grad(output, (x, w))
            except RuntimeError as error:
                errors.append(str(error))

        run_threads(work, 2)
    assert all("a second time" in error for error in errors)
