"""The loss as an autograd Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _leaves
from . import rows
from .chunks import Chunks, Settings
from .reference import reference


class Head(torch.autograd.Function):
    """Keeps the softmax's normalisation of each token; backward computes the logits again.

    ``target`` has class indices (N), or probabilities (N, C).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            chunks = Chunks(input, linear_weight, linear_bias, target, weight, settings)
            loss, coefficients = chunks.loss()
        ctx.save_for_backward(input, linear_weight, linear_bias, target, weight, coefficients)
        ctx.settings = settings
        return loss.to(settings.result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, linear_weight, linear_bias, target, weight, coefficients = ctx.saved_tensors
        tensors = input, linear_weight, linear_bias, target, weight
        settings: Settings = ctx.settings
        needed = ctx.needs_input_grad[:3]
        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():
                rows.explain(settings.debug, "backward makes a graph (create_graph=True)")
                return *_differentiable(tensors, grad, settings, needed), None, None, None
            coefficients = coefficients.clone()
            if target.dim() == 1:  # a gradient that is not finite has no part where nothing counts
                grad = torch.where(target != settings.options.ignore_index, grad, 0.0)
            coefficients[2:] *= grad.to(coefficients.dtype)
            begun = rows.begin(settings.in_region, settings.debug) if needed[1] else None
            chunks = Chunks(*tensors, settings)
            return *chunks.gradients(coefficients, needed, begun), None, None, None


def run(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    settings: Settings,
) -> Tensor:
    held = _leaves.hold_accumulators((input, linear_weight, linear_bias))
    loss: Tensor = Head.apply(input, linear_weight, linear_bias, target, weight, settings)
    del held
    return loss


def _differentiable(
    tensors: Sequence[Any], grad: Tensor, settings: Settings, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns gradients that have a graph: those of torch's operators, with all logits."""
    # Aliases: a path from one of the tensors to another is not a part of these gradients.
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in tensors[:3]]
    wanted = [alias for alias, need in zip(aliases, needed, strict=True) if need]
    cast: list[Any] = [None if t is None else t.to(settings.dtype) for t in aliases]
    loss = reference(cast[0], cast[1], tensors[3], cast[2], tensors[4], settings.options)
    found = iter(torch.autograd.grad(loss, wanted, grad.to(loss.dtype), create_graph=True))
    return [next(found) if need else None for need in needed]
