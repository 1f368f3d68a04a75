"""Adam's operators as torch's dispatcher sees them, and the steps that go through them."""

import contextlib

import pytest
import torch
from adam_operator import OPTIONS, call, step_
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import memsave_ext as ms

ops = torch.ops.memsave_ext


def tensors(dtype, state=None, amsgrad=True, shapes=((3,), (2, 5), (0, 2), ())):
    params, grads = ([torch.randn(s).to(dtype) for s in shapes] for _ in range(2))
    exp_avgs = [torch.randn(s).to(state or dtype) for s in shapes]
    squares = [torch.rand(s).to(state or dtype) for s in shapes]
    largest = [torch.rand(s).to(state or dtype) for s in shapes] if amsgrad else []
    steps = [torch.tensor(float(i)) for i, _ in enumerate(shapes)]
    return params, grads, exp_avgs, squares, largest, steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_opcheck(dtype, amsgrad):
    lists = tensors(dtype, amsgrad=amsgrad)
    opcheck(ops.adam_step_.default, *call(lists, True, amsgrad, False))


def test_opcheck_of_the_sum_of_squares():
    opcheck(ops.adam_sum_of_squares.default, ([torch.randn(3, 4), torch.randn(0), torch.ones(())],))


def test_a_tensor_takes_the_place_of_the_learning_rate():
    for lr in (0.1, 0.2):  # of one group, step after step
        by_number, by_tensor = (tensors(torch.float32) for _ in range(2))
        for ours, theirs in zip(by_tensor, by_number, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                a.copy_(b)
        for lists, options in (
            (by_number, {"lr": lr}),
            (by_tensor, {"lr": 0.0, "tensor_lr": torch.tensor(lr)}),
        ):
            by_position, by_name = call(lists, True, True, False)
            ops.adam_step_(*by_position, **{**by_name, **options})
        for ours, theirs in zip(by_tensor[0], by_number[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_versions_are_bumped():
    lists = tensors(torch.float32)
    before = [t._version for t in lists[0]]
    step_(lists, False, True, False)
    assert all(t._version > v for t, v in zip(lists[0], before, strict=True))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("dtype", "state"),
    [
        (torch.float32, None), (torch.float64, None), (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32),
    ],
)  # fmt: skip
def test_against_float64(dtype, state, decoupled, amsgrad, maximize):
    shapes = tuple((n,) for n in (1, 7, 8, 9, 31, 64, 1000, 4097))
    lists = tensors(dtype, state, amsgrad, shapes)
    lists[-1][0] += 3
    exact = [[t.double().clone() for t in part] for part in lists]
    step_(lists, decoupled, amsgrad, maximize)
    lr, beta1, beta2, eps, decay = OPTIONS
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    unit = max(torch.finfo(dtype).eps, torch.finfo(state or dtype).eps, torch.finfo(compute).eps)
    for i, (p, g, m, v) in enumerate(zip(*exact[:4], strict=True)):
        t = exact[5][i].item() + 1
        g = -g if maximize else g
        p = p * (1 - lr * decay) if decoupled else p
        g = g if decoupled else g + decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = torch.maximum(exact[4][i], v) if amsgrad else v
        p = p - lr / (1 - beta1**t) * m / ((w / (1 - beta2**t)).sqrt() + eps)
        found = [part[i] for part in lists if part]
        for ours, expected in zip((found[0], found[2], found[3]), (p, m, v), strict=True):
            torch.testing.assert_close(ours.double(), expected, rtol=4 * unit, atol=4 * unit)
        assert lists[-1][i] == t


def test_bad_calls():
    lists = tensors(torch.float32)
    before = [p.clone() for p in lists[0]]
    by_position, by_name = call(lists, False, True, False)
    names = [argument.name for argument in ops.adam_step_.default._schema.arguments]
    for name, message in (
        ("grads", "grads must have 4 elements, got 3"),
        ("states", "states must have 16 elements, got 15"),
        ("positions", "positions must have 4 elements, got 3"),
    ):
        wrong = list(by_position)
        wrong[names.index(name)] = wrong[names.index(name)][:-1]
        with pytest.raises(ValueError, match=message):
            ops.adam_step_(*wrong, **by_name)
    for wrong, message in (
        ({"state_names": ["step", "exp_avg", "moment", "max"]}, "no state has the name moment"),
        ({"rule": "adagrad"}, "there is no rule adagrad"),
        ({"bf16": "nearest"}, "there is no format nearest"),
        ({"state_format": "2bit"}, "there is no format 2bit"),
        ({"factor": torch.ones(3).double()}, "factor and skip must be scalars or have one"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.adam_step_(*by_position, **by_name | wrong)
    wrong = list(lists)
    wrong[1] = [*lists[1][:-1], torch.ones(2)]
    with pytest.raises(RuntimeError, match="a gradient must have the shape, dtype and device"):
        step_(wrong, False, True, False)
    for i, name in ((2, "exp_avg"), (4, "max_exp_avg_sq")):
        wrong = [[] if j == i else part for j, part in enumerate(lists)]
        with pytest.raises(RuntimeError, match=f"state of a parameter has no '{name}'"):
            step_(wrong, False, True, False)
    wrong = [[] if j == 5 else part for j, part in enumerate(lists)]
    with pytest.raises(RuntimeError, match="the state 'step' of a parameter must be"):
        step_(wrong, False, True, False)
    assert all(torch.equal(p, b) for p, b in zip(lists[0], before, strict=True))


def test_factors_of_parameters_of_one_memory():
    lists, others = (tensors(torch.float64, shapes=[(3,)] * 4) for _ in range(2))
    for ours, theirs in zip(lists, others, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            a.copy_(b)
    lists[0][2].set_(lists[0][0])
    others[0][2].set_(others[0][0])
    factor = torch.tensor([0.5, 1, 2, 3]).double()
    skip = torch.tensor([0.0, 1, 0, 0])
    by_position, by_name = call(lists, True, True, False)
    ops.adam_step_(*by_position, **by_name, factor=factor, skip=skip)
    for i in range(4):
        one = [part[i : i + 1] for part in others]
        by_position, by_name = call(one, True, True, False)
        ops.adam_step_(*by_position, **by_name, factor=factor[i], skip=skip[i])
    for ours, theirs in zip(lists, others, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_sum_of_squares():
    grads = [torch.randn(1000), torch.randn(3, 7, dtype=torch.float64), torch.zeros(0)]
    expected = sum(grad.double().square().sum() for grad in grads)
    torch.testing.assert_close(ops.adam_sum_of_squares(grads), expected)


def model(**options):
    return nn.Sequential(nn.Linear(8, 16, **options), nn.ReLU(), nn.Linear(16, 4, **options))


def train(net, optimizer, **options):
    for _ in range(2):
        net(torch.ones(3, 8, **options)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"in_backward": True}, {}])
def test_profilers_see_steps(options):
    net = model()
    optimizer = ms.AdamW(net.parameters(), **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(net, optimizer)
    (found,) = (e for e in profile.key_averages() if e.key == "memsave_ext::adam_step_")
    # All of these gradients are small, and wait for each other: one call in each step.
    assert found.count == 2


def test_profilers_see_norms():
    net = model()
    optimizer = ms.AdamW(net.parameters(), clip_global_norm=1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(net, optimizer)
    names = {event.key for event in profile.key_averages()}
    assert {"memsave_ext::adam_step_", "memsave_ext::adam_sum_of_squares"} <= names


@pytest.mark.parametrize(
    "options",
    [
        {"in_backward": True}, {}, {"in_backward": True, "max_grad_norm": 1.0, "amsgrad": True},
        {"clip_global_norm": 1.0}, {"state_dtype": "8bit", "in_backward": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fake", [False, True])
def test_steps_on_meta_and_fake_tensors(options, dtype, fake):
    where = {"device": "cpu" if fake else "meta", "dtype": dtype}
    with FakeTensorMode() if fake else contextlib.nullcontext():
        net = model(**where)
        optimizer = ms.AdamW(net.parameters(), **options)
        train(net, optimizer, **where)
    assert len(optimizer.state) == 4
    for param, state in optimizer.state.items():
        assert state["exp_avg"].shape == param.shape
        assert state["exp_avg"].device == param.device


def test_checks_of_meta_tensors():
    meta = [[t.to("meta") for t in part] for part in tensors(torch.float32)]
    step_(meta, False, True, False)
    meta[1][0] = meta[1][0].double()
    with pytest.raises(RuntimeError, match="a gradient must have the shape, dtype and device"):
        step_(meta, False, True, False)
