"""The coefficients of a step, computed from its options and number as in csrc/adam/adam_rule.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..precise import wide


class Coefficients(NamedTuple):
    """Coefficients in the compute dtype, as in csrc/adam/math.h.

    Those that depend on a step count or lr on a device are tensors there.
    """

    grad_decay: float
    param_decay: float | Tensor
    exp_avg_weight: float
    # Whether exp_avg is interpolated starting from its old value. Otherwise it starts from the
    # gradient, so that a beta1 of 0 gives exactly the gradient.
    adds_to_exp_avg: bool
    beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float | Tensor
    per_bias_correction2_sqrt: float | Tensor
    eps: float
    minus_step_size: float | Tensor
    per_exp_avg_weight: float


def coefficients(
    group: Mapping[str, Any], number: float | Tensor, dtype: torch.dtype, device: torch.device
) -> Coefficients:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr = learning_rate(group, device)
    decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    correction2_sqrt = (1 - beta2**number) ** 0.5
    return Coefficients(
        grad_decay=rounded(group["weight_decay"] - decay, dtype),
        param_decay=rounded(1 - lr * decay, dtype),
        exp_avg_weight=rounded(1 - beta1, dtype),
        adds_to_exp_avg=abs(1 - beta1) < 0.5,
        beta1=rounded(beta1, dtype),
        beta2=rounded(beta2, dtype),
        one_minus_beta2=rounded(1 - beta2, dtype),
        bias_correction2_sqrt=rounded(correction2_sqrt, dtype),
        per_bias_correction2_sqrt=rounded(1 / correction2_sqrt, dtype),
        eps=rounded(group["eps"], dtype),
        minus_step_size=rounded(-(lr / (1 - beta1**number)), dtype),
        per_exp_avg_weight=rounded(1 / (1 - beta1), dtype),
    )


def learning_rate(group: Mapping[str, Any], device: torch.device) -> Any:
    """Returns a number, or a tensor on the parameter's device where it lies on a device."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    return lr.item() if lr.device.type == "cpu" else wide(lr.to(device))


_N = TypeVar("_N", float, Tensor, float | Tensor)


def rounded(value: _N, dtype: torch.dtype) -> _N:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return ctypes.c_float(value).value if dtype == torch.float32 else value


def update_bound(group: Mapping[str, Any], number: float | Tensor) -> Tensor:
    """Returns an upper bound of exp_avg / (exp_avg_sq.sqrt() / bias_correction2_sqrt).

    It follows from the Cauchy-Schwarz inequality, because both are sums over the same gradients.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if not isinstance(number, Tensor):
        number = torch.tensor(number, dtype=torch.float64)
    ratio = beta1 * beta1 / torch.full_like(number, beta2)
    left1, left2 = beta1**number, beta2**number
    # ratio**number. Where beta2**number underflows to 0 it is 0 or infinite.
    left = torch.where(left2 > 0, left1 * left1 / left2, torch.where(ratio < 1, 0.0, torch.inf))
    steps = 1 - left
    bound = (1 - beta1) * ((1 - left2) / (1 - beta2) * steps / (1 - ratio)).sqrt()
    return torch.where(bound > 0, bound * 1.0001, 1e30).float()
