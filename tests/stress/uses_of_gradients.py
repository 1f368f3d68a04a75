"""What loops do with their gradients between backward and step()."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Params = list[Tensor]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": lambda groups: torch.optim.RAdam(groups, foreach=True),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
}


def clip_norm(params: Params, number: int) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, 0.5, foreach=(None, False)[number % 2])


def clip_by_another_norm(params: Params, number: int) -> Tensor:
    order = (1.0, math.inf, 3.0)[number % 3]
    params = [p for p in params if p.numel()]  # others have no largest element
    return torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type=order)


def clip_twice(params: Params, number: int) -> Tensor:
    first = torch.nn.utils.clip_grad_norm_(params, 10.0)
    return first + torch.nn.utils.clip_grad_norm_(params[number % 2 :: 2], 0.1)


def clip_value(params: Params, number: int) -> Tensor:
    params = [p for p in params if p.grad is not None]
    if params:  # torch's function raises otherwise
        torch.nn.utils.clip_grad_value_(params, 0.3)
    return torch.nn.utils.get_total_norm([p.grad for p in params])


def clip_by_hand(params: Params, number: int) -> Tensor:
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.stack([g.norm().double() for g in grads]).norm() if grads else torch.zeros(())
    for grad in grads:
        grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
    return norm


CLIPS = {
    "norm": clip_norm, "another norm": clip_by_another_norm, "twice": clip_twice,
    "value": clip_value, "by hand": clip_by_hand,
}  # fmt: skip


def look(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.abs().double().sum().item()
    param.grad.isfinite().all()


def assign(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def add_decay(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.add_(param.detach(), alpha=0.1)


def take_view(param: Tensor) -> None:
    """Its memory is here for good then."""
    assert param.grad is not None
    param.grad.unsqueeze(0)[..., :1].zero_()


def foreach(param: Tensor) -> None:
    torch._foreach_mul_([param.grad], 0.75)
    torch._foreach_add_([param.grad], [torch.ones_like(param)])


def drop(param: Tensor) -> None:
    param.grad = None


def set_data(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data * 2


USES = {
    "look": look, "assign": assign, "add decay": add_decay, "take view": take_view,
    "foreach": foreach, "drop": drop, "set data": set_data,
}  # fmt: skip
