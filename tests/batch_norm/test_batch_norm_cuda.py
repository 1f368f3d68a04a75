"""Batch normalisation's CUDA kernels: against float64, bitwise repeats, streams, graphs, sizes."""

import pytest
import torch
from on_device import capture
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and _native.module and _native.module.with_cuda),
    reason="needs a CUDA device and a native build with CUDA",
)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "rows_3d": torch.channels_last_3d,
}
# Vectors of 8, 4 and 1 values; channels on chip and not; groups of channels that are not full.
SHAPES = [
    (2, 3, 5, 7),
    (1, 1, 3, 3),
    (8, 3, 32, 32),
    (4, 64, 14, 14),
    (64, 130, 7, 7),
    (64, 128, 14, 14),
    (3, 264, 6, 10),
    (16, 36, 64, 64),
    (5, 1, 129, 257),
    (300, 2048, 1, 2),
]
LEAKY = 0.1


def make(shape, dtype=torch.float32, layout="contiguous", mean=0.5, scale=2.0):
    if layout == "rows_3d":
        shape = (*shape[:2], 2, *shape[2:])
    x = torch.randn(shape, device="cuda", dtype=torch.float64) * scale + mean
    return x.to(dtype).contiguous(memory_format=LAYOUTS[layout])


def vectors(channels, dtype=torch.float32):
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return [torch.randn(channels, device="cuda", dtype=kind) for _ in range(2)]


def forward(
    x, weight=None, bias=None, residual=None, statistics=None, running=(None, None),
    training=True, activation="none",
):  # fmt: skip
    return torch.ops.memsave_ext.batch_norm_forward(
        x,
        weight,
        bias,
        residual,
        statistics,
        *running,
        training,
        0.1,
        1e-5,
        activation,
        LEAKY,
        None,
    )


def activate(z, activation):
    if activation == "none":
        return z
    return z.relu() if activation == "relu" else nn.functional.leaky_relu(z, LEAKY)


def reference(x, weight, bias, residual, activation, grad):
    """Output and gradients in float64, from the given values.

    torch's own batch norm adds up value after value on a CPU: a mean of 65000 values is then so far
    off that the gradient of the weight is less exact than the kernels'. Its sums are not.
    """
    leaves = [t.detach().double().requires_grad_() for t in (x, residual, weight, bias)]
    x, residual, weight, bias = leaves
    dims = [dim for dim in range(x.dim()) if dim != 1]
    centered = x - x.mean(dims, keepdim=True)
    normalized = centered / (centered.square().mean(dims, keepdim=True) + 1e-5).sqrt()
    of_channels = [-1] + [1] * (x.dim() - 2)
    z = normalized * weight.view(of_channels) + bias.view(of_channels) + residual
    output = activate(z, activation)
    return output, torch.autograd.grad(output, leaves, grad.double())


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-6)).item()


# ---- against float64 ----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradients(dtype, layout, shape, activation):
    x, residual, grad = (make(shape, dtype, layout) for _ in range(3))
    weight, bias = vectors(shape[1], dtype)
    expected, expected_gradients = reference(x, weight, bias, residual, activation, grad)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    output, _ = forward(x, weight, bias, residual, activation=activation)
    assert output.is_contiguous(memory_format=LAYOUTS[layout])
    gradients = torch.autograd.grad(output, leaves, grad)
    # A value whose rounding changes its sign changes a gradient: few, and so small in the norm.
    unit = torch.finfo(dtype).eps
    # A mean that is half a unit off counts in each of the thousands of values that the gradient of
    # the weight adds up. What is computed in float anywhere is at 1e-8.
    if dtype == torch.float64:
        unit *= 16
    assert error(output, expected) < 10 * unit
    # A z whose rounding changes its sign changes a gradient: seldom, and so little in the norm.
    limit = 20 * unit if activation == "none" else max(20 * unit, 3e-3)
    names = ("x", "residual", "weight", "bias")
    for name, a, b in zip(names, gradients, expected_gradients, strict=True):
        # Not beside itself, which is small where thousands of values of both signs cancel.
        scale = grad.double().norm().clamp_min(b.norm())
        assert (a.double() - b).norm() <= limit * scale, name


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_on_the_cpu(dtype, layout):
    x = make((6, 20, 9, 8), dtype, layout)
    weight, bias = vectors(20, dtype)
    output, statistics = forward(x, weight, bias, activation="relu")
    on_cpu, cpu_statistics = forward(x.cpu(), weight.cpu(), bias.cpu(), activation="relu")
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(output.cpu(), on_cpu, rtol=4 * unit, atol=4 * unit)
    torch.testing.assert_close(statistics.cpu(), cpu_statistics, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(300, 40), (1, 40, 3), (8, 33, 17)], ids=str)
def test_tensors_of_two_and_three_dimensions(shape):
    x = torch.randn(shape, device="cuda")
    expected = nn.functional.batch_norm(x.double(), None, None, training=True)
    assert error(forward(x)[0], expected) < 1e-6


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_addresses_that_are_not_aligned(offset, layout):
    aligned = make((4, 16, 8, 8), torch.bfloat16, layout)
    storage = torch.empty(aligned.numel() + offset, device="cuda", dtype=torch.bfloat16)
    x = storage[offset:].as_strided(aligned.shape, aligned.stride(), offset)
    x.copy_(aligned)
    expected = nn.functional.batch_norm(x.double(), None, None, training=True)
    assert error(forward(x)[0], expected) < 4e-3


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 64, 32, 32), (32, 200, 14, 14)], ids=str)
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_large_means(mean, shape, layout):
    x = make(shape, layout=layout, mean=mean, scale=1.0)
    expected = nn.functional.batch_norm(x.double(), None, None, training=True)
    assert (forward(x)[0] - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 64, 32, 32), (32, 200, 14, 14)], ids=str)
def test_a_first_value_far_from_the_others(shape, layout):
    x = make(shape, layout=layout)
    x[0, :, 0, 0] = 1e5
    statistics = forward(x)[1].double()
    values = x.double().transpose(0, 1).flatten(1)
    expected = (values.var(1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(statistics[1], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(statistics[0], values.mean(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_spoils_its_channel_only(value, layout):
    x = make((8, 64, 32, 32), layout=layout)
    clean = forward(x)
    for place in (0, 17):
        x[3 if place else 0, 5, place, place] = value
        output, statistics = forward(x)
        assert statistics[:, 5].isnan().all() and output[:, 5].isnan().all()
        others = [c for c in range(64) if c != 5]
        assert torch.equal(output[:, others], clean[0][:, others])
        assert torch.equal(statistics[:, others], clean[1][:, others])


# ---- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reuse_and_repeats_write_the_same_bits(dtype, layout, shape):
    x, residual = make(shape, dtype, layout), make(shape, dtype, layout)
    weight, bias = vectors(shape[1], dtype)
    arguments = (x, weight, bias, residual)
    output, statistics = forward(*arguments, activation="leaky_relu")
    again, _ = forward(*arguments, statistics, activation="leaky_relu")
    assert torch.equal(output, again)
    for _ in range(3):
        repeated = forward(*arguments, activation="leaky_relu")
        assert torch.equal(output, repeated[0]) and torch.equal(statistics, repeated[1])
    leaves = [t.requires_grad_() for t in arguments]
    gradients = [
        torch.autograd.grad(forward(*arguments)[0].square().sum(), leaves) for _ in range(3)
    ]
    for repeated in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], repeated, strict=True))


def test_running_statistics():
    bn, theirs = ms.BatchNorm2d(24).cuda(), nn.BatchNorm2d(24).cuda()
    for _ in range(3):
        x = make((8, 24, 40, 40), mean=3)
        bn(x)
        theirs(x)
    torch.testing.assert_close(bn.running_mean, theirs.running_mean)
    torch.testing.assert_close(bn.running_var, theirs.running_var)
    assert bn.num_batches_tracked == 3
    bn.eval()
    theirs.eval()
    torch.testing.assert_close(bn(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_evaluation_has_gradients():
    bn = ms.BatchNorm2d(24, activation="relu").cuda().eval()
    theirs = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU()).cuda().eval()
    x = make((8, 24, 9, 9)).requires_grad_()
    found, expected = (
        torch.autograd.grad(run(x).square().sum(), [x, *run.parameters()]) for run in (bn, theirs)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_checkpoint_counts_once(layout):
    bn = ms.BatchNorm2d(16, activation="relu").cuda()
    plain = ms.BatchNorm2d(16, activation="relu").cuda()
    x, residual = (make((8, 16, 20, 20), layout=layout).requires_grad_() for _ in range(2))
    expected = torch.autograd.grad(plain(x, residual).sin().sum(), [x, residual])
    got = torch.autograd.grad(
        ms.checkpoint(lambda a, b: bn(a, b).sin(), x, residual).sum(), [x, residual]
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert bn.num_batches_tracked == 1
    assert torch.equal(bn.running_mean, plain.running_mean)
    assert torch.equal(bn.running_var, plain.running_var)


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 5, 4, 4), (3, 5, 0, 4), (3, 0, 4, 4)], ids=str)
def test_empty(shape):
    x = torch.empty(shape, device="cuda", requires_grad=True)
    output, _ = forward(x)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (3, 4, 1, 5)], ids=str)
def test_moments(shape):
    x = make(shape, mean=7)
    found = torch.ops.memsave_ext.batch_norm_moments(x)
    channels = shape[1]
    mean, m2 = found[: 8 * channels].view(torch.float32).view(2, channels)
    values = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean.double(), values.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        m2.double(), values.var(1, correction=0) * values.shape[1], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_more_than_2_to_the_31_values(layout):
    n, c, side = 129, 64, 512
    need = 2 * n * c * side * side * 3  # input, output, and what the check makes
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need >> 30} GiB of GPU memory")
    x = torch.empty(n, c, side, side, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=LAYOUTS[layout]).normal_()
    x[-1] += 4
    output, statistics = forward(x)
    for channel in (0, c - 1):
        values = x[:, channel].float()
        mean, var = values.double().mean(), values.double().var(correction=0)
        torch.testing.assert_close(statistics[0, channel].double(), mean, rtol=1e-4, atol=1e-5)
        for image in (0, n - 1):
            expected = (values[image].double() - mean) / (var + 1e-5).sqrt()
            assert error(output[image, channel], expected) < 4e-3
    del output
    grad = x  # in place of one more tensor
    got = torch.ops.memsave_ext.batch_norm_backward(
        grad, x, None, None, None, statistics, True, 1e-5, "none", 0.0, [True, False, True, True]
    )
    # The gradient is what the normalisation removes: nothing is left.
    assert got[0][-1].float().abs().max() < 0.05
    count = n * side * side
    expected = statistics[0] * count
    torch.testing.assert_close(got[3], expected, rtol=1e-3, atol=1e-4 * count)


# ---- streams ------------------------------------------------------------------------------------


def step(bn, x):
    output = bn(x)
    return (output, *torch.autograd.grad(output.square().sum(), [x, *bn.parameters()]))


def assert_same(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_streams_at_once():
    bn = ms.BatchNorm2d(64, activation="relu", track_running_stats=False).cuda()
    inputs = [make((16, 64, 56, 56)).requires_grad_() for _ in range(4)]
    expected = [step(bn, x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        got = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(bn, x))
        torch.cuda.synchronize()
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(16, 64, 56, 56), (64, 128, 14, 14)], ids=str)
def test_graph_capture(shape, layout):
    bn = ms.BatchNorm2d(shape[1], activation="relu", track_running_stats=False).cuda()
    x = make(shape, layout=layout).requires_grad_()
    replay, captured = capture(lambda: step(bn, x))
    with torch.no_grad():
        x.copy_(make(shape, layout=layout, mean=-1))
    replay()
    torch.cuda.synchronize()
    assert_same(captured, step(bn, x))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_no_synchronisation(layout):
    bn = ms.BatchNorm2d(32, activation="leaky_relu").cuda()
    x = make((4, 32, 30, 30), layout=layout).requires_grad_()
    step(bn, x)  # lazy initialisation
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(bn, x)
        bn.eval()
        step(bn, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
