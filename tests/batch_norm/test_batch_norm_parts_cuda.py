"""The operators that SyncBatchNorm is made of, on a GPU: beside float64, and beside the whole."""

import pytest
import torch
from on_device import HAS_CUDA, needs_kernels, on_every_device
from torch import nn

ops = torch.ops.memsave_ext
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# Vectors that fit and do not, chunks that are full and are not, one value for each channel.
SHAPES = [(2, 3, 5, 7), (3, 264, 6, 10)]
if HAS_CUDA:
    SHAPES += [(1, 1, 1, 2), (4, 64, 14, 14), (5, 1, 129, 57)]
SLOPE, EPS = 0.1, 1e-5
every_case = [
    pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"]),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    pytest.mark.parametrize("layout", LAYOUTS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


def make(shape, dtype, layout, device, mean=0.5):
    value = torch.randn(shape, dtype=torch.float64) * 2 + mean
    return value.to(device, dtype).contiguous(memory_format=LAYOUTS[layout])


def by_channel(x):
    return x.detach().double().transpose(0, 1).flatten(1)


def read_moments(found, x):
    """(mean, m2, count) of the bytes that are gathered."""
    channels = x.shape[1]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    size = 2 * channels * kind.itemsize
    mean, m2 = found[:size].view(kind).view(2, channels).double()
    return mean, m2, found[size:].cpu().view(torch.int64).item()


def statistics_of(x):
    """(2, C), in the type that kernels take."""
    values = by_channel(x)
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    invstd = (values.var(1, correction=0) + EPS).rsqrt()
    return torch.stack([values.mean(1), invstd]).to(kind)


def activate(z, activation):
    if activation == "none":
        return z
    return z.relu() if activation == "relu" else nn.functional.leaky_relu(z, SLOPE)


def gradient_of_z(grad, x, weight, bias, residual, statistics, activation):
    """(that, normalised x) in float64, from statistics as they are given."""
    column = (1, -1, *[1] * (x.dim() - 2))
    mean, invstd = (s.double().view(column) for s in statistics)
    normalised = (x.double() - mean) * invstd
    z = normalised * weight.double().view(column) + bias.double().view(column)
    z = (z + residual.double()).requires_grad_()
    return torch.autograd.grad(activate(z, activation), z, grad.double())[0], normalised


def close(found, expected, bound, what):
    """In the norm: a value whose rounding changes its sign changes a gradient, but seldom."""
    apart = (found.double() - expected).norm()
    assert apart <= bound * expected.norm().clamp_min(1e-3), f"{what}: {apart:.2e}"


def limit(dtype, activation):
    unit = max(torch.finfo(dtype).eps, 0 if dtype == torch.float64 else 1e-7)
    return 20 * unit if activation == "none" else max(20 * unit, 3e-3)


@on_every_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moments(dtype, layout, shape, device):
    x = make(shape, dtype, layout, device, mean=7)
    mean, m2, count = read_moments(ops.batch_norm_moments(x), x)
    values = by_channel(x)
    unit = 1e-14 if dtype == torch.float64 else 1e-6
    assert count == values.shape[1]
    torch.testing.assert_close(mean, values.mean(1), rtol=unit, atol=0)
    expected = values.var(1, correction=0) * count
    torch.testing.assert_close(m2, expected, rtol=10 * unit, atol=10 * unit)


def arguments(dtype, layout, shape, device):
    torch.manual_seed(1)
    x, residual, grad = (make(shape, dtype, layout, device) for _ in range(3))
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = torch.randn(2, shape[1], device=device, dtype=kind)
    return grad, x, weight, bias, residual, statistics_of(x)


def apply(marks):
    def decorate(test):
        for mark in marks:
            test = mark(test)
        return test

    return decorate


@on_every_device
@apply(every_case)
def test_sums(dtype, layout, shape, activation, device):
    given = arguments(dtype, layout, shape, device)
    sums = ops.batch_norm_backward_sums(*given, activation, SLOPE)
    gradient, normalised = gradient_of_z(*given, activation)
    # Beside the sum of magnitudes: the sum itself may be anything near 0.
    for found, terms in zip(sums, (gradient, gradient * normalised), strict=True):
        expected, scale = by_channel(terms).sum(1), by_channel(terms).abs().sum(1)
        apart = ((found.double() - expected).abs() / scale.clamp_min(1e-3)).max()
        assert apart <= limit(dtype, activation)


@on_every_device
@apply(every_case)
def test_gradient_of_the_input_from_means(dtype, layout, shape, activation, device):
    given = arguments(dtype, layout, shape, device)
    x, weight, statistics = given[1], given[2], given[-1]
    means = ops.batch_norm_backward_sums(*given, activation, SLOPE) / (x.numel() / x.shape[1])
    found, of_residual = ops.batch_norm_backward_input(
        *given, means, activation, SLOPE, [True, True]
    )
    assert found.is_contiguous(memory_format=LAYOUTS[layout])
    gradient, normalised = gradient_of_z(*given, activation)
    column = (1, -1, *[1] * (x.dim() - 2))
    scale = (weight.double() * statistics[1].double()).view(column)
    of_grad, of_dot = (m.double().view(column) for m in means)
    expected = scale * (gradient - of_grad - normalised * of_dot)
    bound = limit(dtype, activation)
    apart = (found.double() - expected).norm()
    assert apart <= bound * (scale * gradient).norm().clamp_min(1e-3)
    close(of_residual, gradient, bound, "residual")


@needs_kernels
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("shape", [(4, 64, 14, 14), (16, 36, 64, 64)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_halves_are_the_whole(dtype, layout, shape, activation):
    """On chip the order of sums is another; with channels last, and in large planes, the same."""
    given = arguments(dtype, layout, shape, "cuda")
    grad, x, weight, bias, residual, statistics = given
    sums = ops.batch_norm_backward_sums(*given, activation, SLOPE)
    means = sums / (x.numel() / x.shape[1])
    halves = ops.batch_norm_backward_input(*given, means, activation, SLOPE, [True, True])
    whole = ops.batch_norm_backward(
        grad, x, weight, bias, residual, statistics, True, EPS, activation, SLOPE, [True] * 4
    )
    names = ("input", "residual", "weight", "bias")
    for name, a, b in zip(names, (*halves, sums[1], sums[0]), whole, strict=True):
        close(a, b.double(), limit(dtype, "none"), name)


@needs_kernels
def test_forward_from_gathered_moments_is_that_of_all():
    """Two processes' parts, combined as SyncBatchNorm does, on the device."""
    x = make((8, 32, 20, 20), torch.float32, "contiguous", "cuda", mean=3)
    parts = x.split([3, 5])
    found = [read_moments(ops.batch_norm_moments(part.contiguous()), part) for part in parts]
    count = sum(n for *_, n in found)
    mean = sum(m * n for m, _, n in found) / count
    m2 = sum(q + n * (m - mean).square() for m, q, n in found)
    statistics = torch.stack([mean, (m2 / count + EPS).rsqrt()]).float()
    whole = ops.batch_norm_forward(
        x, None, None, None, None, None, None, True, 0.1, EPS, "none", 0.0, None
    )[1]
    torch.testing.assert_close(statistics, whole, rtol=1e-6, atol=1e-6)
