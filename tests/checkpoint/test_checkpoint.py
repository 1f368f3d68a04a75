"""checkpoint() against plain autograd: the same values and gradients, bitwise."""

import contextlib
from dataclasses import dataclass

import pytest
import random_programs as programs
import torch
import torch.utils.checkpoint as torch_checkpoint
from helpers import assert_equal, both, host_memory_grows, leaf, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

checkpoint = ms.checkpoint


@given(steps=programs.STEPS, outputs=st.integers(1, 3), early_stop=st.booleans())
@settings(max_examples=150)
def test_random_programs(steps, outputs, early_stop):
    results = []
    for run in (plain, lambda f, *a: checkpoint(f, *a, early_stop=early_stop)):
        inputs, weight = programs.tensors()
        function = programs.build(steps, outputs, run, weight)
        torch.manual_seed(7)
        out = run(function, *inputs)
        tensors = [t for t in (*inputs, weight) if t.requires_grad]
        grads = programs.gradients(out, tensors, retain_graph=True)
        again = programs.gradients(out, tensors)
        results.append((*out, *grads, *again, torch.rand(2)))
    assert_equal(*results)


@dataclass
class Batch:
    tensors: dict
    scale: float


def test_structures_keywords_and_closures():
    x, y, w = leaf(4), leaf(4), leaf(4)

    def function(batch, factors, /, *, offset, flag=False):
        value = batch.tensors["x"] * batch.scale * factors[0][0] * w
        return {"value": value.exp() + offset, "flag": flag, "list": [value.sin(), None]}

    def program(run):
        result = run(function, Batch({"x": x}, 2.0), [[y]], offset=y * 2, flag=True)
        assert result["flag"] is True
        assert result["list"][1] is None
        return (result["value"] * result["list"][0]).sum()

    both(program, (x, y, w))


def test_keywords_named_like_a_function_parameter():
    assert checkpoint(lambda **kw: kw["input"] * 2, input=torch.ones(1)) == 2


def test_no_tensor_at_all():
    assert checkpoint(lambda a, b: a + b, 2, b=3) == 5


def test_inputs_without_gradient_train_the_parameters():
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    both(lambda run: run(linear, x).tanh().sum(), tuple(linear.parameters()))


def test_bound_methods():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def block(self, x):
            return self.linear(x).tanh()

    net, x = Net(), leaf(2, 4)
    both(lambda run: run(net.block, x).sum(), (x, *net.parameters()))


def test_use_reentrant_is_accepted(recwarn):
    x = leaf(4)
    for value in (True, False, None):
        both(
            lambda run, v=value: (
                run(torch.exp, x) if run is plain else run(torch.exp, x, use_reentrant=v)
            ),
            (x,),
            grad_outputs=torch.ones(4),
        )
    assert not [w for w in recwarn if "reentrant" in str(w.message)]


def test_without_grad_mode():
    with torch.no_grad():
        assert not checkpoint(torch.exp, leaf(3)).requires_grad


def test_inputs_argument_and_accumulation():
    x, w = leaf(4), leaf(4)
    out = checkpoint(lambda a: (a * w).exp(), x).sum()
    out.backward(inputs=[w], retain_graph=True)
    assert x.grad is None
    out.backward()
    torch.testing.assert_close(w.grad, 2 * (x * w).exp() * x)


def test_freed_graph():
    x = leaf(4)
    out = checkpoint(lambda a: a.exp().sin(), x).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_double_backward():
    w = leaf(3, dtype=torch.float64)

    def function(a):
        return checkpoint(lambda b: (b * w).sin() * b, a)

    x = leaf(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_forward_mode():
    x, tangent = torch.randn(4), torch.randn(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        out = checkpoint(lambda a: a.sin(), dual)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(out).tangent, x.cos() * tangent)


def test_a_gradient_inside_the_function():
    x, w = leaf(4), leaf(4)

    def function(a):
        energy = (a * w).exp().sum()
        (force,) = torch.autograd.grad(energy, a, create_graph=True)
        return force * a

    both(lambda run: run(function, x * 1).sum(), (x, w))


@pytest.mark.parametrize("last", ["mul", "rrelu"])
def test_a_backward_inside_the_function(last):
    x = leaf(64)
    seen = []

    def function(a):
        b = a.detach().requires_grad_()
        y = F.rrelu(b * 3, training=True) if last == "rrelu" else b * b
        y.sum().backward()
        seen.append(b.grad)
        return a * b.grad

    both(lambda run: run(function, x).sum(), (x,))
    for other in seen[1:]:
        assert torch.equal(seen[0], other)


def test_partial_backwards_of_one_region():
    x, y = leaf(4), leaf(4)
    left, right = checkpoint(lambda a, b: (a.exp() * a, b.sin() * b), x, y)
    (gx,) = torch.autograd.grad(left.sum(), x)
    (gy,) = torch.autograd.grad(right.sum(), y)
    torch.testing.assert_close(gx, x.exp() * x + x.exp())
    torch.testing.assert_close(gy, y.cos() * y + y.sin())


def test_partial_backwards_leave_nothing():
    """What a recompute has made beside what a backward asks for goes with that backward."""
    x = leaf(1 << 16)
    left, right = checkpoint(lambda a: (a.sin().exp(), a.cos().exp()), x)
    (expected,) = torch.autograd.grad(left.sum(), x, retain_graph=True)

    def run():
        for _ in range(20):
            (grad,) = torch.autograd.grad(left.sum(), x, retain_graph=True)
            assert torch.equal(grad, expected)

    assert not host_memory_grows(run, 20 * x.nbytes // 2)
    assert torch.equal(torch.autograd.grad(right.sum(), x)[0], -x.sin() * x.cos().exp())


@pytest.mark.parametrize("kind", [dict, list])
def test_an_output_that_contains_itself(kind):
    x = leaf(4)

    def function(a):
        output = {"value": a.exp()} if kind is dict else [a.exp()]
        output.__setitem__("again", output) if kind is dict else output.append(output)
        return output

    output = checkpoint(function, x)
    output["value" if kind is dict else 0].sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_saved_tensors_seen_from_python():
    x = leaf(4)
    out = checkpoint(lambda a: a.exp().sin(), x)
    assert torch.equal(out.grad_fn._saved_self, x.exp())
    assert torch.equal(out.grad_fn._saved_self, x.exp())
    out.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


def test_saved_tensors_seen_from_inside_the_function():
    x = leaf(4)
    seen = []

    def function(a):
        y = a.exp().sin()
        seen.append(torch.equal(y.grad_fn._saved_self, a.exp()))
        return y * a

    both(lambda run: run(function, x).sum(), (x,))
    assert all(seen)
    assert len(seen) >= 2


def test_backwards_inside_the_function_under_one_group():
    """One recompute serves several backwards, and knows only what was saved before it."""
    x = leaf(64)

    def function(a):
        first = a.exp()
        (g,) = torch.autograd.grad(first.sum(), a, retain_graph=True)
        second = (first * g).sin()
        (h,) = torch.autograd.grad(second.sum(), first, retain_graph=True)
        return a * h.detach() + g.detach()

    def program(run):
        with torch_checkpoint.GraphExecGroup():
            return run(function, x * 1).sum()

    both(program, (x,))


class SavesTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        assert torch.equal(x, again)
        return 2 * x * grad


def test_custom_functions_may_look_twice():
    x = leaf(4)
    both(lambda run: run(lambda a: SavesTwice.apply(a.exp()).sin(), x).sum(), (x,))


def test_hooks_of_tensors_and_modules():
    linear, x = nn.Linear(4, 4), leaf(2, 4)
    calls = []
    linear.weight.register_hook(lambda g: calls.append("tensor"))
    linear.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    linear.register_full_backward_hook(lambda m, gi, go: calls.append("module"))
    linear.register_forward_hook(lambda m, i, o: calls.append("forward"))
    checkpoint(lambda a: linear(a).tanh() * a, x).sum().backward()
    assert sorted(calls) == ["accumulated", "forward", "forward", "module", "tensor"]


@pytest.mark.parametrize("where", ["around", "inside"])
def test_saved_tensor_hooks_and_save_on_cpu(where):
    x, w = leaf(4), leaf(4)
    packed = []

    @contextlib.contextmanager
    def hooks():
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: packed.append(t.shape) or t.clone(), lambda t: t
            ),
            torch.autograd.graph.save_on_cpu(),
        ):
            yield

    def function(a):
        with hooks() if where == "inside" else contextlib.nullcontext():
            return (a * w).sin() * a

    def program(run):
        with hooks() if where == "around" else contextlib.nullcontext():
            return run(function, x * 1).sum()

    both(program, (x, w))


def test_in_place_and_views():
    x = leaf(4, 4)

    def function(a):
        b = a * 2
        b[0].mul_(3)
        c = b.view(-1)[2:]
        c.add_(1)
        return b.exp() * c.sum()

    both(lambda run: run(function, x).sum(), (x,))


def test_an_output_is_an_input():
    x = leaf(4)
    both(lambda run: (run(lambda a: (a, a.exp()), x * 1)[0] ** 2).sum(), (x,))


def test_graph_exec_group():
    x, w = leaf(4), leaf(4)
    calls = []

    def function(a):
        calls.append(1)
        return (a * w).sin(), (a + w).exp()

    first, second = checkpoint(function, x)
    with torch_checkpoint.GraphExecGroup():
        torch.autograd.grad(first.sum(), x, retain_graph=True)
        torch.autograd.grad(second.sum(), x, retain_graph=True)
    assert len(calls) == 2
