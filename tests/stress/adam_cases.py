"""Random combinations of Adam's options, parameters and gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .uses_of_gradients import CLIPS, OPTIMIZERS, USES

Case = dict[str, Any]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16,
          torch.bfloat16, torch.complex64, torch.complex128]  # fmt: skip
SHAPES = [(), (1,), (3,), (4, 5), (2, 3, 4, 5), (17, 33), (70, 70), (0, 3), (257,)]
LARGE = [(200, 170), (34_000,), (4, 100, 17, 5), (600, 500)]  # of which gradients can leave
LAYOUTS = ["contiguous", "contiguous", "transposed", "sliced"]
KINDS = ["plain", "plain", "plain", "expanded", "conj", "neg", "strided"]  # of gradients
DEFAULTS: Case = {
    "bf16": None, "state_dtype": None, "amsgrad": False, "maximize": False, "weight_decay": 0.0,
    "decoupled": False, "eps": 1e-8, "betas": (0.9, 0.999), "lr_tensor": False, "scheduler": None,
    "max_grad_norm": None, "clip_global_norm": None, "norm_pass": False, "scaler": False,
    "micro": 1, "accumulate_when": False, "small_bytes": 1 << 16,
    "bucket_bytes": 1 << 20, "add_group": None, "interlude": None, "zero_to_none": True,
    "missing": False, "seed": 0, "kinds": False, "elsewhere": None,
}  # fmt: skip


def generate(seed: int, without: Sequence[str] = ()) -> Case:
    rng = random.Random(seed)

    def some(value: Any, chance: float, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    case: Case = {
        "bf16": some(rng.choice(["stochastic", "split", "split8"]), 0.3, None),
        "state_dtype": some(rng.choice(["8bit", "4bit", torch.bfloat16]), 0.3, None),
        "amsgrad": some(True, 0.2, False),
        "maximize": some(True, 0.2, False),
        # Exact in float32: where it cancels a gradient nothing must be left for Adam to magnify.
        "weight_decay": some(rng.choice([2.0**-7, 0.25]), 0.5, 0.0),
        "decoupled": some(True, 0.5, False),
        "eps": rng.choice([1e-8, 1e-8, 1e-4, 1e-12]),
        "betas": rng.choice([(0.9, 0.999), (0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.95)]),
        "lr_tensor": some(True, 0.15, False),
        "scheduler": some(rng.choice(["step", "exponential", "by hand"]), 0.3, None),
        "max_grad_norm": some(rng.choice([0.5, 100.0]), 0.2, None),
        "clip_global_norm": some(rng.choice([0.5, 100.0]), 0.15, None),
        "norm_pass": some(True, 0.15, False),
        "scaler": some(True, 0.15, False),
        "micro": some(rng.choice([2, 3]), 0.4, 1),
        "accumulate_when": some(True, 0.4, False),
        "small_bytes": rng.choice([0, 100, 1 << 16]),
        "bucket_bytes": rng.choice([0, 64, 1 << 20]),
        "add_group": some(rng.randrange(4), 0.2, None),
        "interlude": some(
            (rng.choice(["save", "deepcopy", "pickle", "remove_hooks", "fp32"]),
             rng.randrange(1, 4)),
            0.4, None,
        ),
        "zero_to_none": some(False, 0.2, True),
        "missing": some(True, 0.3, False),
        "seed": rng.choice([0, 5, 2**63]),
        "kinds": some(True, 0.3, False),
    }  # fmt: skip
    for name in without:
        if name in case:
            case[name] = DEFAULTS[name]
    case.update(number=seed, steps=rng.randint(1, 6), params=[])
    for _ in range(rng.randint(1, 5)):
        dtype = rng.choice(DTYPES)
        if case["bf16"]:
            dtype = torch.bfloat16
        elif case["state_dtype"]:
            dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        shape, layout = rng.choice(SHAPES), rng.choice(LAYOUTS)
        layout = "contiguous" if case["state_dtype"] in ("8bit", "4bit") else layout
        case["params"].append((dtype, shape, layout, rng.randrange(2)))
    case["elsewhere"] = None
    if rng.random() < 0.3 and "elsewhere" not in without:
        case["elsewhere"] = {
            "optimizer": some(rng.choice(list(OPTIMIZERS)), 0.3, None),
            "clip": some(rng.choice(list(CLIPS)), 0.7, None),
            "use": some(rng.choice(list(USES)), 0.3, None),
            "reads": some(True, 0.3, None),
            "states_on": some(True, 0.2, None),
            "in_backward": some(True, 0.3, None),
            "within": some(True, 0.5, None),
        }
        case["params"] = [
            (dtype, rng.choice(LARGE) if rng.random() < 0.7 else shape, layout, group)
            for dtype, shape, layout, group in case["params"]
        ]
    return settled(case)


def settled(case: Case) -> Case:
    """Without what is documented not to be combined."""
    if case["state_dtype"] in ("8bit", "4bit"):
        case["amsgrad"] = False
    if case["clip_global_norm"] is not None:
        case["norm_pass"] = False
    if case["norm_pass"]:
        case["micro"] = 1
    if case["scaler"] and case["interlude"]:
        case["interlude"] = None
    if case["bf16"] in ("split", "split8") and case["interlude"] and case["interlude"][0] == "fp32":
        case["interlude"] = None  # which is without what these keep beside a parameter
    if case["elsewhere"]:
        settle_elsewhere(case, case["elsewhere"])
    if case["scaler"]:  # which torch has for real numbers only
        swap = {torch.complex64: torch.float32, torch.complex128: torch.float64}
        case["params"] = [(swap.get(p[0], p[0]), *p[1:]) for p in case["params"]]
    if case["missing"]:  # or gradients of zeros stay after backward, and none in it
        case["zero_to_none"] = True
    return case


def settle_elsewhere(case: Case, chosen: dict[str, Any]) -> None:
    case["norm_pass"] = False
    if case["clip_global_norm"] is not None:
        case["max_grad_norm"] = None
    swap = {}
    if case["scaler"]:  # which wants gradients, and they are not to be in half precision
        case["missing"] = False
        swap = {torch.float16: torch.float32}
    if chosen["clip"] == "value":
        swap |= {torch.complex64: torch.float32, torch.complex128: torch.float64}
    case["params"] = [(swap.get(p[0], p[0]), *p[1:]) for p in case["params"]]
    if chosen["optimizer"] is not None:
        chosen["states_on"] = None
        for name in ("bf16", "state_dtype", "clip_global_norm", "max_grad_norm", "lr_tensor"):
            case[name] = DEFAULTS[name]
        if case["interlude"] and case["interlude"][0] == "fp32":
            case["interlude"] = ("save", case["interlude"][1])


class Give(torch.autograd.Function):
    """A number whose gradient is what was given."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        grad = ctx.grad
        return (grad if scale.item() == 1 else grad * scale.to(grad.real.dtype)), None


def parameter(dtype: torch.dtype, shape: Any, layout: str, number: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(number)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        value = torch.complex(value, value.flip(0) if value.dim() else value + 1)
    value = value.to(dtype)
    if layout == "transposed" and value.dim() == 4:
        value = value.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed" and value.dim() == 2:
        value = value.t().contiguous().t()
    elif layout == "sliced" and value.dim():
        value = torch.stack([value, value], -1)[..., 0]
    return nn.Parameter(value)


def gradient(param: Tensor, kind: str, rng: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    base = param.detach()
    real = torch.randn(base.shape, generator=generator) * 10 ** rng.uniform(-2, 1)
    if base.is_complex():
        other = torch.randn(base.shape, generator=generator)
        value = torch.complex(real, other).to(base.dtype)
        return value.conj() if kind == "conj" else value
    value = real.to(base.dtype)
    if kind == "neg":
        pair = torch.complex(value.double(), value.double()).conj().imag
        return pair if base.dtype == torch.float64 else value
    if kind == "expanded" and base.dim():
        return value[:1].expand(base.shape) if base.shape[0] else value
    if kind == "strided" and base.dim():
        return torch.stack([value, value], -1)[..., 1]
    return value
