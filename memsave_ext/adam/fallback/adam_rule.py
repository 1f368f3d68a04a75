"""Adam and amsgrad, by the formula of csrc/adam/adam_rule.h."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precise import fused, square_root
from ..states import StepPhase
from .coefficients import Coefficients, coefficients, rounded, update_bound
from .packing import pack, unpack
from .random_bits import Draw
from .stored import Stored


def apply(grad: Tensor, stored: Stored, phase: StepPhase) -> None:
    c = coefficients(stored.group, stored.number, stored.compute, stored.device)
    if phase in ("first_fold", "fold"):
        _fold(c, grad, stored, first=phase == "first_fold")
    else:
        _step(c, grad, stored, closes=phase == "close")


def _fold(c: Coefficients, grad: Tensor, stored: Stored, first: bool) -> None:
    exp_avg = stored.load("exp_avg")
    if first:
        packed = pack(exp_avg, stored.load("exp_avg_sq"), stored.random(Draw.MOMENTS))
        stored.store(exp_avg_sq=packed)
        exp_avg = _average(c, grad, exp_avg)
    else:
        exp_avg = fused(c.exp_avg_weight, grad, exp_avg)
    stored.store(exp_avg=exp_avg)


def _step(c: Coefficients, grad: Tensor, stored: Stored, closes: bool) -> None:
    group = stored.group
    param, exp_avg = stored.load_param(), stored.load("exp_avg")
    exp_avg_sq = stored.load("exp_avg_sq")
    if c.grad_decay != 0:
        grad = fused(c.grad_decay, param, grad)
    if closes:
        before, exp_avg_sq = unpack(exp_avg_sq)
        exp_avg = fused(c.exp_avg_weight, grad, exp_avg)
        grad = fused(-c.beta1, before, exp_avg) * c.per_exp_avg_weight  # sum of all gradients
    else:
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
