"""Optimizers that cannot be stepped parameter by parameter, and wrong arguments."""

import copy
from collections import Counter

import pytest
import torch
from own_steps import model
from torch import nn

import memsave_ext as ms


def params():
    return list(model().parameters())


class CountsForAll(torch.optim.SGD):
    k = 0

    def step(self, closure=None):
        self.k += 1
        return super().step(closure)


class CountsInside(torch.optim.SGD):
    """Its numbers are in dicts and a list."""

    def __init__(self, params, lr, make=dict):
        super().__init__(params, lr)
        self.counts = {"of": make(steps=0)}
        self.counts["self"] = [self.counts]
        self.log = []

    def step(self, closure=None):
        self.counts["of"]["steps"] += 1
        self.log.append(torch.zeros(()))
        return super().step(closure)


class Adapts(torch.optim.SGD):
    """As Prodigy does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = sum(p.grad.norm().item() for p in group["params"])
        return super().step(closure)


class ClipsAll(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)


class NeedsAState(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.state[self.param_groups[0]["params"][0]]["sum"] = 1.0

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] += 1


class NeedsAClosure(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "a closure is needed"


class Wraps(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.base = torch.optim.SGD(params, lr)


def replaced():
    optimizer = torch.optim.SGD(params(), lr=0.1)
    optimizer.step = lambda: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.optim.LBFGS(params()), "LBFGS needs the argument closure"),
        (lambda: torch.optim.SparseAdam(params()), "SparseAdam does not support dense gradients"),
        (lambda: CountsForAll(params(), lr=0.1), "'k' differs.*counts steps for all parameters"),
        (lambda: CountsInside(params(), lr=0.1), "'counts' differs.*counts steps for all param"),
        (lambda: CountsInside(params(), lr=0.1, make=Counter), "'counts' differs.*counts steps"),
        (lambda: Adapts(params(), lr=0.1), "'d' differs.*it needs all gradients"),
        (lambda: ClipsAll(params(), lr=0.1), "it needs all gradients"),
        (lambda: NeedsAClosure(params(), lr=0.1), "trying that raised: a closure is needed"),
        (
            lambda: NeedsAState(params(), lr=0.1),
            r"KeyError\('count'\). It was tried without states, and",
        ),
        (lambda: Wraps(params(), lr=0.1), "wraps another optimizer"),
        (lambda: torch.optim.Adam(params(), differentiable=True), "differentiable=True is not"),
        (lambda: torch.optim.Adam(params(), capturable=True), "capturable"),
        (replaced, "has been replaced"),
        (lambda: ms.AdamW(params(), in_backward=True), "memsave_ext with in_backward=True instead"),
        (lambda: ms.AdamW(params()), "memsave_ext with in_backward=True instead"),
        (
            lambda: ms.in_backward(torch.optim.SGD(params(), lr=0.1)),
            "in_backward.. was called for it already",
        ),
    ],
)
def test_refused(make, says):
    optimizer = make()
    kind, attributes = type(optimizer), dict(optimizer.__dict__)
    counts = getattr(optimizer, "counts", {"of": None})
    inside = copy.deepcopy(counts["of"]), len(getattr(optimizer, "log", []))
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match=says):
        ms.in_backward(optimizer)
    assert type(optimizer) is kind and optimizer.__dict__ == attributes
    assert inside == (counts["of"], len(getattr(optimizer, "log", [])))
    assert torch.equal(torch.get_rng_state(), random)
    assert all("d" not in group for group in optimizer.param_groups)


def test_arguments():
    def make():
        return torch.optim.SGD(params(), lr=0.1)

    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Linear"):
        ms.in_backward(nn.Linear(2, 2))
    for options, says in (
        ({"max_grad_norm": 0}, "max_grad_norm must be a number above 0"),
        ({"small_bytes": -1}, "small_bytes must be an int"),
        ({"bucket_bytes": 1.5}, "bucket_bytes must be an int"),
    ):
        with pytest.raises(ValueError, match=says):
            ms.in_backward(make(), **options)
    with pytest.raises(TypeError, match=r"must be a torch.amp.GradScaler"):
        ms.in_backward(make(), max_grad_norm=1.0, grad_scaler=3)


class HasANorm(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.add_defaults()

    def add_defaults(self):
        self.defaults["max_grad_norm"] = 0.0
        for group in self.param_groups:
            group["max_grad_norm"] = 0.0


def test_an_optimizer_with_a_max_grad_norm_of_its_own():
    net = model()
    optimizer = HasANorm(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="has a max_grad_norm of its own"):
        ms.in_backward(optimizer, max_grad_norm=1.0)
    ms.in_backward(optimizer)
    before = net[0].weight.detach().clone()
    net(torch.ones(1, 6)).sum().backward()
    assert not torch.equal(net[0].weight, before)


def test_a_refused_optimizer_is_as_it_was():
    shared = params()
    first = ms.in_backward(torch.optim.SGD(shared, lr=0.1))
    second = torch.optim.SGD([nn.Parameter(torch.ones(2)), *shared], lr=0.1)
    groups, attributes = [dict(g) for g in second.param_groups], dict(second.__dict__)
    with pytest.raises(ValueError, match="stepped in backward by another optimizer"):
        ms.in_backward(second, max_grad_norm=1.0)
    assert type(second) is torch.optim.SGD and second.__dict__ == attributes
    assert second.param_groups == groups
    assert not second.param_groups[0]["params"][0]._post_accumulate_grad_hooks
    with pytest.raises(TypeError, match="GradScaler"):
        ms.in_backward(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), grad_scaler=3)
    first.remove_hooks()
    ms.in_backward(second)


def test_a_parameter_twice():
    param = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([param, param], lr=0.1)
    with pytest.raises(ValueError, match="twice in a param group"):
        ms.in_backward(optimizer)
    assert type(optimizer) is torch.optim.SGD


def test_a_group_that_is_refused_is_not_added():
    net, other = model(), nn.Linear(2, 2)
    first = ms.in_backward(torch.optim.SGD(net.parameters(), lr=0.1))
    second = ms.in_backward(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="stepped in backward by another optimizer"):
        first.add_param_group({"params": list(other.parameters())})
    assert len(first.param_groups) == 1
    assert second.in_backward


def test_an_optimizer_whose_model_is_gone():
    net = model()
    optimizer = ms.in_backward(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    net.load_state_dict(model().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="nothing but the optimizer refers to them"):
        optimizer.step()
