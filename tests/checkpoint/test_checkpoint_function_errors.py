"""CheckpointFunction: tensors that were not listed, and bad input."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers import leaf, state_unchanged

import memsave_ext as ms

apply = ms.CheckpointFunction.apply


def test_an_unlisted_parameter_is_named_once_per_call_site():
    x = leaf(2, 3)
    weight, bias = leaf(3, 3), leaf(3)

    def region():
        return apply(lambda a: a @ weight + bias, 1, x, bias)

    with pytest.warns(
        UserWarning, match=r"shape \[3, 3\], dtype float32, used by MmBackward0"
    ) as w:
        region().sum().backward()
    assert len(w) == 1
    assert __file__ in str(w[0].message)
    assert "shape [3]," not in str(w[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region().sum().backward()
    assert weight.grad is None
    assert torch.equal(bias.grad, torch.full((3,), 4.0))


def test_an_unlisted_non_leaf_is_named_and_its_graph_left_alone():
    x, w = leaf(3), leaf(3)
    hidden = w.exp()
    output = apply(lambda a: a * hidden, 1, x)
    with pytest.warns(UserWarning, match=r"shape \[3\], dtype float32, used by MulBackward0"):
        output.sum().backward()
    assert w.grad is None
    hidden.sum().backward()
    assert torch.equal(w.grad, w.exp())


def test_an_unlisted_parameter_is_named_when_nothing_listed_needs_a_gradient():
    x = torch.randn(3)
    w = leaf(3)

    def region():
        return apply(lambda a: a * w, 1, x)

    with pytest.warns(UserWarning, match=r"shape \[3\], dtype float32, used by MulBackward0"):
        assert not region().requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not region().requires_grad


def test_an_unlisted_leaf_as_output():
    x, w = leaf(3), leaf(3)
    with pytest.warns(UserWarning, match="returned as an output"):
        sum(o.sum() for o in apply(lambda a: (a * 2, w), 1, x)).backward()
    assert w.grad is None


def test_the_warning_as_an_error_comes_out_of_backward():
    x, w = leaf(3), leaf(3)
    output = apply(lambda a: a * w, 1, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with state_unchanged(), pytest.raises(UserWarning, match="were not listed"):
            output.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), TypeError, r"expected a function and the number n of its inputs, got 0 arguments"),
        ((torch.sin,), TypeError, "got 1 arguments"),
        ((3, 1, torch.ones(1)), TypeError, "function must be callable, got int"),
        ((torch.sin, "1", torch.ones(1)), TypeError, "n must be an int, got str"),
        ((torch.sin, 1.0, torch.ones(1)), TypeError, "n must be an int, got float"),
        ((torch.sin, True, torch.ones(1)), TypeError, "n must be an int, got bool"),
        ((torch.sin, -1, torch.ones(1)), ValueError, "n must be between 0 and 1, .* got -1"),
        ((torch.sin, 2, torch.ones(1)), ValueError, "n must be between 0 and 1, .* got 2"),
        ((torch.sin, 1, [torch.ones(1)]), TypeError, r"args\[0\] \(input 0\) .* got list"),
        (
            (torch.sin, 1, None),
            TypeError,
            r"args\[0\] \(input 0\) must be a torch.Tensor, got None",
        ),
        ((torch.sin, 1, torch.ones(1), 2), TypeError, r"args\[1\] \(parameter 0\) .* got int"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        apply(*arguments)


def test_keywords_are_refused():
    with pytest.raises(TypeError, match="keyword"):
        apply(torch.sin, 1, input=torch.ones(1))


def test_it_is_not_instantiated():
    with pytest.raises(TypeError, match="CheckpointFunction.apply"):
        ms.CheckpointFunction()


@dataclass
class Output:
    value: torch.Tensor


HOLDERS = [
    Output,
    lambda tensor: SimpleNamespace(value=tensor),
    lambda tensor: {tensor},
    lambda tensor: [Output({"deep": tensor})],
]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("listed", [True, False])
def test_objects_that_hold_tensors_are_refused(holder, listed):
    w = leaf(2)
    x = leaf(2) if listed else torch.ones(2)
    with pytest.raises(TypeError, match="output 1 is a .* that holds tensors"):
        apply(lambda a: (a * 2, holder(a * w)), 1, x)
    apply(lambda a: (a * w, Output(3)), 1, leaf(2), w)  # one that holds none


@pytest.mark.parametrize("output", [{"a": 1}, [[1]], ({"deep": [1]},)])
def test_containers_of_tensors_are_refused(output):
    def fill(value, tensor):
        if isinstance(value, dict):
            return {k: fill(v, tensor) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(fill(v, tensor) for v in value)
        return tensor

    with pytest.raises(TypeError, match="output 0 is a .* that holds tensors"):
        apply(lambda a: fill(output, a * 2), 1, leaf(2))


def test_an_input_changed_in_place_by_the_function():
    x = leaf(3) * 1
    with pytest.raises(RuntimeError, match="changes input 0 in place"):
        apply(lambda a: a.mul_(2), 1, x)


def test_an_input_changed_in_place_before_backward():
    x = leaf(3) * 1
    output = apply(lambda a: a.sin(), 1, x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_parameter_changed_in_place_before_backward():
    x, w = leaf(3), leaf(3)
    output = apply(lambda a: a * w, 1, x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter 0 \(shape \[3\], dtype float32\)"):
        output.sum().backward()


def test_a_function_that_changes_its_mind():
    x = leaf(3)

    def shape(a):
        return a[:2] if ms.is_recomputing() else a * 1

    def number(a):
        return (a * 1,) if ms.is_recomputing() else (a * 1, a * 2)

    def kind(a):
        return None if ms.is_recomputing() else a * 1

    with pytest.raises(RuntimeError, match=r"has shape \[2\], in the forward it had \[3\]"):
        apply(shape, 1, x).sum().backward()
    with pytest.raises(RuntimeError, match="returned 1 outputs, the forward 2"):
        apply(number, 1, x)[0].sum().backward()
    with pytest.raises(RuntimeError, match="output 0 of the recompute is not a tensor"):
        apply(kind, 1, x).sum().backward()


def test_double_backward_is_refused():
    x, w = leaf(3), leaf(3)
    output = apply(lambda a: (a * w).sin(), 1, x, w).sum()
    (grad,) = torch.autograd.grad(output, x, create_graph=True)
    assert torch.equal(grad, (x * w).cos() * w)
    with pytest.raises(RuntimeError, match="does not support double backward"):
        torch.autograd.grad(grad.sum(), w)


def test_function_transforms_are_refused():
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda x: apply(torch.sin, 1, x).sum())(torch.randn(3))
