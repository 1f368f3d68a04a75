"""The adam operator as torch's dispatcher sees it."""

import pytest
import torch
from torch.library import opcheck

step_ = torch.ops.memsave_ext.adam_step_.default
OPTIONS = (None, 1e-2, 0.9, 0.99, 1e-8, 0.1)


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
    opcheck(step_, (*tensors(dtype, amsgrad=amsgrad), *OPTIONS, True, amsgrad, False))


def test_versions_are_bumped():
    lists = tensors(torch.float32)
    before = [t._version for t in lists[0]]
    step_(*lists, *OPTIONS, False, True, False)
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
    step_(*lists, *OPTIONS, decoupled, amsgrad, maximize)
    _, lr, beta1, beta2, eps, decay = OPTIONS
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


def test_bad_lists():
    lists = tensors(torch.float32)
    before = [p.clone() for p in lists[0]]
    for i, name in ((1, "grads"), (2, "exp_avgs"), (4, "max_exp_avg_sqs"), (5, "steps")):
        wrong = [part[:-1] if j == i else part for j, part in enumerate(lists)]
        with pytest.raises(ValueError, match=f"{name} must have 4 tensors"):
            step_(*wrong, *OPTIONS, False, True, False)
    wrong = list(lists)
    wrong[1] = [*lists[1][:-1], torch.ones(2)]
    with pytest.raises(RuntimeError, match="a gradient must have the shape, dtype and device"):
        step_(*wrong, *OPTIONS, False, True, False)
    assert all(torch.equal(p, b) for p, b in zip(lists[0], before, strict=True))
