"""Accuracy against float64, determinism, values that are not finite, derivatives."""

import pytest
import torch
from batch_norms import in_layout
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import memsave_ext as ms

native = pytest.mark.skipif(not ms._native.available, reason="about the native kernels")
BOTH = ("contiguous", "channels_last")


def reference(x, weight, bias, eps=1e-5):
    x = x.detach().double().requires_grad_()
    weight, bias = (t.detach().double().requires_grad_() for t in (weight, bias))
    return x, weight, bias, F.batch_norm(x, None, None, weight, bias, True, 0.1, eps)


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("mean", [0.0, 1e3, 1e4])
@pytest.mark.parametrize("shape", [(64, 16, 16, 16), (16, 67, 7, 7), (4096, 3, 1, 1)])
@pytest.mark.parametrize("outlier", [False, True])
def test_large_means(shape, mean, layout, outlier):
    """torch's channels_last kernel is off by 4e-2 at a mean of 1e4."""
    x = torch.randn(shape) + mean
    if outlier:
        x[0, :, 0, 0] = 0  # an implementation that shifts by the first value would cancel
    x = in_layout(x, layout)
    bn = ms.BatchNorm2d(shape[1])
    output = bn(x)
    *_, expected = reference(x, bn.weight, bn.bias)
    # Relative only for the outlier, of some 100 standard deviations.
    torch.testing.assert_close(
        output.double(), expected, rtol=3e-5, atol=1e-5 if mean == 0 else 1e-3
    )


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 16, 14, 14), (5, 33, 7, 7)])
def test_low_precision_is_as_good_as_torchs(shape, dtype, layout):
    x = in_layout((torch.randn(shape) * 2 + 1).to(dtype), layout)
    grad = in_layout(torch.randn(shape).to(dtype), layout)
    errors = []
    for module in (ms.BatchNorm2d(shape[1]), nn.BatchNorm2d(shape[1])):
        a = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        output = module(a)
        output.backward(grad)
        xd, _, _, expected = reference(x, module.weight, module.bias)
        expected.backward(grad.double())
        pairs = [(output, expected), (a.grad, xd.grad)]
        errors.append([(p.double() - q).abs().max().item() for p, q in pairs])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 2 * theirs


@native
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(64, 3, 32, 32), (16, 70, 9, 9), (5000, 1, 3, 3), (7, 200, 1, 1)]
)
def test_the_same_bits_for_any_number_of_threads(shape, dtype, layout):
    x = in_layout(torch.randn(shape).to(dtype), layout)
    grad = in_layout(torch.randn(shape).to(dtype), layout)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            bn = ms.BatchNorm2d(shape[1], activation="relu")
            a = x.detach().requires_grad_()
            output = bn(a)
            output.backward(grad)
            results.append([output, a.grad, *(p.grad for p in bn.parameters()), *bn.buffers()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 3, 16, 16), (6, 37, 5, 7), (3, 5, 1, 1), (64, 64, 3, 3)])
def test_the_recompute_gives_the_same_bits(shape, dtype, activation, layout):
    x, residual = (in_layout(torch.randn(shape).to(dtype), layout) for _ in range(2))
    weight, bias = torch.randn(2, shape[1])

    def forward(statistics):
        return torch.ops.memsave_ext.batch_norm_forward(
            x, weight, bias, residual, statistics, None, None, True, 0.1, 1e-5, activation, 0.3,
            None,
        )  # fmt: skip

    first, statistics = forward(None)
    again, returned = forward(statistics)
    assert torch.equal(first, again) and torch.equal(statistics, returned)


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("values", [["inf"], ["-inf"], ["nan"], ["inf", "-inf"], ["inf", "nan"]])
@pytest.mark.parametrize("momentum", [0.0, 0.1, None])
def test_values_that_are_not_finite_poison_as_in_torch(values, momentum, layout):
    x = in_layout(torch.randn(4, 5, 3, 3), layout)
    for i, value in enumerate(values):
        x[i, 2, i, 1] = float(value)
    ours, theirs = (m(5, momentum=momentum) for m in (ms.BatchNorm2d, nn.BatchNorm2d))
    left, right = ours(x), theirs(x.contiguous())  # its channels_last kernel is less exact
    for a, b in zip([left, *ours.buffers()], [right, *theirs.buffers()], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_overflow_of_float16_statistics():
    """Sums of squares above 65504: statistics are float32."""
    x = torch.full((8, 2, 4, 4), 200.0, dtype=torch.float16) * torch.randn(8, 2, 4, 4).sign()
    assert ms.BatchNorm2d(2)(x.half()).isfinite().all()


def inputs(shape, last=False):
    x = torch.randn(shape, dtype=torch.float64)
    x = in_layout(x, "channels_last" if last else "contiguous").requires_grad_()
    residual = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = (
        torch.randn(shape[1], dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    return x, residual, weight, bias


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_gradcheck(activation, training, with_residual, last):
    mean, var = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5

    def function(x, residual, weight, bias):
        return torch.ops.memsave_ext.batch_norm_forward(
            x, weight, bias, residual if with_residual else None, None,
            None if training else mean, None if training else var, training, 0.1, 1e-3,
            activation, 0.1, None,
        )[0] + 0 * residual  # fmt: skip

    arguments = inputs((3, 3, 2, 2), last)
    assert gradcheck(function, arguments)
    assert gradgradcheck(function, arguments)


def test_third_derivative():
    """torch's own treats the statistics as constants there."""

    def normalize(x):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-2).sqrt()

    bn = ms.BatchNorm1d(2, eps=1e-2, affine=False).double()
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    results = []
    for function in (bn, normalize):
        value = function(x).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.sin().sum()
        results.append(grad)
    torch.testing.assert_close(*results)


def test_double_backward_through_a_parameter_upstream():
    """x depends on the weight, too: paths outside of the operator are not counted twice."""
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, dtype=torch.float64)

    def function(weight):
        return F.relu(ms_norm(x * weight, weight).sin())

    def ms_norm(x, weight):
        return torch.ops.memsave_ext.batch_norm_forward(
            x, weight, None, None, None, None, None, True, 0.1, 1e-3, "none", 0.0, None
        )[0]

    assert gradgradcheck(function, (weight,))
