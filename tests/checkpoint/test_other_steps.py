"""Steps of torch's optimizers between forward and recompute that no version counter shows."""

from collections import OrderedDict

import pytest
import torch
from helpers import assert_equal
from processes import run_program
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim import optimizer as optimizer_module

import memsave_ext as ms
from memsave_ext import _native


class WritesData(torch.optim.SGD):
    """As optimizers were once written."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] * p.grad)


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "writes data": lambda params: WritesData(params, lr=0.1),
}


def region(function, x):
    return ms.checkpoint(function, x)


def explicit(function, x):
    return ms.CheckpointFunction.apply(function, 1, x)


def block(function, x):
    with ms.remat(_everything=True):
        return function(x)


natively = pytest.mark.skipif(not _native.available, reason="remat records natively")
RUNS = [region, explicit, pytest.param(block, marks=natively)]


def make():
    torch.manual_seed(0)
    w, v = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
    w.grad, v.grad = torch.ones_like(w), torch.ones_like(v)
    x = torch.randn(64, 64, requires_grad=True)
    return w, v, x


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_before_backward_is_an_error(run, optimizer):
    w, v, x = make()
    opt = optimizer([v, w])
    out = run(lambda x: (x * w.detach()).sin().exp(), x)  # the error, and not a wrong gradient of x
    before = w.detach().clone()
    opt.step()
    assert not torch.equal(w, before)
    with pytest.raises(
        ms.CheckpointError, match="parameter 1 of an optimizer, which (has )?stepped"
    ):
        out.sum().backward()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_steps_of_what_is_not_read_again(run, optimizer):
    """Of another parameter, one without a gradient, before the forward and after the backward."""
    grads = []
    for around in (lambda function, x: function(x), run):
        w, v, x = make()
        w.requires_grad_(False)
        opt = optimizer([w, v])
        opt.step()
        w.grad = None
        out = around(lambda x, w=w: (x * w).sin().exp(), x)
        before = v.detach().clone()
        opt.step()
        assert not torch.equal(v, before)
        out.sum().backward()
        opt.step()
        grads.append(x.grad)
    assert_equal(*[[grad] for grad in grads])


@natively
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_steps_in_a_block_are_seen(optimizer):
    w, v, x = make()
    opt = optimizer([w, v])
    grads, expected = [], []
    with ms.remat(_everything=True) as r:
        outs = []
        for _ in range(2):
            y = (x + w.detach()).sin()
            outs.append(y.exp().sum())
            plain = x.detach() + w.detach()
            expected.append(plain.sin().exp() * plain.cos())
            opt.step()
    for out in outs:
        grads += torch.autograd.grad(out, x)
    assert r.figures().recomputed_operators > 0
    assert_equal(grads, expected)


@pytest.mark.parametrize("run", RUNS)
def test_a_step_that_a_scaler_skips(run):
    grads = []
    for around in (lambda function, x: function(x), run):
        w, _, x = make()
        opt = torch.optim.AdamW([w], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu")
        out = around(lambda x, w=w: (x * w.detach()).sin().exp(), x)
        scaler.scale(torch.ones(()))
        w.grad.fill_(float("inf"))
        before = w.detach().clone()
        scaler.step(opt)
        scaler.update()
        assert torch.equal(w, before) and scaler.get_scale() < 65536
        out.sum().backward()
        grads.append(x.grad)
    assert_equal(*[[grad] for grad in grads])


@pytest.mark.parametrize("run", RUNS)
def test_a_scaled_step_without_gradients(run):
    """As of the generator, while the discriminator is trained. A scaler finds 0, and no tensor."""
    grads = []
    for around in (lambda function, x: function(x), run):
        w, v, x = make()
        generator = torch.optim.AdamW([w], lr=0.1, fused=True)
        discriminator = torch.optim.AdamW([v], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu")
        out = around(lambda x, w=w: (x * w.detach()).sin().exp(), x)
        scaler.scale(torch.ones(()))
        w.grad = None
        scaler.step(generator)
        scaler.step(discriminator)
        scaler.update()
        out.sum().backward()
        grads.append(x.grad)
    assert_equal(*[[grad] for grad in grads])


def test_compiled_steps_have_no_more_graphs():
    graphs = []
    for hooks in ({}, optimizer_module._global_optimizer_post_hooks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer_module, "_global_optimizer_post_hooks", OrderedDict(hooks))
            torch._dynamo.reset()
            count = CompileCounter()
            w, _, x = make()
            opt = torch.optim.SGD([w], lr=0.1)
            out = ms.checkpoint(lambda x: (x * 2).sin(), x)
            torch.compile(opt.step, backend=count)()
            out.sum().backward()
            graphs.append(count.frame_count)
    assert len(hooks) > 0 and graphs[0] == graphs[1] > 0


# In a process of its own: in this one other tests may have left something that waits.
PENDING = """
import torch
import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.checkpoint.fallback import stepped

is_any_pending = (_native.module or stepped).is_any_pending
x = torch.randn(64, 64, requires_grad=True)
assert not is_any_pending()
out = ms.checkpoint(lambda x: (x * x).sin(), x)
assert is_any_pending()
out.sum().backward()
del out
assert not is_any_pending()
if _native.available:
    with ms.remat(_everything=True) as r:
        out = (x * x).sin().exp()
        assert is_any_pending()
    assert is_any_pending()
    out.sum().backward()
    assert not is_any_pending()
    assert r.figures().dropped_bytes > 0
"""


def test_steps_are_noted_only_while_something_waits():
    run_program(PENDING).check_returncode()
