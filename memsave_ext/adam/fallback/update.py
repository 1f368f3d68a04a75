"""Steps one parameter with torch's operators, by the rule of its group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.function import note_step
from ..elements import plain, real
from ..precise import wide
from ..rules import LION, is_adam, rule_of
from ..states import StepPhase
from . import adam_rule, lion_rule, sgd_rule
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
    step = state.get("step")
    if step is not None and not folds:
        step.add_(1)
    if param.numel() == 0:
        torch.autograd.graph.increment_version(param)
        return
    number: float | Tensor = 0.0  # where steps are not counted
    if step is not None:
        number = step.item() if step.device.type == "cpu" else wide(step.to(param.device))
    number = number + 1 if folds else number
    stored = Stored(param, state, group, position, number)
    g = torch.zeros_like(param) if grad is None else plain(grad)
    g = real(g).to(stored.compute)
    if factor is not None:
        g = g * (factor.to(g) if isinstance(factor, Tensor) else factor)
    if group["maximize"]:
        g = -g
    if is_adam(rule := rule_of(group)):
        adam_rule.apply(g, stored, phase)
    else:
        (lion_rule if rule is LION else sgd_rule).step(g, stored)
    if not folds:
        note_step(param, position)
