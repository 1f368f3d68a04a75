"""A model whose optimizer is stepped in backward by its own step(), beside the ordinary one."""

import copy

import torch
from torch import nn, optim

import memsave_ext as ms


class StatesFromTheStart(optim.Optimizer):
    """Makes them in its constructor and nowhere else, as Adagrad of torch 2.11. One is smaller than
    its parameter, one has no dimensions."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                sums = [torch.full_like(p, 0.1), torch.zeros(p.shape[0])]
                self.state[p] = {"sums": sums, "step": torch.zeros(()), "kind": "sum"}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    squares, rows = state["sums"]
                    state["step"] += 1
                    squares.addcmul_(p.grad, p.grad)
                    rows += p.grad.reshape(len(rows), -1).sum(1)
                    p.addcdiv_(p.grad, squares.sqrt() + 1e-10, value=-group["lr"])


class Fails(optim.SGD):
    """Its step raises while ``fails`` is set."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("no")
        return super().step(closure)


# By name: how torch's optimizers are made from a list of parameters.
TORCHS = {
    "SGD": lambda p, **o: optim.SGD(p, lr=0.1, **o),
    "SGD momentum": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, **o),
    "SGD nesterov": lambda p, **o: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True, **o
    ),
    "SGD fused": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, fused=True, **o),
    "SGD foreach": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True, **o),
    "Adam": lambda p, **o: optim.Adam(p, lr=0.01, **o),
    "Adam fused": lambda p, **o: optim.Adam(p, lr=0.01, fused=True, **o),
    "Adam foreach": lambda p, **o: optim.Adam(p, lr=0.01, foreach=True, amsgrad=True, **o),
    "Adam tensor lr": lambda p, **o: optim.Adam(p, lr=torch.tensor(0.01), **o),
    "AdamW": lambda p, **o: optim.AdamW(p, lr=0.01, amsgrad=True, **o),
    "Adagrad": lambda p, **o: optim.Adagrad(p, lr=0.1, lr_decay=0.1, **o),
    "Adadelta": lambda p, **o: optim.Adadelta(p, **o),
    "Adamax": lambda p, **o: optim.Adamax(p, lr=0.01, **o),
    "ASGD": lambda p, **o: optim.ASGD(p, lr=0.01, t0=1, **o),
    "Rprop": lambda p, **o: optim.Rprop(p, lr=0.01, **o),
    "Adafactor": lambda p, **o: optim.Adafactor(p, lr=0.01, **o),
    "NAdam": lambda p, **o: optim.NAdam(p, lr=0.01, **o),
    "RAdam": lambda p, **o: optim.RAdam(p, lr=0.01, weight_decay=0.01, **o),
    "RMSprop": lambda p, **o: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **o),
    "Muon": lambda p, **o: optim.Muon(p, lr=0.01, **o),
}


def model(flat=False):
    """``flat``: with matrices alone, which are all that Muon takes."""
    torch.manual_seed(5)
    bias = not flat
    return nn.Sequential(
        nn.Linear(6, 33, bias=bias), nn.Tanh(), nn.Linear(33, 9, bias=bias), nn.Linear(9, 2, bias)
    )


def pair(make, flat=False, **options):
    """A model and its optimizer, stepped in backward; and the same ones, stepped after it."""
    ours, theirs = model(flat), model(flat)
    other = make(list(theirs.parameters()))
    optimizer = make(list(ours.parameters()))
    assert ms.in_backward(optimizer, **options) is optimizer
    return (ours, optimizer), (theirs, other)


def loss(net, number):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    return (net(x) - 1).square().mean()


def step(net, optimizer, number):
    loss(net, number).backward()
    if getattr(optimizer, "in_backward", False):
        assert all(p.grad is None for p in net.parameters())
    optimizer.step()
    optimizer.zero_grad()


def assert_same(ours, theirs):
    """Parameters and states are the same to the bit."""
    (net, optimizer), (other_net, other) = ours, theirs
    for p, q in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(p, q)
        assert_same_state(optimizer.state[p], other.state[q])
    saved, others = optimizer.state_dict(), other.state_dict()
    assert saved["param_groups"] == others["param_groups"]
    assert saved["state"].keys() == others["state"].keys()


def assert_same_state(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        if isinstance(value, list):
            assert_same_state(dict(enumerate(value)), dict(enumerate(other[name])))
        elif isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def twice(net, optimizer):
    """Copies, made as one so that the optimizer's parameters are the model's."""
    return copy.deepcopy((net, optimizer))
