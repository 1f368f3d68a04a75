"""Gradients that a backward could not use, or only measured: afterwards they are as if they had
never been."""

import pytest
import torch
from helpers import run_threads
from torch import nn

import memsave_ext as ms

WRONG = [
    (ms.Lion, {}, "betas", 3, TypeError),
    (ms.SGD, {}, "momentum", "much", TypeError),
    (ms.Adam, {}, "weight_decay", None, TypeError),
    (ms.SGD, {"max_grad_norm": 1e9}, "max_grad_norm", -1.0, ValueError),
]
each_size = pytest.mark.parametrize("small_bytes", [0, 8, 1 << 16])


def pair(kind, **options):
    nets = [[nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))] for _ in range(2)]
    return nets, [kind(nets[0], lr=0.1, in_backward=True, **options), kind(nets[1], lr=0.1)]


def loss(params):
    return sum((p * (i + 1)).sum() for i, p in enumerate(params))


def assert_goes_on_alike(nets, optimizers):
    for params, optimizer in zip(nets, optimizers, strict=True):
        loss(params).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(*nets, strict=True):
        assert torch.equal(p, q)


@each_size
@pytest.mark.parametrize(("kind", "options", "name", "value", "error"), WRONG)
def test_a_wrong_option(kind, options, name, value, error, small_bytes):
    nets, optimizers = pair(kind, small_bytes=small_bytes, **options)
    group = optimizers[0].param_groups[0]
    right, group[name] = group[name], value
    with pytest.raises(error, match=name):
        loss(nets[0]).backward()
    group[name] = right
    optimizers[0].zero_grad()
    assert_goes_on_alike(nets, optimizers)


@each_size
@pytest.mark.parametrize("by_zero_grad", [False, True])
def test_a_wrong_option_and_step(small_bytes, by_zero_grad):
    """step() then finds the gradients that the backward has left."""
    nets, optimizers = pair(ms.Lion, small_bytes=small_bytes)
    group = optimizers[0].param_groups[0]
    right, group["lr"] = group["lr"], "fast"
    with pytest.raises(TypeError, match="lr must be a number"):
        loss(nets[0]).backward()
    group["lr"] = right
    if by_zero_grad:
        optimizers[0].zero_grad()
        loss(nets[0]).backward()
    else:
        for p, q in zip(*nets, strict=True):
            q.grad = p.grad
    optimizers[0].step()
    if by_zero_grad:
        loss(nets[1]).backward()
    optimizers[1].step()
    for p, q in zip(*nets, strict=True):
        assert torch.equal(p, q)


def check_step_of_another_thread(nets, optimizers):
    """The first net's backward, on another thread, steps as the second's does here."""
    run_threads(lambda _: loss(nets[0]).backward(), 1)
    optimizers[0].step()
    loss(nets[1]).backward()
    optimizers[1].step()
    for p, q in zip(*nets, strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("kind", [ms.Adam, ms.SGD, ms.Lion])
def test_a_norm_pass_and_a_backward_of_another_thread(kind, finishes):
    nets, optimizers = pair(kind)
    try:
        with optimizers[0].norm_pass(1e9):
            loss(nets[0]).backward()
            if not finishes:
                raise KeyError
    except KeyError:
        pass
    check_step_of_another_thread(nets, optimizers)


def test_a_backward_that_raised_and_one_of_another_thread():
    nets, optimizers = pair(ms.SGD)

    def fail(param):
        raise KeyError

    handle = nets[0][0].register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError):
        loss(nets[0]).backward()
    handle.remove()
    optimizers[0].zero_grad()
    check_step_of_another_thread(nets, optimizers)
