"""SGD beside torch's, after backward and in it."""

import copy
import io

import pytest
import small_net
import torch
from modes import both_ways
from small_net import train
from torch import nn
from torch.optim import lr_scheduler

import memsave_ext as ms

# Those of torch's own tests, torch.testing._internal.common_optimizers, and some more.
CASES = {
    "default": {},
    "non-default lr": {"lr": 1e-2},
    "tensor lr": {"lr": torch.tensor(0.001)},
    "non-zero weight_decay": {"weight_decay": 0.5},
    "momentum": {"momentum": 0.9},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "weight_decay w/ momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "all": {"momentum": 0.8, "dampening": 0.2, "weight_decay": 0.1, "maximize": True},
    "nesterov, maximize": {"momentum": 0.5, "nesterov": True, "maximize": True},
    "lr of 0": {"lr": 0.0, "momentum": 0.9},
}


def weight():
    return nn.Parameter(torch.ones(1, 1))


ONE = weight()
ERRORS = {
    "momentum should be between 0 and 1": ([weight()], {"lr": 1e-2, "momentum": -0.5}),
    "invalid param type": (weight(), {}),
    "duplicate parameters should not occur across param groups either": (
        [{"params": ONE}, {"params": ONE}], {}
    ),
    "all optimizer params should be with/without names": ([("weight", weight()), weight()], {}),
    "all optimizer param groups should be with/without names.": (
        [{"params": [weight()], "lr": 1e-2}, {"params": [("weight", weight())]}], {}
    ),
    "negative lr": ([weight()], {"lr": -1.0}),
    "negative weight_decay": ([weight()], {"weight_decay": -1.0}),
    "nesterov without momentum": ([weight()], {"nesterov": True}),
}  # fmt: skip
each_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES)
fuses = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch does not fuse here"
)


def model(dtype=torch.float32):
    return small_net.model(dtype, width=130)


class Masters(torch.optim.SGD):
    """torch's, of float32 copies of the parameters, which see the copies rounded: of two bfloat16
    that are as near the one away from zero."""

    def __init__(self, params, **options):
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        super().__init__(self.masters, **options)

    def step(self):
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        super().step()
        for p, master in zip(self.params, self.masters, strict=True):
            bits = master.detach().view(torch.int32)
            if p.dtype == torch.bfloat16:
                bits = (bits + (1 << 15)) & -(1 << 16)
            p.data.copy_(bits.view(torch.float32))


def assert_same(ours, theirs):
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


@fuses
@both_ways
@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_cases_to_the_bit(options, dtype, foreach, in_backward):
    nets = model(dtype), model(dtype)
    ours = ms.SGD(nets[0].parameters(), **options, in_backward=in_backward)
    theirs = torch.optim.SGD(nets[1].parameters(), **options, foreach=foreach)
    for net, optimizer in zip(nets, (ours, theirs), strict=True):
        train(net, optimizer, 20)
    assert_same(*nets)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        expected = theirs.state.get(q, {})
        counted = {"step"} if options.get("dampening") else set()
        assert ours.state.get(p, {}).keys() == expected.keys() | counted
        for name, value in expected.items():
            assert torch.equal(ours.state[p][name], value)


@both_ways
@each_case
def test_beside_torchs_fused(options, in_backward):
    nets = model(), model()
    ours = ms.SGD(nets[0].parameters(), **options, in_backward=in_backward)
    theirs = torch.optim.SGD(nets[1].parameters(), **options, fused=True)
    for net, optimizer in zip(nets, (ours, theirs), strict=True):
        train(net, optimizer, 20)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("params", "options"), ERRORS.values(), ids=ERRORS)
def test_torchs_errors(params, options):
    raised = []
    for kind in (torch.optim.SGD, ms.SGD):
        with pytest.raises((TypeError, ValueError)) as error:
            kind(params, **options)
        raised.append((error.type, str(error.value)))
    (theirs, said), (ours, we_say) = raised
    assert ours is theirs and we_say.startswith(said)  # and go on with what is allowed


def test_a_parameter_that_is_twice_in_a_group_is_refused():
    with pytest.raises(ValueError, match="twice in a param group"):
        ms.SGD([ONE, ONE])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"momentum": "0.9"}, TypeError, "momentum must be a number"),
        ({"dampening": None}, TypeError, "dampening must be a number"),
        ({"nesterov": 2}, TypeError, "nesterov must be True or False"),
        ({"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
        ({"in_backward": True, "differentiable": True}, ValueError, "cannot be combined"),
        ({"differentiable": True, "seed": 3}, ValueError, "has no seed"),
        ({"state_dtype": "4bit"}, ValueError, "packs Adam's two moments into one byte"),
        ({"small": 3}, TypeError, "small"),
    ],
)
def test_bad_arguments(options, error, message):
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=message):
        ms.SGD([param], **options)
    assert param._post_accumulate_grad_hooks is None


def test_torchs_groups():
    ours, theirs = (kind(model().parameters()) for kind in (ms.SGD, torch.optim.SGD))
    assert ours.state_dict() == theirs.state_dict()
    assert repr(ours) == repr(theirs)


@both_ways
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}])
def test_resume_from_torch_and_back(options, in_backward):
    nets = model(), model()
    expected = torch.optim.SGD(nets[1].parameters(), lr=0.1, **options)
    train(nets[1], expected, 15)
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1, **options)
    train(nets[0], optimizer, 5)
    for use in (ms.SGD, torch.optim.SGD):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        if isinstance(optimizer, ms.SGD):
            optimizer.remove_hooks()
            assert (
                optimizer.to_fp32_state_dict()["state"].keys()
                == expected.state_dict()["state"].keys()
            )
        more = {"in_backward": in_backward} if use is ms.SGD else {}
        optimizer = use(nets[0].parameters(), lr=1, **more)
        optimizer.load_state_dict(torch.load(file))
        train(nets[0], optimizer, 5, start=5 if use is ms.SGD else 10)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@both_ways
@pytest.mark.parametrize("bf16", [None, "split"])
def test_momentum_that_begins_later(bf16, in_backward):
    """As schedulers of momentum have it. What the parameter has beside its 16 bits stays."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    runs = []
    for kind, more in ((ms.SGD, {"in_backward": in_backward, "bf16": bf16}), (Masters, {})):
        net = model(dtype)
        runs.append((net, kind(net.parameters(), lr=0.05, **more)))

        def change(step, group=runs[-1][1].param_groups[0]):
            group["momentum"] = (0.9, 0.9, 0.0, 0.5, 0.9)[step % 5]

        train(*runs[-1], 10, after=change)
    (net, ours), (other, plain) = runs
    assert_same(net, other)
    if bf16:
        for p in net.parameters():
            assert set(ours.state[p]) == {"momentum_buffer", "param_rest"}
        for p, q in zip(ours.fp32_parameters(), plain.masters, strict=True):
            assert torch.equal(p, q)


@both_ways
@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "CyclicLR", "ReduceLROnPlateau"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers(name, in_backward):
    make = {
        "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=25),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 4, cycle_momentum=True),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    }
    nets = model(), model()
    ours = ms.SGD(nets[0].parameters(), lr=0.1, momentum=0.9, in_backward=in_backward)
    theirs = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9)
    for net, optimizer in zip(nets, (ours, theirs), strict=True):
        scheduler = make[name](optimizer)
        arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
        train(net, optimizer, 20, after=lambda step, s=scheduler, a=arguments: s.step(*a))
    assert ours.param_groups[0]["momentum"] == theirs.param_groups[0]["momentum"]
    assert_same(*nets)


def test_differentiable_is_torchs():
    weight = torch.ones(3, requires_grad=True)
    param = weight.clone()
    lr = torch.tensor(0.1, requires_grad=True)
    optimizer = ms.SGD([param], lr=lr, differentiable=True)
    param.grad = torch.full((3,), 2.0)
    optimizer.step()
    param.sum().backward()
    assert lr.grad == -6


def test_closures():
    net, other = model(), model()
    optimizer = ms.SGD(net.parameters(), lr=0.1, momentum=0.9, in_backward=True)
    expected = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, 5)
    for model_, of in ((net, optimizer), (other, expected)):

        def closure(model_=model_, of=of):
            of.zero_grad()
            loss = model_(x).square().mean()
            loss.backward()
            return loss

        assert of.step(closure) > 0
    assert_same(net, other)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients, torch.optim.SGD does"):
        ms.SGD(embedding.parameters(), lr=0.1).step()
    embedding.weight.grad = None
    optimizer = ms.SGD(embedding.parameters(), lr=0.1, in_backward=True)
    with pytest.raises(RuntimeError, match=r"sparse gradients, torch.optim.SGD does"):
        embedding(torch.tensor([1])).sum().backward()
    assert optimizer.in_backward


def test_a_copy_goes_on_alike():
    net = model()
    optimizer = ms.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.3, in_backward=True)
    train(net, optimizer, 3)
    other, copied = copy.deepcopy((net, optimizer))
    for one in ((net, optimizer), (other, copied)):
        train(*one, 3, start=3)
    assert_same(net, other)
    assert copied.in_backward


@both_ways
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_states_that_older_torchs_saved(momentum, in_backward):
    """Without momentum they had a momentum_buffer of None."""
    nets = model(), model()
    ours = ms.SGD(nets[0].parameters(), lr=0.1, momentum=momentum, in_backward=in_backward)
    theirs = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=momentum)
    for net, optimizer in zip(nets, (ours, theirs), strict=True):
        saved = optimizer.state_dict()
        saved["state"] = {i: {"momentum_buffer": None} for i in saved["param_groups"][0]["params"]}
        optimizer.load_state_dict(saved)
        train(net, optimizer, 3)
    assert_same(*nets)
    assert len(ours.to_fp32_state_dict()["state"]) == (6 if momentum else 0)
