"""What is read and written is what tensors stand for, and states are what their modes say."""

import copy

import pytest
import torch
from helpers import Wrapper
from torch import nn

import memsave_ext as ms

BF16, FP64 = torch.bfloat16, torch.float64
both_ways = pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])


def conjugate(value):
    """With the conjugate bit."""
    return value.conj().resolve_conj().conj()


def negative(value):
    """With the negative bit, of the same value."""
    return torch._neg_view(value.clone().neg())


def lazy(value):
    made = negative(value) if not value.is_complex() else conjugate(value)
    assert (made.is_conj() or made.is_neg()) and torch.equal(made, value)
    return made


KINDS = {
    "float": torch.float32,
    "double": FP64,
    "complex": torch.complex64,
    "complex double": torch.complex128,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.5}, {"clip_global_norm": 0.5}], ids=str
)
def test_lazy_gradients_and_parameters(kind, options):
    torch.manual_seed(3)
    dtype = KINDS[kind]
    value, grads = torch.randn(6, 5, dtype=dtype), torch.randn(4, 6, 5, dtype=dtype)
    plain = nn.Parameter(value.clone())
    views = [
        nn.Parameter(value.clone()),
        nn.Parameter(lazy(value)),
        nn.Parameter(lazy(value.t()).t()),
    ]
    expected = ms.Adam([plain], lr=0.1, **options)
    optimizers = [ms.Adam([view], lr=0.1, **options) for view in views]
    for grad in grads:
        plain.grad = grad.clone()
        expected.step()
        for view, optimizer in zip(views, optimizers, strict=True):
            view.grad = lazy(grad)
            assert view.grad.is_conj() or view.grad.is_neg()
            optimizer.step()
            assert torch.equal(view.detach(), plain.detach())
            for name, state in optimizer.state[view].items():
                assert torch.equal(state, expected.state[plain][name]), name


@both_ways
def test_a_gradient_of_autograds_with_the_negative_bit(in_backward):
    """Of the conjugate's imaginary part."""
    torch.manual_seed(4)
    ours, theirs = ([nn.Parameter(torch.randn(7)) for _ in range(2)] for _ in range(2))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            q.copy_(p)
    optimizers = [ms.Adam(ours, lr=0.1, in_backward=in_backward), torch.optim.Adam(theirs, lr=0.1)]
    for _ in range(3):
        for (p, q), optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (torch.complex(p, q).conj() * (1 + 2j)).real.sum().backward()
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_lazy_gradients_that_are_measured(dtype):
    torch.manual_seed(5)
    value, grads = torch.randn(20, dtype=dtype), torch.randn(3, 20, dtype=dtype)
    params = [nn.Parameter(value.clone()) for _ in range(2)]
    optimizers = [ms.Adam([p], lr=0.1, in_backward=True, small_bytes=0) for p in params]

    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx, param, grad):
            ctx.grad = grad
            return param.real.sum()

        @staticmethod
        def backward(ctx, _):
            return ctx.grad, None

    for grad in grads:
        for param, optimizer, change in zip(params, optimizers, (torch.clone, lazy), strict=True):
            with optimizer.norm_pass(0.5):
                Give.apply(param, change(grad)).backward()
            Give.apply(param, change(grad)).backward()
            optimizer.step()
    assert torch.equal(params[0], params[1])


def test_zeros_without_memory():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    params[0].grad, params[1].grad = torch._efficientzerotensor(3), torch.zeros(3)
    for param in params:
        ms.Adam([param], lr=0.1, weight_decay=0.1, max_grad_norm=1.0).step()
    assert torch.equal(*params) and (params[0] < 1).all()


def test_sparse_gradients_are_refused():
    param = nn.Parameter(torch.ones(3, 3))
    for options in ({}, {"max_grad_norm": 1.0}, {"clip_global_norm": 1.0}):
        optimizer = ms.Adam([param], **options)
        param.grad = torch.eye(3).to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            optimizer.step()
        assert torch.equal(param, torch.ones(3, 3))


# low parts belong to the weights that they were taken from


def trained(bf16, in_backward=True, **options):
    torch.manual_seed(8)
    param = nn.Parameter(torch.randn(64).to(BF16))
    optimizer = ms.AdamW([param], lr=1e-3, bf16=bf16, in_backward=in_backward, **options)
    steps(param, optimizer, 5)
    assert optimizer.state[param]["param_rest"].any()
    return param, optimizer


def steps(param, optimizer, count):
    for _ in range(count):
        (param.float() * torch.linspace(1, 2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


RESTS = pytest.mark.parametrize("bf16", ["split", "split8"])


@RESTS
@both_ways
@pytest.mark.parametrize("new", [0.0, 1e-6, 3.0])
def test_the_rest_of_overwritten_weights_is_dropped(bf16, in_backward, new):
    param, optimizer = trained(bf16, in_backward)
    with torch.no_grad():
        param.fill_(new)
    steps(param, optimizer, 1)
    other, clean = trained(bf16, in_backward)
    with torch.no_grad():
        other.fill_(new)
    clean.state[other]["param_rest"].zero_()
    steps(other, clean, 1)
    assert torch.equal(param, other)
    assert torch.equal(optimizer.fp32_parameters()[0], clean.fp32_parameters()[0])


def restored(copied):
    """The parameter and optimizer of a checkpoint of these."""
    param, optimizer = copied
    other, loaded = trained(optimizer.param_groups[0]["bf16"])
    with torch.no_grad():
        other.copy_(param)
    loaded.load_state_dict(optimizer.state_dict())
    return other, loaded


@RESTS
@both_ways
@pytest.mark.parametrize("read", [tuple, restored, copy.deepcopy], ids=lambda f: f.__name__)
def test_the_rest_of_overwritten_weights_is_not_read_and_not_saved(bf16, in_backward, read):
    param, optimizer = trained(bf16, in_backward)
    assert optimizer.state[param]["param_rest"].any()
    with torch.no_grad():
        param.fill_(1e-6)
    other, reader = read((param, optimizer))
    assert torch.equal(reader.fp32_parameters()[0], param.detach().float())
    assert not reader.state[other]["param_rest"].any()
    steps(other, reader, 1)
    assert reader.state[other]["param_rest"].any()
    assert not torch.equal(reader.fp32_parameters()[0], other.detach().float())


@RESTS
def test_weights_and_rests_that_are_restored_together_are_kept(bf16):
    for order in ("weights first", "states first", "states in place"):
        param, optimizer = trained(bf16)
        weights, states = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
        exact = optimizer.fp32_parameters()[0]
        steps(param, optimizer, 3)
        after = param.detach().clone(), optimizer.fp32_parameters()[0]

        def load_weights(param=param, weights=weights):
            with torch.no_grad():
                param.copy_(weights)

        if order == "weights first":
            load_weights()
        if order == "states in place":
            load_weights()
            for name, value in states["state"][0].items():
                optimizer.state[param][name].copy_(value)
        else:
            optimizer.load_state_dict(states)
        if order == "states first":
            load_weights()
        assert torch.equal(optimizer.fp32_parameters()[0], exact)
        steps(param, optimizer, 3)
        assert torch.equal(param, after[0])
        assert torch.equal(optimizer.fp32_parameters()[0], after[1])


@RESTS
def test_a_state_dict_of_the_same_tensors_is_kept(bf16):
    param, optimizer = trained(bf16)
    exact = optimizer.fp32_parameters()[0]
    states = optimizer.state_dict()
    with torch.no_grad():
        param.copy_(param.clone())
    optimizer.load_state_dict(states)
    low_part = optimizer.state[param]["param_rest"]
    steps(param, optimizer, 1)
    other, alike = trained(bf16)
    assert torch.equal(alike.fp32_parameters()[0], exact)
    steps(other, alike, 1)
    assert torch.equal(low_part, alike.state[other]["param_rest"])


@RESTS
def test_steps_of_its_own_do_not_drop_the_low_part(bf16):
    """Of a parameter that is copied, and written back."""
    torch.manual_seed(9)
    param = nn.Parameter(torch.randn(8, 16).to(BF16)[:, ::2])
    exact = nn.Parameter(param.detach().float())
    optimizer = ms.AdamW([param], lr=1e-4, bf16=bf16, in_backward=True)
    expected = torch.optim.AdamW([exact], lr=1e-4)
    for _ in range(20):
        param.float().sum().backward()
        optimizer.step()
        exact.grad = torch.ones_like(exact)
        expected.step()
    # split8 is rounded at random in each of 20 steps, by less than 2^-15 of what there is.
    near = {"split": 3e-5, "split8": 3e-4}[bf16]
    torch.testing.assert_close(optimizer.fp32_parameters()[0], exact.detach(), rtol=near, atol=near)


# clipping in the type that is computed in


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("way", ["max_grad_norm", "clip_global_norm", "norm_pass"])
@pytest.mark.parametrize("dtype", [FP64, torch.complex128])
def test_clipping_of_float64_is_exact(way, dtype):
    torch.manual_seed(10)
    ours = [nn.Parameter(torch.randn(300, dtype=dtype))]
    theirs = [nn.Parameter(ours[0].detach().clone())]
    options = {} if way == "norm_pass" else {way: 0.3}
    optimizer = ms.Adam(ours, lr=0.01, eps=0.1, in_backward=way == "norm_pass", **options)
    expected = torch.optim.Adam(theirs, lr=0.01, eps=0.1)
    for i in range(50):
        torch.manual_seed(i)
        grad = torch.randn(300, dtype=dtype)
        if way == "norm_pass":
            with optimizer.norm_pass(0.3):
                (ours[0] * grad.conj()).real.sum().backward()
            (ours[0] * grad.conj()).real.sum().backward()
        else:
            ours[0].grad = grad.clone()
        optimizer.step()
        theirs[0].grad = grad.clone()
        nn.utils.clip_grad_norm_(theirs, 0.3)
        expected.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-13, atol=1e-13)


@pytest.mark.skipif(not ms._native.available, reason="torch's operators step them")
def test_subclasses_without_memory_are_refused():
    param = nn.Parameter(Wrapper(torch.ones(3)))
    param.grad = Wrapper(torch.ones(3))
    optimizer = ms.Adam([param])
    with pytest.raises(RuntimeError, match="a parameter is a tensor subclass without memory"):
        optimizer.step()
    assert not optimizer.state and torch.equal(param.inner, torch.ones(3))
