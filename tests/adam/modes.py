"""Adam's modes, and what their tests share: how parameters are made, trained and compared."""

import io

import pytest
import torch
from torch import nn

import memsave_ext as ms

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Blocks of 8-bit states that are whole and not, too few elements for them, and another order of
# memory.
SHAPES = [(5000,), (3, 7), (64, 8, 3, 3), ()]
MODES = {
    "fp32": (FP32, {}),
    "fp32 amsgrad": (FP32, {"amsgrad": True, "weight_decay": 0.1}),
    "fp32, states bf16": (FP32, {"state_dtype": BF16}),
    "fp32, states bf16, amsgrad": (FP32, {"state_dtype": BF16, "amsgrad": True}),
    "fp32, states 8bit": (FP32, {"state_dtype": "8bit", "weight_decay": 0.1}),
    "fp32, clipped": (FP32, {"max_grad_norm": 0.5}),
    "fp64, clipped": (FP64, {"max_grad_norm": 0.5}),
    "fp16, states 8bit": (FP16, {"state_dtype": "8bit"}),
    "fp16, states bf16": (FP16, {"state_dtype": BF16}),
    "bf16": (BF16, {}),
    "stochastic": (BF16, {"bf16": "stochastic", "maximize": True}),
    "split": (BF16, {"bf16": "split", "amsgrad": True}),
    "split, decayed": (BF16, {"bf16": "split", "weight_decay": 0.1}),
    "stochastic, states bf16": (BF16, {"bf16": "stochastic", "state_dtype": BF16}),
    "stochastic, states 8bit": (BF16, {"bf16": "stochastic", "state_dtype": "8bit"}),
    "split, states 8bit, clipped": (
        BF16, {"bf16": "split", "state_dtype": "8bit", "max_grad_norm": 0.5}
    ),
    "split, states bf16": (BF16, {"bf16": "split", "state_dtype": BF16, "betas": (0.5, 0.9)}),
    "split, states 8bit": (BF16, {"bf16": "split", "state_dtype": "8bit"}),
    "fp32, states 4bit": (FP32, {"state_dtype": "4bit", "weight_decay": 0.1}),
    "fp16, states 4bit": (FP16, {"state_dtype": "4bit"}),
    "stochastic, states 4bit": (
        BF16, {"bf16": "stochastic", "state_dtype": "4bit", "max_grad_norm": 0.5}
    ),
    "split, states 4bit": (BF16, {"bf16": "split", "state_dtype": "4bit"}),
    "split8": (BF16, {"bf16": "split8", "weight_decay": 0.1}),
    "split8, states bf16": (BF16, {"bf16": "split8", "state_dtype": BF16, "amsgrad": True}),
    "split8, states 8bit": (BF16, {"bf16": "split8", "state_dtype": "8bit"}),
}  # fmt: skip
# Those of the other rules.
MOMENTUM = {"kind": ms.SGD, "momentum": 0.9}
LION = {"kind": ms.Lion, "lr": 1e-3}
RULE_MODES = {
    "SGD": (FP32, {"kind": ms.SGD, "weight_decay": 0.1}),
    "SGD, fp64": (FP64, {"kind": ms.SGD, "max_grad_norm": 0.5}),
    "SGD, fp16": (FP16, {"kind": ms.SGD}),
    "SGD, bf16": (BF16, {"kind": ms.SGD}),
    "SGD, stochastic": (BF16, {"kind": ms.SGD, "bf16": "stochastic", "seed": 3}),
    "SGD, split, clipped": (BF16, {"kind": ms.SGD, "bf16": "split", "max_grad_norm": 0.5}),
    "SGD, split": (BF16, {"kind": ms.SGD, "bf16": "split", "maximize": True}),
    "SGD, split8": (BF16, {"kind": ms.SGD, "bf16": "split8"}),
    "momentum": (FP32, {**MOMENTUM, "dampening": 0.1}),
    "momentum, nesterov": (FP32, {**MOMENTUM, "nesterov": True, "weight_decay": 0.1}),
    "momentum, fp64, clipped": (FP64, {**MOMENTUM, "max_grad_norm": 0.5}),
    "momentum, fp16": (FP16, MOMENTUM),
    "momentum, bf16": (BF16, MOMENTUM),
    "momentum, stochastic": (BF16, {**MOMENTUM, "bf16": "stochastic", "dampening": 0.5}),
    "momentum, split": (BF16, {**MOMENTUM, "bf16": "split", "nesterov": True}),
    "momentum, states bf16": (FP32, {**MOMENTUM, "state_dtype": BF16}),
    "momentum, states 8bit": (FP32, {**MOMENTUM, "state_dtype": "8bit", "dampening": 0.3}),
    "momentum, stochastic, states bf16": (
        BF16, {**MOMENTUM, "bf16": "stochastic", "state_dtype": BF16}
    ),
    "momentum, split8, states 8bit": (BF16, {**MOMENTUM, "bf16": "split8", "state_dtype": "8bit"}),
    "Lion": (FP32, {**LION, "weight_decay": 0.1}),
    "Lion, fp64": (FP64, {**LION, "betas": (0.95, 0.98)}),
    "Lion, fp16": (FP16, LION),
    "Lion, stochastic": (BF16, {**LION, "bf16": "stochastic", "maximize": True}),
    "Lion, split": (BF16, {**LION, "bf16": "split"}),
    "Lion, states bf16": (FP32, {**LION, "state_dtype": BF16, "max_grad_norm": 0.5}),
    "Lion, states 8bit": (FP32, {**LION, "state_dtype": "8bit"}),
    "Lion, split8, states 8bit": (BF16, {**LION, "bf16": "split8", "state_dtype": "8bit"}),
}  # fmt: skip
ALL_MODES = MODES | RULE_MODES
# What the errors of an unknown one say.
BF16_CHOICES = "bf16 must be None, 'stochastic', 'split' or 'split8'"
STATE_DTYPE_CHOICES = "state_dtype must be None, torch.float32, torch.bfloat16, '8bit' or '4bit'"

# clip_global_norm with in_backward=True.
nothing_in_backward = pytest.mark.filterwarnings("ignore:memsave_ext. clip_global_norm needs")
every_mode = pytest.mark.parametrize("mode", MODES)
every_mode_of_all = pytest.mark.parametrize("mode", ALL_MODES)
both_ways = pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])


def make(dtype=FP32, kind=ms.Adam, **options):
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return params, kind(params, **{"lr": 1e-2, **options})


def make_mode(mode, **options):
    dtype, own = ALL_MODES[mode]
    return make(dtype, **{**own, **options})


def copies(params, dtype=None):
    return [nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def gradients(params, number, noise=1.0):
    """The same for the same number, whatever the type: float16 and bfloat16 values."""
    generator = torch.Generator().manual_seed(number)
    return [
        (0.5 + noise * torch.randn(p.shape, generator=generator)).half().bfloat16().to(p.dtype)
        for p in params
    ]


def loss(params, number, **kwargs):
    grads = gradients(params, number, **kwargs)
    return sum((p * g).sum().double() for p, g in zip(params, grads, strict=True))


def train(params, optimizer, steps, start=0):
    for number in range(start, start + steps):
        optimizer.zero_grad()
        loss(params, number).backward()
        optimizer.step()


def tensors(params, optimizer):
    """Values and states, by name."""
    for i, param in enumerate(params):
        yield f"{i} param", param.detach()
        for name, value in optimizer.state[param].items():
            yield f"{i} {name}", value


def assert_same(one, other):
    """Bitwise, also across devices."""
    found, expected = dict(tensors(*one)), dict(tensors(*other))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value.cpu(), expected[name].cpu()), name


def save_and_load(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def distance(params, exact, start):
    """Of where they are, over the way that the exact ones have gone."""
    apart = sum(
        (p.double() - q.double()).square().sum() for p, q in zip(params, exact, strict=True)
    )
    way = sum((q.double() - s.double()).square().sum() for q, s in zip(exact, start, strict=True))
    return (apart / way).sqrt().item()


def exact_run(params, options, clip, steps=4):
    """torch's, in float64, with ``clip`` before each step."""
    exact = copies(params, FP64)
    optimizer = torch.optim.Adam(exact, lr=1e-2, **options)
    norms = []
    for number in range(steps):
        loss(exact, number).backward()
        norms.append(clip(exact))
        optimizer.step()
        optimizer.zero_grad()
    return exact, norms


def assert_close_to(params, exact):
    for param, expected in zip(params, exact, strict=True):
        torch.testing.assert_close(param.double(), expected, rtol=2e-6, atol=1e-6)


def clip_all(max_norm):
    return lambda params: nn.utils.clip_grad_norm_(params, max_norm)
