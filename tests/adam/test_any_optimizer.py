"""Optimizers that in_backward() takes, each equal to the bit to its own ordinary step()."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from own_steps import TORCHS, StatesFromTheStart, assert_same, loss, model, pair, step, twice
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import memsave_ext as ms

SGD = TORCHS["SGD momentum"]
ALL = pytest.mark.parametrize("name", TORCHS)
BOTH = pytest.mark.parametrize("small_bytes", [0, 1 << 16], ids=["at once", "in a bucket"])


@ALL
@BOTH
def test_torchs_optimizers(name, small_bytes):
    ours, theirs = pair(TORCHS[name], name == "Muon", small_bytes=small_bytes)
    for number in range(5):
        step(*ours, number)
        step(*theirs, number)
        assert_same(ours, theirs)


@ALL
def test_save_and_resume(name):
    flat = name == "Muon"
    (net, optimizer), theirs = pair(TORCHS[name], flat)
    for number in range(2):
        step(net, optimizer, number)
        step(*theirs, number)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    step(net, optimizer, 7)
    resumed, other = model(flat), theirs[0]
    again = ms.in_backward(TORCHS[name](list(resumed.parameters())))
    ordinary = TORCHS[name](list(other.parameters()))
    for net, optimizer in ((resumed, again), (other, ordinary)):
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch keeps its tensors
        step(net, optimizer, 2)
        step(net, optimizer, 3)
    assert_same((resumed, again), (other, ordinary))


class ByName(torch.optim.Optimizer):
    """Decays what is no bias, by the names in its groups."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p.mul_(1 if name.endswith("bias") else 0.9).sub_(group["lr"] * p.grad)


@BOTH
@pytest.mark.parametrize("kind", ["its own", "scaled"])
def test_an_optimizer_that_goes_by_names(kind, small_bytes):
    nets = model(), model()
    scale = 1.0 if kind == "its own" else 8.0
    ours, theirs = (
        ByName([{"params": list(net[:1].named_parameters())},
                {"params": list(net[2:].named_parameters()), "lr": 0.05}])
        for net in nets
    )  # fmt: skip
    ms.in_backward(ours, small_bytes=small_bytes)
    names = [list(group["param_names"]) for group in theirs.param_groups]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    ours.grad_scaler = scaler if kind == "scaled" else None
    for number in range(3):
        if kind == "scaled":
            scaler.scale(loss(nets[0], number)).backward()
            scaler.step(ours)
            scaler.update()
        else:
            loss(nets[0], number).backward()
            ours.step()
        loss(nets[1], number).backward()
        theirs.step()
        theirs.zero_grad()
        assert_same((nets[0], ours), (nets[1], theirs))
    assert [group["param_names"] for group in ours.param_groups] == names


def test_an_optimizer_that_has_stepped_before():
    ours, theirs = (model(), None), (model(), None)
    ours, theirs = ((net, SGD(list(net.parameters()))) for net, _ in (ours, theirs))
    step(*ours, 0)
    ms.in_backward(ours[1])
    step(*theirs, 0)
    for number in (1, 2):
        step(*ours, number)
        step(*theirs, number)
    assert_same(ours, theirs)


@BOTH
def test_an_optimizer_that_makes_states_in_its_constructor(small_bytes):
    ours, theirs = pair(lambda p: StatesFromTheStart(p, lr=0.1), small_bytes=small_bytes)
    assert_same(ours, theirs)  # the trial left them as they were
    for number in range(3):
        step(*ours, number)
        step(*theirs, number)
        assert_same(ours, theirs)


@pytest.mark.parametrize("early", [False, True], ids=["made after", "made before"])
def test_schedulers(early):
    nets = model(), model()
    optimizers = [SGD(list(net.parameters())) for net in nets]
    kinds = [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 8),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if early:
            schedulers = [[kind(o) for kind in kinds[:1]] for o in optimizers]
        ms.in_backward(optimizers[0])
        if not early:
            schedulers = [[kind(o) for kind in kinds] for o in optimizers]
        for number in range(6):
            for net, optimizer, of in zip(nets, optimizers, schedulers, strict=True):
                step(net, optimizer, number)
                for scheduler in of:
                    scheduler.step()
    assert_same(*zip(nets, optimizers, strict=True))


def nesterov(params):
    """One that minimizes: maximizing, as TORCHS's, soon makes NaN, which is equal to nothing."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


@pytest.mark.parametrize("make", [SGD, nesterov, TORCHS["Adam"]], ids=["SGD", "nesterov", "Adam"])
@pytest.mark.parametrize(
    "kind",
    [
        # The first two change momentum or betas.
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, 12),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.001, 0.02, 2, base_momentum=0.0),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    ],
    ids=["one cycle", "cyclic", "warm restarts", "plateau"],
)
def test_schedulers_through_accumulation_and_copies(make, kind):
    triples = [(net, optimizer, kind(optimizer)) for net, optimizer in pair(make)]
    for number in range(9):
        if number == 5:
            triples = [copy.deepcopy(triple) for triple in triples]
        for net, optimizer, scheduler in triples:
            context = optimizer.accumulate() if optimizer is triples[0][1] else torch.enable_grad()
            with context:
                loss(net, number).backward()
            step(net, optimizer, number + 20)
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[1.0] * plateau)
        assert_same(*(triple[:2] for triple in triples))
    assert all(p.isfinite().all() for p in triples[0][0].parameters())


def test_param_groups():
    """Options of a group are read when its parameters are stepped; groups can be added."""
    pairs = []
    for takes in (True, False):
        net = model()
        first, second = list(net[0].parameters()), list(net[2].parameters())
        groups = [{"params": first}, {"params": second, "lr": 0.01, "nesterov": True}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        net[3].requires_grad_(False)
        pairs.append((net, ms.in_backward(optimizer) if takes else optimizer))
    for net, optimizer in pairs:
        step(net, optimizer, 0)
        net[3].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[3].parameters()), "weight_decay": 0.1})
        step(net, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.param_groups[2]["momentum"] = 0.1
        step(net, optimizer, 2)
    assert_same(*pairs)


def test_what_a_backward_does_not_reach_is_stepped_by_step():
    ours, theirs = pair(SGD)
    for net, optimizer in (ours, theirs):
        bias = net[3].bias
        bias.grad = torch.full_like(bias, 2.0)
        net[3].bias.requires_grad_(False)
        loss(net, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert bias.grad is None
    assert_same(ours, theirs)


@pytest.mark.parametrize("by", ["checkpoint", "torch's", "remat"])
def test_recomputation_inside(by):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 33), nn.GELU(), nn.Linear(33, 6))
            self.by = None

        def forward(self, x):
            if self.by == "checkpoint":
                return ms.checkpoint(self.body, x)
            if self.by == "torch's":
                return torch_checkpoint.checkpoint(self.body, x, use_reentrant=False)
            return self.body(x)

    pairs = []
    for takes in (True, False):
        torch.manual_seed(3)
        net = nn.Sequential(Block(), Block(), nn.Linear(6, 2))
        if takes:
            net[0].by = net[1].by = by
        optimizer = SGD(list(net.parameters()))
        pairs.append((net, ms.in_backward(optimizer, small_bytes=0) if takes else optimizer))
    for number in range(3):
        with ms.remat() if by == "remat" else torch.enable_grad():
            value = loss(pairs[0][0], number)
        value.backward()
        pairs[0][1].step()
        step(*pairs[1], number)
    assert_same(*pairs)


def test_copies_and_pickles_are_stepped_in_backward():
    ours, theirs = pair(SGD, small_bytes=0)
    step(*ours, 0)
    step(*theirs, 0)
    for made in (twice(*ours), pickle.loads(pickle.dumps(ours))):
        other = twice(*theirs)
        assert type(made[1]) is type(ours[1]) and made[1].in_backward
        step(*made, 1)
        step(*other, 1)
        assert_same(made, other)
    step(*ours, 1)  # the copies have parameters of their own
    step(*theirs, 1)
    assert_same(ours, theirs)
    with pytest.raises(ValueError, match="stepped in backward by another optimizer"):
        copy.copy(ours[1])
    saved = pickle.loads(pickle.dumps(ours[1].state_dict()))
    theirs[1].load_state_dict(saved)


def test_remove_hooks():
    for remove in (
        lambda net, optimizer: optimizer.remove_hooks(),
        lambda n, _: ms.remove_hooks(n),
    ):
        ours, theirs = pair(SGD)
        step(*ours, 0)
        step(*theirs, 0)
        remove(*ours)
        assert not ours[1].in_backward
        assert all(not p._post_accumulate_grad_hooks for p in ours[0].parameters())
        for net, optimizer in (ours, theirs):
            loss(net, 1).backward()
            grads = [p.grad for p in net.parameters()]
            optimizer.step()
            assert all(p.grad is g for p, g in zip(net.parameters(), grads, strict=True))
            optimizer.zero_grad()
        assert_same(ours, theirs)
        copied, other = twice(*ours), twice(*theirs)
        for each in (copied, other):
            loss(each[0], 2).backward()
            assert all(p.grad is not None for p in each[0].parameters())
            each[1].step()
        assert_same(copied, other)


def test_zero_grad_takes_what_the_class_takes():
    class OfLoss(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=True)

    net = model()
    optimizer = ms.in_backward(OfLoss(net.parameters(), lr=0.1))
    loss(net, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(TypeError, match="zero_grad"):
        optimizer.zero_grad(set_to_none=True)
    assert not inspect.signature(optimizer.zero_grad).parameters  # which accelerate looks at
    plain = ms.in_backward(torch.optim.SGD(model().parameters(), lr=0.1))
    plain.zero_grad(set_to_none=False)
    assert "set_to_none" in inspect.signature(plain.zero_grad).parameters


def test_it_stays_what_it_was():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = repr(optimizer), type(optimizer).__name__
    ms.in_backward(optimizer)
    assert (repr(optimizer), type(optimizer).__name__) == before
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    assert optimizer.in_backward


@pytest.mark.parametrize("kind", ["complex", "channels last", "empty", "scalar", "float64", "bf16"])
def test_kinds_of_parameters(kind):
    def param():
        torch.manual_seed(0)
        if kind == "complex":
            return nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        if kind == "channels last":
            return nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        dtype = {"float64": torch.float64, "bf16": torch.bfloat16}.get(kind, torch.float32)
        shape = {"empty": (0, 3), "scalar": ()}.get(kind, (7, 3))
        return nn.Parameter(torch.randn(shape, dtype=dtype))

    params = param(), param()
    optimizers = [SGD([p]) for p in params]
    ms.in_backward(optimizers[0])
    for _ in range(3):
        for p, optimizer in zip(params, optimizers, strict=True):
            (p.abs() * p.abs()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*params)
