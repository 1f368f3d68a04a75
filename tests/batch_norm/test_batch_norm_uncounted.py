"""torch's own norms, and what derives from them: a recompute counts nothing, whatever the class."""

import copy
import functools
import itertools

import pytest
import torch
from batch_norms import assert_same_buffers
from helpers import assert_equal, run_threads, state_unchanged
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint as torch_checkpoint

import memsave_ext as ms


class NormAct(nn.BatchNorm2d):
    """A forward of its own, as timm's BatchNormAct2d."""

    def __init__(self, channels, **options):
        super().__init__(channels, **options)
        self.act = nn.ReLU()

    def forward(self, x):
        self._check_input_dim(x)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training,
            self.momentum or 0.2, self.eps,
        )  # fmt: skip
        return self.act(x)


class Assigning(NormAct):
    def forward(self, x):
        if self.training:
            self.num_batches_tracked = self.num_batches_tracked + 1
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean((0, 2, 3))
            self._buffers["running_var"] = self.running_var * 0.5
        return x * self.weight[:, None, None]


class Ema(_NormBase):
    """Straight from the base, with a buffer of its own."""

    def __init__(self, channels):
        super().__init__(channels)
        self.register_buffer("seen", torch.zeros(channels))

    def _check_input_dim(self, x):
        pass

    def forward(self, x):
        if self.training:
            self.seen += x.detach().amax((0, 2, 3))
            self.running_mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
        return x * self.weight[:, None, None].sin()


NORMS = {
    "torch": nn.BatchNorm2d,
    "average": functools.partial(nn.BatchNorm2d, momentum=None),
    "no affine": functools.partial(nn.BatchNorm2d, affine=False),
    "untracked": functools.partial(nn.BatchNorm2d, track_running_stats=False),
    "sync": nn.SyncBatchNorm,
    "instance": functools.partial(nn.InstanceNorm2d, track_running_stats=True, affine=True),
    "subclass": NormAct,
    "assigning": Assigning,
    "base": Ema,
    "ours": ms.BatchNorm2d,
}


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), NORMS[norm](4)

    def inner(self, x):
        return self.conv(self.norm(x).sin())

    def forward(self, x):
        return x + self.norm(self.inner(x))


def whole(model, x):
    return ms.checkpoint(model, x)


def closure(model, x):
    for block in model:
        x = ms.checkpoint(lambda t, block=block: block(t).sin(), x)
    return x


def method(model, x):
    for block in model:
        x = ms.checkpoint(block.inner, x)
    return x


def forward_method(model, x):
    for block in model:
        x = ms.checkpoint(functools.partial(block.forward), x)
    return x


def called(model, x):
    for block in model:
        x = ms.checkpoint(block.__call__, x)
    return x


def norm_itself(model, x):
    for block in model:
        x = ms.checkpoint(block.norm, x).sin()
    return x


def norm_forward(model, x):
    for block in model:
        x = ms.checkpoint(block.norm.forward, x).sin()
        x = ms.checkpoint(functools.partial(block.norm.forward), x).sin()
        x = ms.checkpoint(functools.partial(type(block.norm).forward, block.norm), x).sin()
    return x


def explicit(model, x):
    for block in model:
        x = ms.CheckpointFunction.apply(block, 1, x, *block.parameters())
    return x


def nested(model, x):
    def outer(t):
        return model[1](ms.checkpoint(lambda u: model[0](u) + model[1].norm(u), model[0].inner(t)))

    return ms.checkpoint(outer, x)


def sequential(model, x):
    return ms.checkpoint_sequential(model, 2, x)


def patched(model, x):
    with ms.patch_torch_checkpoint():
        return torch_checkpoint.checkpoint(lambda t: model(t).sin(), x, use_reentrant=False)


def modules(kind):
    def run(model, x):
        handle = ms.checkpoint_modules(model, kind)
        y = model(x)
        return handle, y

    return run


PROGRAMS = [
    whole, closure, method, forward_method, called, norm_itself, norm_forward, explicit, nested,
    sequential, patched,
]  # fmt: skip


def plainly(program, model, x, monkeypatch):
    with monkeypatch.context() as patch:
        run = lambda function, *args, **kwargs: function(*args)  # noqa: E731
        patch.setattr(ms, "checkpoint", run)
        patch.setattr(ms, "checkpoint_sequential", lambda model, segments, x: model(x))
        patch.setattr(ms.CheckpointFunction, "apply", lambda f, n, *args: f(*args[:n]))
        patch.setattr(torch_checkpoint, "checkpoint", run)
        patch.setattr(ms, "patch_torch_checkpoint", torch.enable_grad)
        return program(model, x)


def example(norm):
    torch.manual_seed(3)
    return nn.Sequential(Block(norm), Block(norm)), torch.randn(3, 4, 5, 5, requires_grad=True)


def gradients(model, x):
    return [x.grad, *(p.grad for p in model.parameters())]


# In eval mode, where nothing is counted, each program and each norm.
CASES = [(program, True, norm) for program in PROGRAMS for norm in NORMS]
CASES += [(program, False, norm) for program, norm in zip(PROGRAMS, itertools.cycle(NORMS))]


@pytest.mark.parametrize(("program", "training", "norm"), CASES)
def test_as_without_checkpoint(program, training, norm, monkeypatch):
    model, x = example(norm)
    plain_model, plain_x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    model.train(training), plain_model.train(training)
    with state_unchanged():
        program(model, x).square().sum().backward()
    plainly(program, plain_model, plain_x, monkeypatch).square().sum().backward()
    assert_same_buffers(model, plain_model)
    assert_equal(gradients(model, x), gradients(plain_model, plain_x))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", [Block, nn.Conv2d, nn.Sequential, _NormBase])
def test_checkpoint_modules(kind, norm):
    model, x = example(norm)
    plain_model, plain_x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    handle = ms.checkpoint_modules(model, kind)
    model(x).square().sum().backward()
    plain_model(plain_x).square().sum().backward()
    handle.remove()
    assert_same_buffers(model, plain_model)
    assert_equal(gradients(model, x), gradients(plain_model, plain_x))


@pytest.mark.parametrize("norm", NORMS)
def test_retained_double_and_failed(norm):
    model, x = example(norm)
    plain_model, plain_x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    fail = []

    def function(t):
        t = model[0](t)
        if fail:
            raise ZeroDivisionError
        return model[1](t).sin()

    y = ms.checkpoint(function, x).sum()
    before = copy.deepcopy(list(model.buffers()))
    torch.autograd.grad(y, x, retain_graph=True)
    fail.append(1)
    with state_unchanged(), pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y, x, retain_graph=True)
    fail.clear()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), x)
    assert_equal(list(model.buffers()), before)
    model(x)  # counts again
    plain_y = plain_model(plain_x).sin().sum()
    (g,) = torch.autograd.grad(plain_y, plain_x, create_graph=True)
    (expected,) = torch.autograd.grad(g.square().sum(), plain_x)
    plain_model(plain_x)
    assert_equal([second], [expected])
    assert_same_buffers(model, plain_model)


@pytest.mark.parametrize("norm", ["torch", "average", "subclass", "instance"])
def test_threads_that_count_while_others_recompute(norm):
    """Nothing of a module changes for the others while it is run again."""
    module = NORMS[norm](4).double()
    x = torch.randn(3, 4, 5, 5, dtype=torch.double)

    def work(i):
        for _ in range(20):
            t = x.clone().requires_grad_()
            ms.checkpoint(lambda u: module(u).sin().sin(), t, early_stop=False).sum().backward()

    run_threads(work, 4)
    # Two threads may count at the same time, which then counts one of them, with torch, too.
    assert int(module.num_batches_tracked) <= 80
    recounted = copy.deepcopy(module)
    y = ms.checkpoint(lambda u: module(u).sin(), x.clone().requires_grad_())
    recounted(x)
    y.sum().backward()
    assert_same_buffers(module, recounted)


def test_replicas():
    """Of torch.nn.parallel.replicate: buffers of the first are those of the model."""
    model, x = example("torch")
    replica = model._replicate_for_data_parallel()
    for i, block in enumerate(model):
        inner = block._replicate_for_data_parallel()
        inner.conv, inner.norm = block.conv, block.norm._replicate_for_data_parallel()
        inner.norm.weight, inner.norm.bias = block.norm.weight * 1, block.norm.bias * 1
        replica._modules[str(i)] = inner
    plain_model = copy.deepcopy(model)
    ms.checkpoint(replica, x).sum().backward()
    plain_model(x)
    assert_same_buffers(model, plain_model)
    assert model[0].norm.weight.grad is not None


def test_hooks_run_with_the_values_of_the_module():
    model, x = example("torch")
    seen = []
    model[0].norm.register_forward_hook(lambda m, args, out: seen.append((m.weight, m.training)))
    ms.checkpoint(model, x).sum().backward()
    assert len(seen) == 4
    assert all(weight is model[0].norm.weight and training for weight, training in seen)


def test_memory_track():
    model, x = example("torch")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ms.memory.track(model, optimizer) as t:
        for _ in range(2):
            ms.checkpoint(model, x).sum().backward()
            optimizer.step()
    assert t.report()
    assert int(model[0].norm.num_batches_tracked) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", ["torch", "subclass", "instance", "ours"])
def test_torchs_tools(norm):
    """What torch does with modules of these classes is not disturbed."""
    model, x = example(norm)
    model.eval()
    expected = model(x)
    if norm not in ("subclass", "ours"):
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    exported = torch.export.export(copy.deepcopy(model), (x,)).module()
    torch.testing.assert_close(exported(x), expected)
    if norm != "ours":
        torch.testing.assert_close(torch.jit.script(model)(x), expected)
        torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)


@pytest.mark.parametrize("norm", ["torch", "subclass", "ours"])
def test_compiled_with_a_region_inside(norm):
    model, x = example(norm)
    expected = copy.deepcopy(model)
    compiled = torch.compile(lambda t: ms.checkpoint(model, t).sin(), backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, expected(x).sin())
    y.sum().backward()
    torch.testing.assert_close(list(model.buffers()), list(expected.buffers()))
