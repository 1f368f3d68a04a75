"""Steps one parameter with torch's operators, by the rule of its group: csrc/adam/arithmetic.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...checkpoint.function import note_step
from .. import errors
from ..elements import plain, real
from ..precise import fused, square_root, wide
from ..rules import LION, is_adam, rule_of
from .stored import Stored


@torch.no_grad()
def update(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    *,
    position: int = 0,
    factor: float | Tensor | None = None,
) -> None:
    """Steps the parameter in place.

    Args:
        state: the optimizer's state of the parameter; changed in place.
        group: the parameter's entry of ``param_groups``.
        position: the parameter's position in the optimizer.
        factor: what the gradient is multiplied by; None: 1.
    """
    own = param, dict(state)
    param, state = plain(param), {name: plain(value) for name, value in state.items()}
    _update(param, grad, state, group, position, factor)
    for original, changed in ((own[0], param), *((own[1][n], v) for n, v in state.items())):
        if original is not changed:
            original.copy_(changed)


def _update(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    position: int,
    factor: float | Tensor | None,
) -> None:
    step = state.get("step")
    if step is not None:
        if param.is_cuda and not step.is_cuda and torch.cuda.is_current_stream_capturing():
            raise errors.count_in_graph()
        step.add_(1)
    if param.numel() == 0:
        torch.autograd.graph.increment_version(param)
        return
    number: float | Tensor = 0.0  # where steps are not counted
    if step is not None:
        number = step.item() if step.device.type == "cpu" else wide(step.to(param.device))
    stored = Stored(param, state, group, position, number)
    g = real(plain(grad)).to(stored.compute)
    if factor is not None:
        g = g * (factor.to(g) if isinstance(factor, Tensor) else factor)
    if group["maximize"]:
        g = -g
    if is_adam(rule := rule_of(group)):
        _adam_step(g, stored)
    else:
        (_lion_step if rule is LION else _sgd_step)(g, stored)
    note_step(param, position)


# ---- Adam and amsgrad --------------------------------------------------------------------------


def _adam_step(grad: Tensor, stored: Stored) -> None:
    group = stored.group
    c = coefficients(group, stored.number, stored.compute, stored.device)
    param, exp_avg = stored.load_param(), stored.load("exp_avg")
    exp_avg_sq = stored.load("exp_avg_sq")
    if c.grad_decay != 0:
        grad = fused(c.grad_decay, param, grad)
    exp_avg = _average(c, grad, exp_avg)
    exp_avg_sq = fused(grad * c.one_minus_beta2, grad, exp_avg_sq * c.beta2)
    second = exp_avg_sq
    if group["amsgrad"]:
        second = torch.maximum(stored.load("max_exp_avg_sq"), exp_avg_sq)
    root, direction = square_root(second), exp_avg
    if stored.in_blocks:  # 8-bit rounding is so coarse that a step could have any size
        eps = torch.full_like(root, c.eps)
        denominator = fused(root, c.per_bias_correction2_sqrt, eps)
        bound = update_bound(group, stored.number) * denominator
        direction = torch.maximum(torch.minimum(exp_avg, bound), -bound)
    else:
        denominator = root.div_(c.bias_correction2_sqrt).add_(c.eps)
    change = (direction * c.minus_step_size).div_(denominator)
    stored.store_param(change.add_(param * c.param_decay))
    stored.store(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if group["amsgrad"]:  # which is not in blocks
        stored.store(max_exp_avg_sq=second)


def _average(c: Coefficients, grad: Tensor, exp_avg: Tensor) -> Tensor:
    if c.adds_to_exp_avg:
        return fused(c.exp_avg_weight, grad - exp_avg, exp_avg)
    return fused(rounded(c.exp_avg_weight - 1, exp_avg.dtype), grad - exp_avg, grad)


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
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float | Tensor
    per_bias_correction2_sqrt: float | Tensor
    eps: float
    minus_step_size: float | Tensor


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
        beta2=rounded(beta2, dtype),
        one_minus_beta2=rounded(1 - beta2, dtype),
        bias_correction2_sqrt=rounded(correction2_sqrt, dtype),
        per_bias_correction2_sqrt=rounded(1 / correction2_sqrt, dtype),
        eps=rounded(group["eps"], dtype),
        minus_step_size=rounded(-(lr / (1 - beta1**number)), dtype),
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
        number = torch.tensor(number, dtype=torch.float64, device="cpu")
    ratio = beta1 * beta1 / torch.full_like(number, beta2)
    left1, left2 = beta1**number, beta2**number
    # ratio**number. Where beta2**number underflows to 0 it is 0 or infinite.
    left = torch.where(left2 > 0, left1 * left1 / left2, torch.where(ratio < 1, 0.0, torch.inf))
    # The sum of all powers of ratio until the step's, as in csrc/adam/arithmetic.h.
    sums = torch.where((1 - ratio).abs() > 1e-11, (1 - left) / (1 - ratio), number)
    bound = (1 - beta1) * ((1 - left2) / (1 - beta2) * sums).sqrt()
    return torch.where(bound > 0, bound * 1.0001, 1e30).float()


# ---- Lion --------------------------------------------------------------------------------------


def _lion_step(grad: Tensor, stored: Stored) -> None:
    group, dtype = stored.group, stored.compute
    lr = learning_rate(group, stored.device)
    param, exp_avg = stored.load_param(), stored.load("exp_avg")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    total = fused(rounded(1 - beta1, dtype), grad, exp_avg * rounded(beta1, dtype))
    exp_avg = fused(rounded(1 - beta2, dtype), grad, exp_avg * rounded(beta2, dtype))
    change = torch.where(total.isnan(), total, total.sign()) * rounded(-lr, dtype)
    decay = rounded(1 - lr * group["weight_decay"], dtype)
    stored.store_param(change.add_(param * decay))
    stored.store(exp_avg=exp_avg)


# ---- SGD ---------------------------------------------------------------------------------------


def _sgd_step(grad: Tensor, stored: Stored) -> None:
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
