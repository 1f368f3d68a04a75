"""Adam and AdamW beside torch's, after backward and in it."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_net import model, train
from torch import nn
from torch.optim import lr_scheduler

import memsave_ext as ms

PAIRS = [(ms.Adam, torch.optim.Adam), (ms.AdamW, torch.optim.AdamW)]
OPTIONS = [
    {}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.5, 0.9)},
    {"eps": 1e-3, "weight_decay": 0.01, "amsgrad": True, "maximize": True}, {"lr": 0.0},
    {"lr": torch.tensor(3e-3)}, {"foreach": True}, {"fused": True}, {"betas": (0.0, 0.9)},
]  # fmt: skip


def assert_close_to(ours, theirs, rtol=2e-5, atol=2e-6):
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kinds", PAIRS, ids=["Adam", "AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_hundred_steps_as_torch(options, kinds, dtype):
    kind, torchs = kinds
    nets = [model(dtype) for _ in range(3)]
    after = kind(nets[0].parameters(), **{"lr": 1e-2, **options})
    inside = kind(nets[1].parameters(), **{"lr": 1e-2, **options}, in_backward=True)
    if isinstance(options.get("lr"), torch.Tensor):
        options = {**options, "fused": True}  # torch's other paths want a number, or its tensor
    expected = torchs(nets[2].parameters(), **{"lr": 1e-2, **options})
    for net, optimizer in zip(nets, (after, inside, expected), strict=True):
        train(net, optimizer, 100)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {}
    assert_close_to(nets[0], nets[2], **tolerance)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("kind", "torchs"), PAIRS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_resume_from_torch_and_back(kind, torchs, amsgrad, in_backward):
    options = {"lr": 1e-2, "amsgrad": amsgrad}
    ours, theirs = model(), model()
    expected = torchs(theirs.parameters(), **options)
    train(theirs, expected, 30)

    optimizer = torchs(ours.parameters(), **options)
    train(ours, optimizer, 10)
    for use in (kind, torchs):  # through a file, as a checkpoint goes
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        if isinstance(optimizer, ms.Adam):
            optimizer.remove_hooks()
        kwargs = {"in_backward": in_backward} if use is kind else {}
        optimizer = use(ours.parameters(), lr=1, **kwargs)
        optimizer.load_state_dict(torch.load(file))
        train(ours, optimizer, 10, start=10 if use is kind else 20)
    assert_close_to(ours, theirs)
    assert optimizer.state_dict()["state"].keys() == expected.state_dict()["state"].keys()


def test_named_parameters():
    net = model()
    optimizer = ms.AdamW(net.named_parameters(), in_backward=True)
    train(net, optimizer, 1)
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    with pytest.raises(ValueError, match="bf16='split' is for bfloat16 parameters"):
        ms.AdamW(net.named_parameters(), bf16="split")


@pytest.mark.parametrize(
    "mode", [{"seed": 3}, {"max_grad_norm": 1.0}, {"clip_global_norm": 1.0}], ids=str
)
def test_differentiable_has_no_modes(mode):
    with pytest.raises(ValueError, match="differentiable=True uses .*has no " + next(iter(mode))):
        ms.Adam(model().parameters(), differentiable=True, **mode)


def test_differentiable_has_no_modes_of_a_group_or_set_later(tmp_path):
    params = [nn.Parameter(torch.ones(20_000)) for _ in range(2)]
    of_group = {"max_grad_norm": 1.0}, {"states_on": tmp_path}, {"state_dtype": "8bit"}
    for mode in of_group:
        match = "differentiable=True uses .*has no " + next(iter(mode))
        with pytest.raises(ValueError, match=match):
            ms.Adam([{"params": params, **mode}], differentiable=True)
        optimizer = ms.Adam(params[:1], differentiable=True)
        with pytest.raises(ValueError, match=match):
            optimizer.add_param_group({"params": params[1:], **mode})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="has no clip_global_norm"):
        optimizer.clip_global_norm = 1.0
    with pytest.raises(ValueError, match="has no grad_scaler"):
        optimizer.grad_scaler = torch.amp.GradScaler("cpu")
    assert optimizer.clip_global_norm is None and optimizer.grad_scaler is None
    optimizer.add_param_group({"params": params[1:], "max_grad_norm": None})  # as the default


def test_state_dict_has_torchs_keys():
    ours, theirs = (kind(model().parameters()) for kind in (ms.Adam, torch.optim.Adam))
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    net = model()
    for kind in (ms.AdamW, torch.optim.AdamW):
        optimizer = kind(net.parameters(), amsgrad=True)
        train(net, optimizer, 1)
        state = optimizer.state_dict()["state"][0]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        assert state["step"].dtype == torch.float32 and state["step"].shape == ()


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 7]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=25),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 4, cycle_momentum=True),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name):
    nets = model(), model()
    optimizers = (
        ms.AdamW(nets[0].parameters(), lr=1e-2, in_backward=True),
        torch.optim.AdamW(nets[1].parameters(), lr=1e-2),
    )
    for net, optimizer in zip(nets, optimizers, strict=True):
        scheduler = SCHEDULERS[name](optimizer)
        arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
        train(net, optimizer, 20, after=lambda step, s=scheduler, a=arguments: s.step(*a))
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    assert_close_to(*nets)


@pytest.mark.parametrize("in_backward", [False, True])
def test_groups_changed_by_hand(in_backward):
    nets = model(), model()
    for net, optimizer in (
        (nets[0], ms.Adam([{"params": nets[0][0].parameters()}], in_backward=in_backward)),
        (nets[1], torch.optim.Adam([{"params": nets[1][0].parameters()}])),
    ):

        def change(step, net=net, optimizer=optimizer):
            group = optimizer.param_groups[0]
            group["lr"], group["betas"] = 1e-2 / (step + 1), (0.8 + 0.01 * step, 0.99)
            group["weight_decay"] = 0.1 * step
            if step == 3:
                optimizer.add_param_group(
                    {"params": [*net[2].parameters(), *net[4].parameters()], "lr": 1e-2}
                )

        train(net, optimizer, 8, after=change)
    assert_close_to(*nets)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_float32_states(dtype, in_backward):
    net, reference = model(dtype), model(dtype).float()
    optimizer = ms.AdamW(net.parameters(), lr=1e-2, in_backward=in_backward)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    p, q = net[0].weight, reference[0].weight
    for step in range(5):  # the same gradients, and the rounding of the parameter alone
        torch.manual_seed(step)
        grad = torch.randn(p.shape).to(dtype)
        (p * grad).sum().backward()
        q.grad = grad.float()
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
        with torch.no_grad():
            q.copy_(q.to(dtype))
        assert torch.equal(p.float(), q)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    loaded = ms.AdamW(net.parameters())
    loaded.load_state_dict(optimizer.state_dict())  # pytorch#43706 would cast it
    assert torch.equal(loaded.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    assert loaded.state[p]["exp_avg"].dtype == torch.float32
    theirs = torch.optim.AdamW(net.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(theirs.state_dict())  # a state of the parameter's type stays so
    assert optimizer.state[p]["exp_avg"].dtype == dtype
    (p * p).sum().backward()
    optimizer.step()


def layouts():
    base = torch.randn(6, 4, 3, 3)
    return {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.randn(5, 14)[:, ::2],
        "complex": torch.randn(5, 7, dtype=torch.complex64),
        "complex, strided": torch.randn(5, 14, dtype=torch.complex128)[:, ::2],
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
    }


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("amsgrad", [False, True])
def test_layouts_and_complex(name, in_backward, amsgrad):
    torch.manual_seed(3)
    start = layouts()[name]
    ours, theirs = (nn.Parameter(start.detach()) for _ in range(2))
    theirs.data = start.detach().clone()
    optimizers = (
        ms.Adam([ours], lr=1e-2, amsgrad=amsgrad, weight_decay=0.1, in_backward=in_backward),
        torch.optim.Adam([theirs], lr=1e-2, amsgrad=amsgrad, weight_decay=0.1),
    )
    for step in range(10):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            (p * torch.randn(p.shape)).abs().square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ours.stride() == start.stride()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_go_on_by_themselves(copier, in_backward):
    net = model()
    optimizer = ms.AdamW(net.parameters(), lr=1e-2, in_backward=in_backward)
    train(net, optimizer, 5)
    other_net, other = copier((net, optimizer))
    assert other.in_backward == in_backward
    train(other_net, other, 5, start=5)
    assert not torch.equal(net[0].weight, other_net[0].weight)
    train(net, optimizer, 5, start=5)
    for p, q in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_step_is_one_native_call():
    net = model()
    optimizer = ms.Adam(net.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    net(torch.randn(2, 5)).sum().backward()
    assert optimizer.step(lambda: 7) == 7
    assert calls == ["pre", "post"]
    assert all(p.grad is not None for p in net.parameters())  # as torch's


def test_closure_that_evaluates():
    nets = model(), model()
    x = torch.randn(4, 5)
    for net, optimizer in (
        (nets[0], ms.Adam(nets[0].parameters(), lr=1e-2)),
        (nets[1], torch.optim.Adam(nets[1].parameters(), lr=1e-2)),
    ):

        def closure(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
    assert_close_to(*nets)


def test_differentiable_runs_torchs():
    p = torch.ones(3, requires_grad=True)
    ours, theirs = p.clone(), p.clone()
    for value, kind in ((ours, ms.Adam), (theirs, torch.optim.Adam)):
        optimizer = kind([value], lr=0.1, differentiable=True)
        value.grad = p * 2
        optimizer.step()
    assert torch.equal(
        torch.autograd.grad(ours.sum(), p)[0], torch.autograd.grad(theirs.sum(), p)[0]
    )


@pytest.mark.parametrize("kind", [ms.Adam, ms.SGD])
def test_step_hooks_of_differentiable_run_once(kind):
    torch.optim.Adam([torch.ones(1)]), torch.optim.SGD([torch.ones(1)])  # torch hooks their step()
    value = torch.ones(3, requires_grad=True).clone()
    optimizer, seen = kind([value], lr=0.1, differentiable=True), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    value.grad = torch.ones(3)
    optimizer.step()
    assert seen == ["before", "after"]


def test_grad_scaler_unscales():
    """torch's fused optimizers are handed the scale instead, which this one would ignore."""
    nets = model(), model()
    for net, kind in zip(nets, (ms.Adam, torch.optim.Adam), strict=True):
        optimizer = kind(net.parameters(), lr=1e-2, eps=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(2, 5)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_close_to(*nets)


BAD = {
    "lr": ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    "beta 0": ({"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
    "beta 1": ({"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
    "eps": ({"eps": -1.0}, ValueError, "Invalid epsilon value: -1.0"),
    "weight_decay": ({"weight_decay": -1.0}, ValueError, "Invalid weight_decay value: -1.0"),
    "both": ({"foreach": True, "fused": True}, RuntimeError, "cannot be `True` together"),
    "differentiable": (
        {"differentiable": True, "in_backward": True}, ValueError, "differentiable=True cannot be",
    ),
    "small_bytes": ({"small_bytes": -1}, ValueError, "small_bytes must be an int from 0 to"),
    "bucket_bytes": ({"bucket_bytes": 1.5}, ValueError, "bucket_bytes must be an int"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", [ms.Adam, ms.AdamW])
def test_bad_arguments(case, kind):
    options, error, message = BAD[case]
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=message):
        kind([p], **options)
    assert p._post_accumulate_grad_hooks is None


@pytest.mark.parametrize("in_backward", [False, True])
def test_bad_parameters(in_backward):
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        ms.Adam([], in_backward=in_backward)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        ms.Adam([p * 2], in_backward=in_backward)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ms.Adam([{"params": [p]}, {"params": [p]}], in_backward=in_backward)
    with pytest.raises(TypeError, match="AdamW has no argument decoupled_weight_decay"):
        ms.AdamW([p], decoupled_weight_decay=True, in_backward=in_backward)
    assert p._post_accumulate_grad_hooks is None


@pytest.mark.parametrize("in_backward", [False, True])
def test_sparse_gradients_get_torchs_error(in_backward):
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = ms.Adam(embedding.parameters(), in_backward=in_backward)
    value = embedding(torch.tensor([1])).sum()
    if not in_backward:
        value.backward()
    act = value.backward if in_backward else optimizer.step
    with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider"):
        act()
    assert torch.equal(embedding.weight, before)
    assert not optimizer.state


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_state_elsewhere_is_named(in_backward):
    net = model()
    optimizer = ms.Adam(net.parameters(), in_backward=in_backward)
    train(net, optimizer, 1)
    state = optimizer.state[net[0].weight]
    state["exp_avg"] = state["exp_avg"][:2]
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match="the state 'exp_avg' of a parameter has shape"):
        train(net, optimizer, 1)
    if not in_backward:
        for p, q in zip(net.parameters(), before, strict=True):
            assert torch.equal(p, q)


@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=6),
    groups=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "amsgrad": st.booleans(),
            "maximize": st.booleans(),
            "decoupled_weight_decay": st.booleans(),
        }
    ),
    small_bytes=st.sampled_from([0, 400, 1 << 16]),
    bucket_bytes=st.sampled_from([0, 1000, 1 << 20]),
    program=st.lists(
        st.tuples(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(1, 3)),
        min_size=1,
        max_size=6,
    ),
)
@settings(max_examples=60)
def test_random_programs(sizes, groups, options, small_bytes, bucket_bytes, program):
    """Groups, unused and frozen parameters, accumulation, tied uses; as torch's."""
    torch.manual_seed(4)
    starts = [torch.randn(size) for size in sizes]
    runs = []
    for ours in (True, False):
        params = [nn.Parameter(s.clone()) for s in starts]
        split = [{"params": params[i::groups], "lr": 0.01 * (i + 1)} for i in range(groups)]
        split = [g for g in split if g["params"]]
        if ours:
            sized = {"small_bytes": small_bytes, "bucket_bytes": bucket_bytes}
            optimizer = ms.Adam(split, in_backward=True, **sized, **options)
        else:
            optimizer = torch.optim.Adam(split, **options)

        def loss(used, seed, params=params):
            torch.manual_seed(seed)
            terms = [
                (p * torch.randn(p.shape)).sum() + p.square().sum()  # twice: tied
                for p, use in zip(params, used, strict=False)
                if use
            ]
            return sum(terms, torch.zeros((), requires_grad=True))

        for number, (used, batches) in enumerate(program):
            params[0].requires_grad_(number % 2 == 0)
            optimizer.zero_grad()
            for batch in range(batches - 1):
                if ours:
                    with optimizer.accumulate():
                        loss([True] * 6, batch).backward()
                else:
                    loss([True] * 6, batch).backward()
            loss(used, 99).backward()
            optimizer.step()
        runs.append((params, optimizer))
    (ours, optimizer), (theirs, expected) = runs
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert (p in optimizer.state) == (q in expected.state)
        if p in optimizer.state:
            assert optimizer.state[p]["step"] == expected.state[q]["step"]
        assert p.grad is None
