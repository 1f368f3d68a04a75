"""NaN and infinity: backward, double backward and pure Python agree on them."""

import pytest
import torch
from torch.nn import functional as F

INF, NAN = float("inf"), float("nan")
VALUES = [INF, -INF, NAN]


def tensors(seed=0, dtype=torch.double):
    torch.manual_seed(seed)
    shapes = (6, 3, 2), (6, 3, 2), (3,), (3,), (6, 3, 2)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def first(x, residual, weight, bias, grad, training, activation, graph):
    """The gradients of x, residual, weight and bias, by the kernels or in a graph."""
    mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
    output = torch.ops.memsave_ext.batch_norm_forward(
        *leaves[:1], *leaves[2:], leaves[1], None, *((None, None) if training else (mean, var)),
        training, 0.1, 1e-3, activation, 0.25, None,
    )[0]  # fmt: skip
    grad = grad.clone().requires_grad_(graph)
    return leaves, grad, torch.autograd.grad(output, leaves, grad, create_graph=graph)


def by_hand(x, residual, weight, bias, grad, training, activation):
    """The same gradients as an expression; selects, as autograd's relu does."""
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
    grad = grad.clone().requires_grad_()
    x, residual, weight, bias = leaves
    column = (1, -1, 1)
    if training:
        mean = x.mean((0, 2), keepdim=True)
        invstd = ((x - mean).square().mean((0, 2), keepdim=True) + 1e-3).rsqrt()
    else:
        mean, invstd = torch.zeros_like(x[:1, :, :1]), torch.full_like(x[:1, :, :1], 1.001**-0.5)
    normalized = (x - mean) * invstd
    z = normalized * weight.view(column) + bias.view(column) + residual
    g = grad
    if activation == "relu":
        g = torch.where(z <= 0, torch.zeros_like(g), g)
    elif activation == "leaky_relu":
        # One product, so that what is not chosen does not meet infinity in its derivative.
        g = g * torch.where(z > 0, torch.ones_like(z), torch.full_like(z, 0.25))
    scale = invstd * weight.view(column)
    dot = (g * normalized).sum((0, 2))
    of_x = scale * g
    if training:
        of_x = scale * (
            g - g.mean((0, 2), keepdim=True)
            - normalized * (g * normalized).mean((0, 2), keepdim=True)
        )  # fmt: skip
    return leaves, grad, (of_x, g, dot, g.sum((0, 2)))


def same_kind(a, b, what):
    """Where one is NaN or infinite, so is the other; where both are finite, they are close."""
    assert torch.equal(a.isnan(), b.isnan()), what
    assert torch.equal(a.isinf(), b.isinf()), what
    torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", ["x", "residual", "weight", "bias", "grad"])
def test_the_graph_of_a_gradient_has_the_kernels_values(where, training, activation):
    """What create_graph=True returns beside what the double backward computes again."""
    for seed, value in enumerate(VALUES):
        of = dict(zip(["x", "residual", "weight", "bias", "grad"], tensors(seed), strict=True))
        of[where].view(-1)[seed % of[where].numel()] = value
        *_, kernels = first(*of.values(), training, activation, False)
        *_, expected = by_hand(*of.values(), training, activation)
        for name, a, b in zip(["x", "residual", "weight", "bias"], kernels, expected, strict=True):
            same_kind(a, b, name)


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", ["x", "residual", "weight", "bias", "grad"])
@pytest.mark.parametrize("root", range(4))
def test_double_backward(root, where, training, activation):
    """Of each gradient, with respect to all; one value that is not finite."""
    for seed, value in enumerate(VALUES):
        of = dict(zip(["x", "residual", "weight", "bias", "grad"], tensors(seed), strict=True))
        of[where].view(-1)[seed % of[where].numel()] = value
        results = []
        for leaves, grad, grads in (
            first(*of.values(), training, activation, True),
            by_hand(*of.values(), training, activation),
        ):
            torch.manual_seed(9)
            v = torch.randn(grads[root].shape, dtype=torch.double)
            results.append(
                torch.autograd.grad(
                    grads[root], [*leaves, grad], v, allow_unused=True, materialize_grads=True
                )
            )
        for name, a, b in zip(of, *results[:1], results[1], strict=True):
            same_kind(a, b, name)


@pytest.mark.parametrize("value", VALUES)
def test_relu_passes_no_infinity_of_what_it_cuts(value):
    """An infinite gradient of a value that relu cuts off is 0, as torch's relu has it."""
    x, residual, weight, bias, grad = tensors()
    residual = residual - 100  # all cut
    grad[0, 0, 0] = value
    leaves, grad, grads = first(x, residual, weight, bias, grad, True, "relu", True)
    for g in grads:
        assert torch.equal(g, torch.zeros_like(g))
    second = torch.autograd.grad(
        sum(g.sum() for g in grads), [*leaves, grad], allow_unused=True, materialize_grads=True
    )
    for g in second:
        assert torch.equal(g, torch.zeros_like(g))
    assert torch.equal(F.relu(torch.tensor(-1.0)), torch.tensor(0.0))


@pytest.mark.parametrize("value", VALUES)
def test_leaky_relu_at_values_that_are_not_finite(value):
    """Where z is NaN the slope applies, in the kernels and in the double backward."""
    x, residual, weight, bias, grad = tensors()
    residual[1, 1, 1] = value
    _, grad, grads = first(x, residual, weight, bias, grad, True, "leaky_relu", True)
    (of_grad,) = torch.autograd.grad(grads[1].sum(), grad)
    assert of_grad[1, 1, 1].item() == (1 if value == INF else 0.25)
