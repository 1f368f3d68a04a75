"""The modules beside torch.nn's: outputs, gradients, buffers, state."""

import copy
import inspect
import pickle

import pytest
import torch
from batch_norms import LAYOUTS, OURS, TORCHS, assert_same_buffers, in_layout, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import memsave_ext as ms

OPTIONS = [
    {}, {"momentum": None}, {"momentum": 0.0}, {"momentum": 1.0}, {"track_running_stats": False},
    {"affine": False}, {"affine": False, "track_running_stats": False}, {"eps": 1e-2},
]  # fmt: skip
if "bias" in inspect.signature(torch.nn.BatchNorm2d.__init__).parameters:  # not in torch 2.11
    OPTIONS.append({"bias": False})
close = torch.testing.assert_close


def compare_steps(ours, theirs, x, steps=3, **tolerance):
    """Training steps, then evaluation; gradients and buffers after each."""
    for step in range(steps + 1):
        if step == steps:
            ours.eval()
            theirs.eval()
        a = (x * (step - 1.5)).detach().requires_grad_()
        b = a.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        left, right = ours(a), theirs(b)
        weight = torch.randn_like(right)
        close(left, right, **tolerance)
        assert left.dtype == right.dtype
        (left * weight).sum().backward()
        (right * weight).sum().backward()
        close(a.grad, b.grad, **tolerance)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert p.grad.dtype == q.grad.dtype
            close(p.grad, q.grad, **tolerance)
        for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
            close(p, q)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_torch(kind, options):
    compare_steps(*make(kind, **options))


@pytest.mark.parametrize("kind", ["2d", "3d"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind, layout):
    ours, theirs, x = make(kind)
    x = in_layout(x, layout)
    compare_steps(ours, theirs, x)
    assert ours(x).stride() == theirs(x).stride()


@given(
    n=st.integers(1, 9),
    c=st.integers(1, 40),
    spatial=st.lists(st.integers(1, 19), max_size=3),
    last=st.booleans(),
    activation=st.sampled_from([None, "relu", "leaky_relu"]),
    with_residual=st.booleans(),
)
@settings(max_examples=150)
def test_any_shape(n, c, spatial, last, activation, with_residual):
    shape = (n + (not spatial), c, *spatial)  # at least two values per channel
    if torch.Size(shape).numel() == c:
        shape = (n + 1, c, *spatial)
    kind = {0: "1d", 1: "1d", 2: "2d", 3: "3d"}[len(spatial)]
    generator = torch.Generator().manual_seed(n * c)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) + 3
    x = in_layout(x, "channels_last" if last else "contiguous").requires_grad_()
    residual = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    ours = OURS[kind](c, activation=activation, negative_slope=0.2).double()
    theirs = TORCHS[kind](c).double()
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.uniform_(-1, 1))
        theirs.bias.copy_(ours.bias.uniform_(-1, 1))
    left = ours(x, residual) if with_residual else ours(x)
    right = theirs(x) + (residual if with_residual else 0)
    if activation:
        right = F.relu(right) if activation == "relu" else F.leaky_relu(right, 0.2)
    close(left, right)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    sources = [x, *([residual] if with_residual else [])]
    close(
        torch.autograd.grad(left, [*sources, *ours.parameters()], grad),
        torch.autograd.grad(right, [*sources, *theirs.parameters()], grad),
        rtol=1e-6, atol=1e-9,
    )  # fmt: skip
    close(list(ours.buffers()), list(theirs.buffers()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.float64, torch.float32, torch.bfloat16])
def test_statistics_are_float32_whatever_the_parameters(dtype, parameters):
    bn = ms.BatchNorm2d(4).to(parameters)
    x = torch.randn(3, 4, 5, 2).to(dtype).requires_grad_()
    output, statistics = torch.ops.memsave_ext.batch_norm_forward(
        x, bn.weight, bn.bias, None, None, bn.running_mean, bn.running_var, True, 0.1, 1e-5,
        "none", 0.0, None,
    )  # fmt: skip
    assert output.dtype == dtype
    assert statistics.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    output.sum().backward()
    assert x.grad.dtype == dtype and bn.weight.grad.dtype == parameters
    mean = x.detach().double().mean((0, 2, 3))
    close(bn.running_mean.double(), 0.1 * mean, rtol=2e-2, atol=1e-3)


def test_an_empty_batch_counts_as_torchs():
    ours, theirs, _ = make("2d")
    x = torch.zeros(0, 4, 5, 2, requires_grad=True)
    ours(x).sum().backward()
    theirs(x)
    assert_same_buffers(ours, theirs)
    assert x.grad.shape == x.shape
    assert torch.equal(ours.weight.grad, torch.zeros(4))


@pytest.mark.parametrize("kind", OURS)
def test_state_dict_and_repr(kind):
    ours, theirs, x = make(kind)
    ours(x)
    theirs.load_state_dict(ours.state_dict())
    assert_same_buffers(ours, theirs)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, type(theirs))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_a_state_dict_from_before_num_batches_tracked():
    trained = ms.BatchNorm2d(4)
    trained(torch.randn(2, 4, 3, 3))
    old = trained.state_dict()
    del old["num_batches_tracked"]
    old._metadata[""]["version"] = 1
    ours, theirs = ms.BatchNorm2d(4), torch.nn.BatchNorm2d(4)
    for bn in (ours, theirs):
        bn(torch.randn(2, 4, 3, 3))
        bn.load_state_dict(old)
    assert_same_buffers(ours, theirs)
    assert int(ours.num_batches_tracked) == int(theirs.num_batches_tracked)
    assert torch.equal(ours.running_mean, trained.running_mean)


def test_repr_of_an_activation():
    assert repr(ms.BatchNorm1d(2, activation="leaky_relu", negative_slope=0.2)).endswith(
        "activation='leaky_relu', negative_slope=0.2)"
    )


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copier):
    bn = ms.BatchNorm2d(4, activation="relu")
    bn(torch.randn(2, 4, 3, 3))
    other = copier(bn)
    assert_same_buffers(bn, other)
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(bn(x), other(x))


def test_the_original_name():
    assert ms.CpBatchNorm2d is ms.BatchNorm2d


def test_fused_activation_keeps_no_output():
    """What is saved: the input, the residual and statistics. Not the output."""
    bn = ms.BatchNorm2d(4, activation="relu")
    x, residual = (torch.randn(2, 4, 3, 3, requires_grad=True) for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bn(x, residual)
    assert sum(t.numel() for t in saved) == x.numel() + residual.numel() + 2 * 4 + 4 + 4


def test_torch_func_and_forward_mode_run_torchs_kernel():
    ours, theirs, x = make("2d", track_running_stats=False)
    grads = [torch.func.grad(lambda t, m=m: m(t).sin().sum())(x) for m in (ours, theirs)]
    assert torch.equal(*grads)
    jvps = [torch.func.jvp(m, (x,), (x.cos(),))[1] for m in (ours, theirs)]
    assert torch.equal(*jvps)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.cos())
        close(torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent, jvps[0])


def test_lazy_modules_of_functional_call():
    bn, x = ms.BatchNorm2d(4), torch.randn(2, 4, 3, 3)
    other = {"weight": torch.full((4,), 2.0), "bias": torch.ones(4)}
    close(
        torch.func.functional_call(bn, other, x), F.batch_norm(x, None, None, training=True) * 2 + 1
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(("batch", "channels"), [(2, 1), (1, 3), (2, 3), (3, 2)])
def test_strides_as_torchs(batch, channels, sizes, layout, training):
    """Where a size is 1 the same memory is contiguous in several ways."""
    for shape in ((batch, channels, *sizes), (batch, channels, *sizes, 1)):
        if training and batch * sizes[0] * sizes[1] == 1:
            continue
        x = in_layout(torch.randn(shape), layout).requires_grad_()
        kind = f"{len(shape) - 2}d"
        found = []
        for of in (OURS, TORCHS):
            y = of[kind](channels).train(training)(x)
            (grad,) = torch.autograd.grad(y.sum(), x)
            found.append((y.stride(), grad.stride()))
        assert found[0] == found[1]
