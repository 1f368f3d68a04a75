"""What an error in a step or a backward leaves behind."""

import sys

import pytest
import torch
from own_steps import Fails
from stepped_in_backward import loss, make
from torch import nn

import memsave_ext as ms


def test_a_step_that_raised_leaves_nothing_to_later_backwards():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [params[0]], "lr": 1.0}, {"params": [params[1]], "lr": 0.0}]
    optimizer = ms.in_backward(Fails(groups))
    with optimizer.accumulate():
        loss(params).backward()
    optimizer.fails = True
    with pytest.raises(ArithmeticError, match="no") as _kept:  # its traceback refers to the batch
        optimizer.step()
    optimizer.fails = False
    optimizer.zero_grad()
    optimizer.param_groups.reverse()
    loss(params).backward()
    assert not params[0].any() and torch.equal(params[1], torch.ones(3))


class FailsOnMeta(torch.optim.SGD):
    def step(self, closure=None):
        if any(p.is_meta for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("no")
        return super().step(closure)


def test_a_step_that_raised_on_one_device_has_used_the_gradients_of_others():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))]
    optimizer = ms.in_backward(FailsOnMeta(params, lr=1.0))
    with optimizer.accumulate():
        for param in params:
            param.sum().backward()
    with pytest.raises(ArithmeticError, match="no"):
        optimizer.step()
    assert not params[0].any()
    assert params[0].grad is None and params[1].grad is not None


def test_a_backward_that_raises_at_the_recursion_limit():
    params, optimizer = make(small_bytes=0)

    def fail(_):
        raise ArithmeticError("no")

    params[0].register_hook(fail)

    def deep(calls):
        loss(params).backward() if calls == 0 else deep(calls - 1)

    depth = 0
    frame = sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    for spare in range(40):
        with pytest.raises((ArithmeticError, RecursionError)):
            deep(sys.getrecursionlimit() - depth - spare)
        optimizer.zero_grad()


def test_a_step_that_the_loop_leaves_out():
    params, optimizer = make()
    loss(params).backward()
    with pytest.raises(RuntimeError, match=r"\(4\) opt.step\(\) was not called after the backward"):
        loss(params).backward()
    optimizer.zero_grad()
    optimizer.step()
    for _ in range(2):  # what is told
        loss(params).backward()
        optimizer.step()
