"""SGD, by the formula of csrc/adam/sgd_rule.h."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precise import fused
from .coefficients import learning_rate, rounded
from .stored import Stored


def step(grad: Tensor, stored: Stored) -> None:
    group, param = stored.group, stored.load_param()
    if group["weight_decay"] != 0:
        grad = fused(rounded(float(group["weight_decay"]), stored.compute), param, grad)
    if group["momentum"] != 0:
        momentum = rounded(float(group["momentum"]), stored.compute)
        buffer = stored.load("momentum_buffer") * momentum
        buffer = _add(buffer, _weight(stored), grad)
        grad = fused(momentum, buffer, grad) if group["nesterov"] else buffer
        stored.store(momentum_buffer=buffer)
    lr = rounded(-learning_rate(group, stored.device), stored.compute)
    stored.store_param(_add(param, lr, grad))


def _add(values: Tensor, weight: float | Tensor, grad: Tensor) -> Tensor:
    """Returns values + weight * grad, in float64 fused where the weight is a number."""
    if isinstance(weight, Tensor):
        return fused(grad, weight, values)
    return fused(weight, grad, values)


def _weight(stored: Stored) -> float | Tensor:
    """Returns the gradient's weight, which dampening does not apply to in the first step."""
    rest = rounded(1 - float(stored.group["dampening"]), stored.compute)
    if isinstance(stored.number, Tensor):
        return torch.where(stored.number == 1, 1.0, rest).to(stored.compute)
    return 1.0 if stored.number == 1 else rest
