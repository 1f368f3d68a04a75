"""The loss as an autograd Function, and whether its backward steps the rows of the weight."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _leaves, _parts
from .chunks import Chunks, Rows, Settings
from .reference import Found, reference

_WEIGHT = 1  # the position of the weight among the inputs of Head


class Head(torch.autograd.Function):
    """Keeps the softmax's normalisation of each token; backward computes the logits again.

    ``target`` has class indices (N), or probabilities (N, C). Returns the fields of ``Found``.
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
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        with torch.autocast(input.device.type, enabled=False):
            chunks = Chunks(input, linear_weight, linear_bias, target, weight, settings)
            found, coefficients = chunks.loss()
        ctx.save_for_backward(input, linear_weight, linear_bias, target, weight, coefficients)
        ctx.settings = settings
        if found.predicted is not None:
            ctx.mark_non_differentiable(found.predicted)
        return found.loss.to(settings.result), found.lse, found.predicted

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        input, linear_weight, linear_bias, target, weight, coefficients = ctx.saved_tensors
        tensors = input, linear_weight, linear_bias, target, weight
        settings: Settings = ctx.settings
        needed = ctx.needs_input_grad[:3]
        with torch.autocast(input.device.type, enabled=False):
            if torch.is_grad_enabled():
                _explain(settings.debug, "backward makes a graph (create_graph=True)")
                grads = grad, grad_lse
                return *_differentiable(tensors, grads, settings, needed), None, None, None
            coefficients = coefficients.clone()
            if grad is None:
                coefficients[2:] = 0
            else:
                if target.dim() == 1:  # one that is not finite has no part where nothing counts
                    grad = torch.where(target != settings.options.ignore_index, grad, 0.0)
                coefficients[2:] *= grad.to(coefficients.dtype)
            if grad_lse is not None:  # its gradient is the softmax
                coefficients[2] += grad_lse
            rows = _begin_rows(settings.in_region, settings.debug) if needed[_WEIGHT] else None
            chunks = Chunks(*tensors, settings)
            return *chunks.gradients(coefficients, needed, rows), None, None, None


def run(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    settings: Settings,
) -> Found:
    held = _leaves.hold_accumulators((input, linear_weight, linear_bias))
    found = Found(*Head.apply(input, linear_weight, linear_bias, target, weight, settings))
    del held
    return found


def _differentiable(
    tensors: Sequence[Any],
    grads: Sequence[Tensor | None],
    settings: Settings,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Returns gradients that have a graph: those of torch's operators, with all logits."""
    # Aliases: a path from one of the tensors to another is not a part of these gradients.
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in tensors[:3]]
    wanted = [alias for alias, need in zip(aliases, needed, strict=True) if need]
    cast: list[Any] = [None if t is None else t.to(settings.dtype) for t in aliases]
    results = reference(cast[0], cast[1], tensors[3], cast[2], tensors[4], settings.options)
    used: list[Any] = [(r, g) for r, g in zip(results[:2], grads, strict=True) if g is not None]
    outputs, given = [r for r, _ in used], [g.to(r.dtype) for r, g in used]
    found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=True))
    return [next(found) if need else None for need in needed]


def _begin_rows(in_region: bool, debug: bool) -> Rows | None:
    """Begins the step of the weight of the node that autograd runs now.

    Returns None where its gradient has to be whole; ``debug`` warns why.
    """
    begun: Rows | str
    if in_region:
        begun = "the loss is inside of a checkpointed region"
    elif (native := _parts.native("adam")) is None:
        begun = "optimizers of memsave_ext run in pure Python"
    else:
        begun = native.begin_adam_rows(_WEIGHT)
    if isinstance(begun, str):
        _explain(debug, begun)
        return None
    return begun


def _explain(debug: bool, reason: str) -> None:
    if debug:
        warnings.warn(
            f"memsave_ext: linear_cross_entropy: the gradient of linear_weight is whole: {reason}",
            UserWarning,
            stacklevel=3,
        )
