"""memory.predict() of what kernels on the CPU make for themselves, and of gradients that fakes do
otherwise."""

import contextlib
import functools
import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from sampling import share
from steps import assert_near, without_optimizer
from torch import nn

import memsave_ext as ms

pytestmark = pytest.mark.skipif(
    not ms._native.available, reason="fakes are the same, and a track in pure Python sees less"
)
# Input channels and size, and the convolution. A convolution of images needs no gradient of them.
CONVOLUTIONS = {
    "3 x 3": (16, 16, lambda: nn.Conv2d(16, 32, 3, padding=1)),
    "to few channels": (48, 16, lambda: nn.Conv2d(48, 12, 3, padding=1)),
    "strided": (64, 16, lambda: nn.Conv2d(64, 64, 3, stride=2, padding=1)),
    "1 x 1, strided": (64, 16, lambda: nn.Conv2d(64, 64, 1, stride=2)),
    "dilated on tiny images": (64, 4, lambda: nn.Conv2d(64, 64, 3, padding=2, dilation=2)),
    "few channels": (3, 32, lambda: nn.Conv2d(3, 24, 3, stride=2, padding=1)),
    "patches": (3, 64, lambda: nn.Conv2d(3, 64, 16, stride=16)),
    "depthwise": (48, 16, lambda: nn.Conv2d(48, 48, 3, padding=1, groups=48)),
    "wide depthwise": (48, 16, lambda: nn.Conv2d(48, 48, 7, padding=3, groups=48)),
    "transposed": (32, 16, lambda: nn.ConvTranspose2d(32, 48, 3)),
    "transposed, strided": (64, 16, lambda: nn.ConvTranspose2d(64, 32, 2, stride=2)),
    "transposed, to few channels": (20, 32, lambda: nn.ConvTranspose2d(20, 3, 3)),
    "transposed, in groups": (32, 16, lambda: nn.ConvTranspose2d(32, 32, 4, 2, 1, groups=4)),
    "transposed, 1 x 1": (32, 16, lambda: nn.ConvTranspose2d(32, 48, 1)),
    "depthwise on tiny images": (48, 2, lambda: nn.Conv2d(48, 48, 7, padding=3, groups=48)),
}


def of_images(make, dtype, channels, sizes, memory_format=torch.contiguous_format, batch=4):
    def made():
        model = make().to(dtype)
        x = torch.randn(batch, channels, *sizes, dtype=dtype)
        x = x.contiguous(memory_format=memory_format)
        x.requires_grad_(channels > 3)

        def loss():
            x.grad = None
            return model(x).square().mean()

        return model, loss

    return without_optimizer(made)


@pytest.mark.each_value
@pytest.mark.parametrize("batch", [4, 19 * torch.get_num_threads()])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", share(CONVOLUTIONS, 2))
def test_convolutions(case, memory_format, batch):
    """The memory of many images is known from that of few."""
    channels, size, make = CONVOLUTIONS[case]
    build = of_images(make, torch.float32, channels, (size, size), memory_format, batch)
    assert_near(build, 0)


def test_an_empty_batch():
    assert_near(of_images(lambda: nn.Conv2d(3, 8, 3), torch.float32, 3, (8, 8), batch=0), 0)


@pytest.mark.parametrize(
    ("make", "sizes"), [(nn.ConvTranspose2d, (8, 8)), (nn.ConvTranspose3d, (8, 8, 8))]
)
def test_transposed_in_float64(make, sizes):
    """Which oneDNN has no kernels for."""
    assert_near(of_images(lambda: make(16, 24, 2, 2), torch.float64, 16, sizes), 0)


LAYERS = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "several layers": {"num_layers": 3, "dropout": 0.1},
    "both": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without biases": {"bias": False},
    "in eval": {},
    "projected": {"proj_size": 32},  # by other kernels
}
FEW = 12  # steps, where each is operators of its own


def recurrent(kind, name, dtype, steps=60, batch=16, width=100, hidden=128):
    def make():
        layer = getattr(nn, kind)(width, hidden, **LAYERS[name]).to(dtype)
        layer.train(name != "in eval")
        x = torch.randn(steps, batch, width, dtype=dtype)

        def loss():
            output, state = layer(x)
            return output.float().square().mean() + state[0].float().sum()

        return layer, loss

    return without_optimizer(make)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", share(LAYERS, 2))
def test_lstm(name, dtype):
    by_operators = dtype is torch.float64 or name == "projected"
    assert_near(recurrent("LSTM", name, dtype, FEW if by_operators else 60), 0.02)


@pytest.mark.parametrize("sizes", [(1, 1, 16, 16), (300, 2, 256, 64), (5, 64, 90, 256)])
def test_lstm_of_other_sizes(sizes):
    build = recurrent("LSTM", "plain", torch.float32, *sizes)
    # Of tiny ones the pages, to which oneDNN rounds up what kernels take, are much.
    assert_near(build, 0.02 if min(sizes) > 1 else 0.2)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_gru_and_rnn(kind):
    assert_near(recurrent(kind, "several layers", torch.float32, FEW), 0.001)


class Attention(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.scale, self.transposed = nn.Parameter(torch.ones(1)), transposed

    def forward(self, q, k):
        out = F.scaled_dot_product_attention(q * self.scale, k, k)
        return out.transpose(1, 2).flatten(2) if self.transposed else out


@pytest.mark.each_value
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(17, 17), (128, 100), (200, 200), (800, 600)])
def test_attention(queries, keys, transposed):
    def make():
        model = Attention(transposed)
        q, k = torch.randn(2, 4, queries, 16), torch.randn(2, 4, keys, 16)
        return model, lambda: model(q, k).square().mean()

    # Of several threads not all hold their small buffers at the same time.
    assert_near(without_optimizer(make), 0.002)


BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("layout", ["contiguous", "last", "sliced", "volumes", "rows", "frozen"])
def test_batch_norms(layout, dtype):
    shapes = {"rows": (256, 32), "volumes": (8, 32, 4, 4, 4), "last": (8, 32, 8, 8)}
    shape = shapes.get(layout, (8, 32, 64))

    def make():
        model = nn.Module()
        x = torch.randn(shape, dtype=dtype)
        if layout == "last":
            x = x.contiguous(memory_format=torch.channels_last)
        elif layout == "sliced":
            x = torch.cat([x, x], 1)
        model.x = nn.Parameter(x)
        model.norm = nn.BatchNorm1d(32)
        weight, bias = model.norm.weight, model.norm.bias

        def loss():
            x = model.x.detach() if layout == "frozen" else model.x * 1
            x = x.detach()[:, :32].requires_grad_(layout != "frozen")
            F.batch_norm(x, None, None, weight, bias, True).backward(x.detach())
            return model.x.sum()

        return model, loss

    assert_near(without_optimizer(make), 0.01)


CONVERSIONS = {
    "mixed dtypes": lambda x, y: x.to(BF16) * y,
    "compared dtypes": lambda x, y: x * (x.to(BF16) > y),
    "in place": lambda x, y: (x.to(BF16) * 1).add_(y),
    "a chosen dtype": lambda x, y: torch.where(y > 0.5, x.to(BF16), y),
    "complex and real": lambda x, y: (torch.complex(x, y) * y).abs(),
    "narrow mean": lambda x, y: x.to(BF16).mean(),
    "sums around others": lambda x, y: x.to(BF16).view(8, 8, 80).sum((0, 2)),
    "wide sum": lambda x, y: x.to(BF16).sum(dtype=torch.float32),
    "counted": lambda x, y: x / (y > 0.5).sum(),
    "mse": F.mse_loss,
    "narrow mse": lambda x, y: F.mse_loss(x.to(BF16), y.to(BF16)),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft margin": F.soft_margin_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "with logits": F.binary_cross_entropy_with_logits,
    "group norm": lambda x, y: F.group_norm(x.to(BF16), 4),
    "kthvalue": lambda x, y: x.kthvalue(3).values,
    "median": lambda x, y: x.median(),
    "max": lambda x, y: x.max(),
    "min": lambda x, y: x.min(),
    "amax": lambda x, y: x.amax(1),
    "prod": lambda x, y: x.prod(),
    "prod of rows": lambda x, y: x.prod(1),
    "cumprod": lambda x, y: x.cumprod(1),
    "vander": lambda x, y: torch.linalg.vander(x[:4]),
    "masked prod": lambda x, y: torch.masked.prod(x, 1, mask=y > 0.5),
    "narrow gather": lambda x, y: x.to(BF16).gather(1, (y * 10).long()),
    "powers of rows": lambda x, y: x[:, :1] ** x[0],
    "masked scatter": lambda x, y: y.masked_scatter(y >= 0, x),
}


@pytest.mark.parametrize("name", share(CONVERSIONS, 3))
def test_conversions(name):
    def make():
        model = nn.Module()
        model.x, model.y = nn.Parameter(torch.rand(64, 80) + 0.5), nn.Buffer(torch.rand(64, 80))
        return model, lambda: CONVERSIONS[name](model.x * 1, model.y).sum()

    assert_near(without_optimizer(make), 0.003)


class Bilinear(nn.Module):
    def __init__(self, a, b, out):
        super().__init__()
        self.first, self.layer = nn.Linear(b, a), nn.Bilinear(a, b, out)

    def forward(self, x):
        return self.layer(self.first(x), x)


class TransposedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x):
        return self.norm(self.layer(x).transpose(1, 2))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv3d(16, 16, 3, padding=1), (1, 16, 24, 24, 24)),
        (lambda: nn.Conv3d(16, 16, 3, padding=1), (2, 16, 24, 24, 24)),
        (lambda: nn.Conv3d(8, 8, 3, padding=2, dilation=2), (1, 8, 12, 12, 12)),
        (lambda: nn.Conv3d(8, 8, 3, padding=2, dilation=2).double(), (4, 8, 12, 12, 12)),
        (lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2).double(), (4, 8, 32, 32)),
        (lambda: Bilinear(32, 32, 8), (8192, 32)),
        (lambda: Bilinear(16, 48, 24), (2048, 48)),
        (TransposedNorm, (32, 128, 64)),
    ],
    ids=["volume", "volumes", "dilated", "dilated64", "dilated images", "products", "more", "norm"],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_what_was_too_low(make, shape, threads):
    def made():
        torch.manual_seed(0)
        model = make()
        x = torch.randn(shape, dtype=next(model.parameters()).dtype)
        return model, lambda: model(x).square().mean()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_near(without_optimizer(made), 0.02)
    finally:
        torch.set_num_threads(before)


# Operators of libraries, of which a fake kernel tells the results alone.


@functools.cache  # an operator lives as long as the process
def library_operators():
    library = torch.library.Library("memsave_tests", "FRAGMENT")

    def product(x, codes, scales, *, bias=None):
        weight = codes.float() * scales  # as bitsandbytes' products of weights in four bits
        return torch.nn.functional.linear(x, weight, bias)

    def ends(x):
        os.kill(os.getpid(), signal.SIGKILL)

    def stands_still(x):
        threading.Event().wait()

    def raises(x):
        raise ValueError("no zeros")

    library.define("product(Tensor x, Tensor codes, Tensor scales, *, Tensor? bias=None) -> Tensor")
    library.impl("product", product, "CPU")
    for kernel in (ends, stands_still, raises):
        library.define(f"{kernel.__name__}(Tensor x) -> Tensor")
        library.impl(kernel.__name__, kernel, "CPU")
        name = f"memsave_tests::{kernel.__name__}"
        torch.library.register_fake(name, torch.empty_like, lib=library)
    library.define("elsewhere(Tensor x) -> Tensor")
    torch.library.register_fake("memsave_tests::elsewhere", torch.empty_like, lib=library)
    torch.library.register_fake(
        "memsave_tests::product",
        lambda x, codes, scales, bias=None: x.new_empty(*x.shape[:-1], len(codes)),
        lib=library,
    )
    return library, torch.ops.memsave_tests


def test_what_operators_of_libraries_make_inside():
    _, operators = library_operators()
    codes = torch.randint(9, (512, 256), dtype=torch.uint8)
    scales, bias = torch.rand(512, 1), torch.rand(512)
    weight = nn.Parameter(torch.randn(16, 256))

    def build():
        def step():
            with torch.no_grad():
                y = operators.product(weight, codes, scales, bias=bias)
            (weight.sum() + y.sum()).backward()
            weight.grad = None

        model = nn.Module()
        model.weight = weight
        return model, None, step

    predicted, t = assert_near(build, 1e-3)
    assert t.peak > 512 * 256 * 4 and predicted.at_peak["other"] > 512 * 256 * 4


@pytest.mark.parametrize("name", ["ends", "stands_still", "raises", "elsewhere"])
def test_operators_of_libraries_that_cannot_be_measured(name):
    _, operators = library_operators()
    x = torch.randn(64, 64, requires_grad=True)

    def build():
        def step():
            with torch.no_grad():
                y = getattr(operators, name)(x)
            (x * y).sum().backward()
            x.grad = None

        return nn.Module(), None, step

    expected = contextlib.nullcontext()
    if name != "elsewhere":  # it has no kernel for the CPU
        expected = pytest.warns(UserWarning, match=f"temporary memory of memsave_tests.{name}")
    with expected:
        assert ms.memory.predict(build).peak == pytest.approx(2 * x.nbytes, rel=0.01)


class Parts(nn.Module):
    def __init__(self, run, *parts):
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(parts)

    def forward(self, x):
        return self.run(x, *self.parts)


def wide():
    return nn.Linear(32, 96)


def summed(between, *parts):
    """Backward has a gradient that is one number in many places."""
    return lambda: Parts(lambda x, a, *rest: between(a(x), *rest).sum(1), wide(), *parts)


def turned(between, *parts):
    return lambda: Parts(lambda x, a, *rest: between(a(x).transpose(1, 2), *rest), wide(), *parts)


OUT_OF_ORDER = {
    "gelu, summed": summed(F.gelu),
    "gelu, turned after it": lambda: Parts(lambda x, a: F.gelu(a(x)).transpose(1, 2), wide()),
    "layer norm, summed": summed(lambda y, norm: norm(y), nn.LayerNorm(96)),
    "layer norm, turned": turned(lambda y, norm: norm(y), nn.LayerNorm(40)),
    "softmax, summed": summed(lambda y: y.softmax(-1)),
    "softmax, turned": turned(lambda y: y.softmax(1)),
    "log softmax, summed": summed(lambda y: y.log_softmax(-1)),
    "log sigmoid, turned": turned(F.logsigmoid),
    "largest, summed": summed(lambda y: F.max_pool1d(y, 2)),
    "largest, turned": turned(lambda y: F.max_pool1d(y, 2)),
    "means, summed": summed(lambda y: F.avg_pool1d(y, 2)),
    "means, turned": turned(lambda y: F.avg_pool1d(y, 2)),
    "adaptive means, turned": turned(lambda y: F.adaptive_avg_pool1d(y, 8)),
    "linear, summed": summed(lambda y: y),
    "products, turned": turned(lambda y: torch.bmm(y, y.transpose(1, 2))),
    "logsumexp": lambda: Parts(lambda x, a: a(x).logsumexp(-1), wide()),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", OUT_OF_ORDER)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_kernels_copy_to_have_it_in_order(name, reduction):
    def make():
        torch.manual_seed(0)
        model, x = OUT_OF_ORDER[name](), torch.randn(16, 40, 32)
        return model, lambda: getattr(model(x), reduction)()

    assert_near(without_optimizer(make), 1e-4)


@pytest.mark.parametrize(
    "indices", [torch.arange(400).view(20, 20), torch.arange(20).expand(20, 20)]
)
def test_an_embedding_whose_result_is_summed(indices):
    def make():
        model = nn.Embedding(400, 64)
        return model, lambda: model(indices).sum()

    assert_near(without_optimizer(make), 1e-4)
