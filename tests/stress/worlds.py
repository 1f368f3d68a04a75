"""What random programs see: tensors, and regions that are ours, torch's, or none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import memsave_ext as ms

from .programs import Program


class Boom(RuntimeError):
    """What programs raise."""


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Calls(nn.Module):
    """A module around a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def plain_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for option in OPTIONS:
        kwargs.pop(option, None)
    return function(*args, **kwargs)


OPTIONS = [
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "early_stop", "debug",
    "offload",
]  # fmt: skip


def plain_sequential(functions: list[Callable[..., Any]], segments: int, *inputs: Any) -> Any:
    for function in functions:
        inputs = (function(*inputs),)
    return inputs[0]


def plain_adam(params: Any, in_backward: bool, **options: Any) -> torch.optim.Optimizer:
    options.pop("small_bytes", None)
    return ms.Adam(params, **options)


PLAIN = SimpleNamespace(
    checkpoint=plain_checkpoint,
    CheckpointFunction=SimpleNamespace(apply=lambda f, n, *args: f(*args[:n])),
    checkpoint_sequential=plain_sequential,
    checkpoint_modules=lambda model, select: None,
    patch_torch_checkpoint=contextlib.nullcontext,
    count_once_contexts=None,
    is_recomputing=lambda: False,
    BatchNorm1d=ms.BatchNorm1d,
    Adam=plain_adam,
)
PLAIN_TORCH = SimpleNamespace(checkpoint=plain_checkpoint)


def flat(things: tuple[Any, ...]) -> list[Tensor]:
    """Tensors, and modules' parameters, each once."""
    tensors = []
    for thing in things:
        tensors += thing.parameters() if isinstance(thing, nn.Module) else [thing]
    return list({id(t): t for t in tensors}.values())


def statistics(*modules: nn.Module) -> list[Tensor]:
    norms = [m for module in modules for m in module if isinstance(m, ms.BatchNorm1d)]
    return [b for norm in norms for b in norm.buffers()]


def torch_statistics(*modules: nn.Module) -> list[Tensor]:
    norms = [m for module in modules for m in module if isinstance(m, nn.BatchNorm1d)]
    return [b for norm in norms if not isinstance(norm, ms.BatchNorm1d) for b in norm.buffers()]


def in_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def namespace(program: Program, mode: str) -> dict[str, Any]:
    """What a program's source sees. ``mode``: "ours", "plain", or "torch": torch's regions only."""
    dtype = getattr(torch, program.dtype)

    def leaf(number: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(number + 1)
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def fixed(module: nn.Module) -> nn.Module:
        for number, param in enumerate(module.parameters()):
            param.data = leaf(10 + number, *param.shape)
        return module

    def checkpointed(module: nn.Module) -> nn.Module:
        if mode == "ours":
            ms.checkpoint_modules(module, lambda m: m is module)
        return module

    return {
        "torch": torch, "nn": nn, "F": F, "P": nn.Parameter, "Cube": Cube, "Boom": Boom,
        "Calls": Calls, "DTYPE": dtype, "leaf": leaf, "fixed": fixed, "checkpointed": checkpointed,
        "RAMP": torch.linspace(-1, 1, 12, dtype=dtype).view(4, 3),
        "ms": ms if mode == "ours" else PLAIN,
        "cp": PLAIN_TORCH if mode == "plain" else torch.utils.checkpoint,
        "listed": lambda *things: [t for t in flat(things) if t.requires_grad],
        "grads": lambda *things: [t.grad for t in flat(things)],
        "parameters": lambda *modules: flat(modules),
        "statistics": statistics, "torch_statistics": torch_statistics, "in_thread": in_thread,
        "twice": lambda g: g if g is None else g * 2,
    }  # fmt: skip
