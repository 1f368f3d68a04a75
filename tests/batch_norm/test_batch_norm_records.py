"""A recompute does what its forward did, whatever happened to the modules in between."""

import copy

import pytest
import torch
from batch_norms import (
    CHECKPOINTS,
    FUNCTIONS,
    KINDS,
    NO_SECOND_BACKWARD,
    SAVED,
    assert_same_buffers,
    plain,
)
from helpers import assert_equal
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

import memsave_ext as ms


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = ms.BatchNorm2d(4, **options)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(1, 2)

    def forward(self, t):
        return self.conv(self.norm(t).sin())


def eval_mode(net):
    net.eval()


def train_mode(net):
    net.train()


def statistics(net):
    net.norm.running_mean.add_(3)
    net.norm.running_var.mul_(5)


def another_batch(net):
    net.train()
    net(torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(3)))


def other_buffers(net):
    net.norm.running_mean, net.norm.running_var = torch.full((4,), 2.0), torch.full((4,), 3.0)


def buffers_of_another_size(net):
    net.norm.running_mean = torch.zeros(7)


def no_buffers(net):
    net.norm.running_mean = net.norm.running_var = net.norm.num_batches_tracked = None


def momentum(net):
    net.norm.momentum = 0.9


def untracked(net):
    net.norm.track_running_stats = False


def eps(net):
    net.norm.eps = 10.0


def activation(net):
    net.norm.activation = "relu"


def negative_slope(net):
    net.norm.activation, net.norm.negative_slope = "leaky_relu", 0.7


CHANGES = [
    eval_mode, train_mode, statistics, another_batch, other_buffers, buffers_of_another_size,
    no_buffers, momentum, untracked, eps, activation, negative_slope,
]  # fmt: skip


def gradients(run, change, training, **options):
    torch.manual_seed(2)
    net, x = Net(**options).train(training), torch.randn(3, 4, 5, 5, requires_grad=True)
    y = run(net, x, list(net.parameters()))
    change(net)
    after = copy.deepcopy(net)
    y.sum().backward()
    assert_same_buffers(net, after)
    return [y, x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n != SAVED])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
# In eval mode the forwards of other people's Functions are not looked for.
@pytest.mark.without(case=lambda c: not c["training"] and c["name"] in FUNCTIONS)
def test_a_module_changed_in_between(change, training, name):
    if change in (statistics, another_batch) and not training:
        # Plain autograd refuses, or does not notice; the recompute is that of the first forward.
        expected = gradients(plain, lambda net: None, training)
    else:
        expected = gradients(plain, change, training)
    assert_equal(gradients(CHECKPOINTS[name], change, training), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_double_backward_of_a_module_changed_in_between(change):
    def second(run, change):
        torch.manual_seed(2)
        net, x = Net(activation="leaky_relu"), torch.randn(3, 4, 5, 5, requires_grad=True)
        y = run(net, x, None)
        change(net)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, net.norm.weight])

    assert_equal(second(CHECKPOINTS["checkpoint"], change), second(plain, lambda net: None))


def replace_weight(net):
    net.norm.weight = nn.Parameter(torch.ones(4))


def replace_data(net):
    net.norm.bias.data = torch.ones(4)


def remove_bias(net):
    net.norm.bias = None


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n != SAVED])
@pytest.mark.parametrize("change", [replace_weight, replace_data, remove_bias])
def test_a_parameter_replaced_in_between(change, name):
    net, x = Net(), torch.randn(3, 4, 5, 5, requires_grad=True)
    y = CHECKPOINTS[name](net, x, list(net.conv.parameters()))
    change(net)
    before = copy.deepcopy(net)
    with pytest.raises(RuntimeError, match="BatchNorm2d: (weight|bias) has been replaced"):
        y.sum().backward()
    assert_same_buffers(net, before)


def test_functional_call():
    net, x = Net(), torch.randn(3, 4, 5, 5, requires_grad=True)
    others = {k: v.detach().clone().requires_grad_() for k, v in net.norm.named_parameters()}
    y = torch.func.functional_call(
        net.norm, others, (x,), {}
    )  # outside of a region: an ordinary call
    assert y.grad_fn is not None

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = net.norm

        def forward(self, t):
            return ms.checkpoint(lambda u: self.norm(u).sin() * u, t)

    y = torch.func.functional_call(Outer(), {f"norm.{k}": v for k, v in others.items()}, (x,))
    with pytest.raises(RuntimeError, match="weight has been replaced"):
        y.sum().backward()


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


def with_parametrization(norm):
    parametrize.register_parametrization(norm, "weight", Twice())
    parametrize.register_parametrization(norm, "bias", Twice())


def with_weight_norm(norm):
    parametrizations.weight_norm(norm, "weight", dim=None)


def with_old_weight_norm(norm):
    nn.utils.weight_norm(norm, "weight", dim=None)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n not in NO_SECOND_BACKWARD])
@pytest.mark.parametrize("kind", [with_parametrization, with_weight_norm, with_old_weight_norm])
def test_a_parametrized_weight(kind, name):
    def results(run):
        torch.manual_seed(2)
        net, x = Net(activation="relu"), torch.randn(3, 4, 5, 5, requires_grad=True)
        kind(net.norm)
        for _ in range(5):
            run(lambda t: net(net(t)), x, list(net.parameters())).sum().backward()
        vars(net.norm).pop("weight", None)  # of a graph that would keep net alive
        return net, [x.grad, *(p.grad for p in net.parameters())]

    (ours, grads), (expected, expected_grads) = results(CHECKPOINTS[name]), results(plain)
    assert_same_buffers(ours, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_spectral_norm():
    def results(run):
        torch.manual_seed(2)
        lin, norm = nn.Linear(4, 4), ms.BatchNorm1d(4)
        parametrizations.spectral_norm(lin).eval()
        x = torch.randn(6, 4, requires_grad=True)
        run(lambda t: norm(lin(t)).sin(), x, list(lin.parameters())).sum().backward()
        return [x.grad, norm.weight.grad, norm.running_mean]

    assert_equal(results(CHECKPOINTS["checkpoint"]), results(plain))


@pytest.mark.parametrize("name", KINDS)
def test_a_call_only_in_the_recompute_counts_nothing(name):
    net, x, runs = Net(), torch.randn(3, 4, 5, 5, requires_grad=True), []

    def function(t):
        runs.append(1)
        y = net(t)
        if len(runs) > 1:
            with torch.no_grad():
                net.norm(t + 1)
                net.norm(t[:2])
                ms.BatchNorm2d(4)(t)
        return y.sin()

    y = CHECKPOINTS[name](function, x, list(net.parameters()))
    before = copy.deepcopy(net)
    y.sum().backward()
    assert len(runs) == 2
    assert_same_buffers(net, before)


def test_forward_mode_inside_of_a_region_counts_once():
    """There torch's kernel runs."""
    norm, x = ms.BatchNorm1d(4), torch.randn(6, 4, requires_grad=True)

    def function(t):
        with forward_ad.dual_level():
            norm(forward_ad.make_dual(t.detach(), torch.ones(6, 4)))
        return t.sin().cos()

    ms.checkpoint(function, x).sum().backward()
    assert int(norm.num_batches_tracked) == 1
