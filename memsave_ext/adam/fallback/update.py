"""Steps one parameter with torch's operators, by the formula of csrc/adam/adam_rule.h."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...checkpointing.fallback.stepped import note_step
from ..elements import plain, real
from ..precise import fused, square_root, wide
from ..states import StepPhase
from .coefficients import Coefficients, coefficients, rounded, update_bound
from .packing import pack, unpack
from .random_bits import Draw
from .stored import Stored


@torch.no_grad()
def update(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    *,
    position: int = 0,
    phase: StepPhase = "whole",
    factor: float | Tensor | None = None,
) -> None:
    """Steps the parameter in place, or folds a gradient into its moments.

    Args:
        grad: None for zeros.
        state: the optimizer's state of the parameter; changed in place.
        group: the parameter's entry of ``param_groups``.
        position: the parameter's position in the optimizer.
        phase: whether it folds, closes folded gradients with a step, or is a whole step.
        factor: what the gradient is multiplied by; None: 1.
    """
    own = param, dict(state)
    param, state = plain(param), {name: plain(value) for name, value in state.items()}
    _update(param, grad, state, group, position, phase, factor)
    for original, changed in ((own[0], param), *((own[1][n], v) for n, v in state.items())):
        if original is not changed:
            original.copy_(changed)


def _update(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    position: int,
    phase: StepPhase,
    factor: float | Tensor | None,
) -> None:
    folds = phase in ("first_fold", "fold")
    step = state["step"]
    if not folds:
        step.add_(1)
    if param.numel() == 0:
        torch.autograd.graph.increment_version(param)
        return
    number = step.item() if step.device.type == "cpu" else wide(step.to(param.device))
    number = number + 1 if folds else number
    stored = Stored(param, state, group, position, number)
    c = coefficients(group, number, stored.compute, param.device)
    g = torch.zeros_like(param) if grad is None else plain(grad)
    g = real(g).to(stored.compute)
    if factor is not None:
        g = g * (factor.to(g) if isinstance(factor, Tensor) else factor)
    if group["maximize"]:
        g = -g
    if folds:
        _fold(c, g, stored, first=phase == "first_fold")
    else:
        _step(c, g, stored, closes=phase == "close")
        note_step(param, position)


def _fold(c: Coefficients, grad: Tensor, stored: Stored, first: bool) -> None:
    exp_avg = stored.load("exp_avg")
    if first:
        packed = pack(exp_avg, stored.load("exp_avg_sq"), stored.random(Draw.MOMENTS))
        stored.store("exp_avg_sq", packed)
        exp_avg = _average(c, grad, exp_avg)
    else:
        exp_avg = fused(c.exp_avg_weight, grad, exp_avg)
    stored.store("exp_avg", exp_avg)


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
    denominator = square_root(second).div_(c.bias_correction2_sqrt).add_(c.eps)
    direction = exp_avg
    if stored.in_blocks:  # 8-bit rounding is so coarse that a step could have any size
        bound = update_bound(group, stored.number) * denominator
        direction = torch.maximum(torch.minimum(exp_avg, bound), -bound)
    change = (direction * c.minus_step_size).div_(denominator)
    stored.store_param(change.add_(param * c.param_decay))
    stored.store("exp_avg", exp_avg)
    stored.store("exp_avg_sq", exp_avg_sq)
    if group["amsgrad"]:
        stored.store("max_exp_avg_sq", second)


def _average(c: Coefficients, grad: Tensor, exp_avg: Tensor) -> Tensor:
    if c.adds_to_exp_avg:
        return fused(c.exp_avg_weight, grad - exp_avg, exp_avg)
    return fused(rounded(c.exp_avg_weight - 1, exp_avg.dtype), grad - exp_avg, grad)
