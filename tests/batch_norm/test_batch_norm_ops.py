"""The operators as torch's dispatcher sees them: opcheck, fakes, torch.compile."""

import pytest
import torch
from batch_norms import LAYOUTS, in_layout, make
from torch.library import opcheck

import memsave_ext as ms
from memsave_ext.batch_norm.activations import ACTIVATIONS

ops = torch.ops.memsave_ext
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHAPES = ((4, 3), (3, 5, 7), (2, 3, 4, 5), (2, 3, 2, 2, 3))


def arguments(shape, dtype, layout="contiguous", requires_grad=True):
    channels = shape[1]
    x, residual = (in_layout(torch.randn(shape).to(dtype), layout) for _ in range(2))
    weight, bias = torch.randn(channels), torch.randn(channels)
    for tensor in (x, residual, weight, bias):
        tensor.requires_grad_(requires_grad)
    return x, weight, bias, residual


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["training", "eval", "reuse"])
@pytest.mark.parametrize("fused", [False, True])
def test_opcheck_forward(shape, dtype, mode, fused):
    x, weight, bias, residual = arguments(shape, dtype)
    channels = shape[1]
    statistics = None
    if mode == "reuse":
        statistics = torch.rand(2, channels, dtype=torch.promote_types(dtype, torch.float32))
    running = (None, None) if mode == "reuse" else (torch.zeros(channels), torch.ones(channels))
    training = mode != "eval"
    activation, with_residual = ("relu", residual) if fused else ("none", None)
    opcheck(
        ops.batch_norm_forward.default,
        (x, weight, bias, with_residual, statistics, *running, training, 0.1, 1e-5,
         activation, 0.0, None),
    )  # fmt: skip


def test_known_statistics_are_not_returned_again():
    """A copy would be a kernel in each recompute."""
    x, weight, bias, _ = arguments((4, 3, 5), torch.float32, requires_grad=False)
    rest = None, None, True, 0.1, 1e-5, "none", 0.0, None
    output, statistics = ops.batch_norm_forward(x, weight, bias, None, None, *rest)
    again, nothing = ops.batch_norm_forward(x, weight, bias, None, statistics, *rest)
    assert torch.equal(again, output)
    assert nothing.shape == (0,) and nothing.dtype == statistics.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_from_running_ones_are_torchs_bits(dtype):
    x = torch.randn(2, 37, 3, dtype=dtype)
    mean, var = torch.randn(37, dtype=dtype), torch.rand(37, dtype=dtype)
    _, statistics = ops.batch_norm_forward(
        x, None, None, None, None, mean, var, False, 0.1, 1e-3, "none", 0.0, None
    )
    assert torch.equal(statistics, torch.stack([mean, (var + 1e-3).rsqrt()]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
# As others are contiguous.
@pytest.mark.each_value
@pytest.mark.without(case=lambda c: c["layout"] == "channels_last" and len(c["shape"]) <= 3)
def test_opcheck_backward(shape, layout, training):
    x, weight, bias, residual = arguments(shape, torch.float32, layout)
    rest = bias, residual, torch.rand(2, shape[1]), True, 1e-5, "leaky_relu", 0.1, [True] * 4
    if not training:
        rest = None, None, rest[2], False, 1e-5, "none", 0.0, [True, False, True, False]
    opcheck(ops.batch_norm_backward.default, (torch.randn(shape), x, weight, *rest))


@pytest.mark.parametrize(
    ("shape", "dtype"), list(zip(SHAPES, (*DTYPES, torch.float32), strict=True)), ids=str
)
def test_opcheck_of_the_parts(shape, dtype):
    x, weight, bias, residual = arguments(shape, dtype, requires_grad=False)
    grad = torch.randn(shape).to(dtype)
    statistics = torch.rand(2, shape[1], dtype=torch.promote_types(dtype, torch.float32))
    before = grad, x, weight, bias, residual, statistics
    opcheck(ops.batch_norm_moments.default, (x,))
    opcheck(ops.batch_norm_backward_sums.default, (*before, "relu", 0.0))
    opcheck(
        ops.batch_norm_backward_input.default,
        (*before, statistics / 3, "relu", 0.0, [True, True]),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_of_the_list(activation):
    """Value, derivative and second derivative: those of the list that the fallback has."""
    x, weight, bias, residual = (t.detach().double() for t in arguments((4, 3, 5), torch.float64))

    def run(activation, *tensors):
        return ops.batch_norm_forward(
            *tensors, None, None, None, True, 0.1, 1e-5, activation, 0.2, None
        )[0]

    z = run("none", x, weight, bias, residual)
    expected = ACTIVATIONS[activation].forward(z, 0.2)
    torch.testing.assert_close(run(activation, x, weight, bias, residual), expected)
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)]
    assert torch.autograd.gradcheck(lambda *t: run(activation, *t), leaves)
    assert torch.autograd.gradgradcheck(lambda *t: run(activation, *t), leaves)


def test_the_parts_make_the_whole():
    x, weight, bias, residual = arguments((4, 3, 5, 5), torch.float64, requires_grad=False)
    grad = torch.randn_like(x)
    _, statistics = ops.batch_norm_forward(
        x, weight, bias, residual, None, None, None, True, 0.1, 1e-5, "relu", 0.0, None
    )
    before = grad, x, weight, bias, residual, statistics
    whole = ops.batch_norm_backward(*before, True, 1e-5, "relu", 0.0, [True] * 4)
    sums = ops.batch_norm_backward_sums(*before, "relu", 0.0)
    parts = ops.batch_norm_backward_input(*before, sums / 100, "relu", 0.0, [True, True])
    close = torch.testing.assert_close
    close(whole[:2], parts)
    close(whole[2].double(), sums[1], rtol=1e-6, atol=1e-6)
    close(whole[3].double(), sums[0], rtol=1e-6, atol=1e-6)
    moments = ops.batch_norm_moments(x)
    assert moments[-8:].view(torch.int64).item() == 100
    mean, m2 = moments[:-8].view(torch.float64).view(2, 3)
    close(mean, x.mean((0, 2, 3)))
    close(m2, x.var((0, 2, 3), unbiased=False) * 100)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_strides(layout):
    x = in_layout(torch.randn(2, 3, 4, 5), layout)
    bn = ms.BatchNorm2d(3)
    meta = ms.BatchNorm2d(3, device="meta")
    assert bn(x).stride() == meta(x.to("meta")).stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    ours, theirs, x = make("2d")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for _ in range(3):
        a, b = (x.detach().clone().requires_grad_() for _ in range(2))
        left, right = compiled(a), theirs(b)
        torch.testing.assert_close(left, right)
        left.sin().sum().backward()
        right.sin().sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
        for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(p, q)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(compiled(x), theirs(x))


@pytest.mark.parametrize("checkpoint", [ms.checkpoint, torch.utils.checkpoint.checkpoint])
def test_compiled_checkpoint_counts_once(checkpoint):
    bn, expected = ms.BatchNorm2d(4), ms.BatchNorm2d(4)
    x = torch.randn(3, 4, 5, 2, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(t):
        return checkpoint(lambda u: bn(u.sin()).sin(), t, use_reentrant=False)

    step(x).sum().backward()
    y = x.detach().clone().requires_grad_()
    expected(y.sin()).sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for p, q in zip(bn.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(p, q)
