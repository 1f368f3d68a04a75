"""The loss as an autograd Function, and whether its backward steps the rows of the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _leaves, _parts
from ..shared.warn import warn
from .chunks import Chunk, Chunks, Rows, Settings
from .cross_entropy import CrossEntropy
from .reference import Found, Options, reference

_WEIGHT = 1  # the position of the weight among the inputs of Head, and of others like it


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
        low: Tensor | None,
        low_weight: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        settings: Settings,
        options: Options,
        result: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        tensors = input, linear_weight, linear_bias, low, low_weight, target, weight
        with torch.autocast(input.device.type, enabled=False):
            found, coefficients = CrossEntropy(*tensors, settings, options).loss()
        ctx.save_for_backward(*tensors, coefficients)
        ctx.settings, ctx.options = settings, options
        if found.predicted is not None:
            ctx.mark_non_differentiable(found.predicted)
        return found.loss.to(result), found.lse, found.predicted, found.entropy

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any, grad_entropy: Tensor | None
    ) -> Any:
        input, linear_weight, linear_bias, low, low_weight, *others = ctx.saved_tensors
        layer = input, linear_weight, linear_bias, low, low_weight
        target, weight, coefficients = others
        options: Options = ctx.options
        none = (None,) * 5
        with torch.autocast(input.device.type, enabled=False):
            if torch.is_grad_enabled():

                def results(*cast: Any) -> list[Tensor | None]:
                    x, w, b, low, low_weight = cast
                    found = reference(x, w, target, b, weight, options, low, low_weight, wide=True)
                    return [found.loss, found.lse, found.entropy]

                grads = [grad, grad_lse, grad_entropy]
                return *differentiable(ctx, results, layer, grads), *none
            entropy = coefficients[4:]
            coefficients = coefficients[: 4 if grad_entropy is None else 5].clone()
            if grad is None:
                coefficients[2:4] = 0
            else:
                if target.dim() == 1:  # one that is not finite has no part where nothing counts
                    grad = torch.where(target != options.ignore_index, grad, 0.0)
                coefficients[2:4] *= grad.to(coefficients.dtype)
            if grad_lse is not None:  # its gradient is the softmax
                coefficients[2] += grad_lse
            if grad_entropy is not None:  # its gradient is -p * (log(p) + entropy)
                coefficients[4] = -grad_entropy
                coefficients[2] -= grad_entropy * entropy[0]
            chunks = CrossEntropy(*layer, target, weight, ctx.settings, options)
            needed = ctx.needs_input_grad[:5]
            return *gradients(ctx, chunks, chunks.replaced(coefficients), needed), *none


def run(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    low: Tensor | None,
    low_weight: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    settings: Settings,
    options: Options,
    result: torch.dtype,
) -> Found:
    layer = input, linear_weight, linear_bias, low, low_weight
    held = _leaves.hold_accumulators(layer)
    found = Found(*Head.apply(*layer, target, weight, settings, options, result))
    del held
    return found


def gradients(
    ctx: Any, chunks: Chunks, replaced: Iterable[Chunk], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns those of input, weight, bias, ``low`` and ``low_weight`` that are ``needed``, or
    steps the weight's rows, in the backward of a node whose first inputs these are. ``replaced``:
    chunks with gradients in place of logits."""
    rows = _begin_rows(ctx.settings) if needed[_WEIGHT] else None
    return chunks.gradients(replaced, needed, rows)


def differentiable(
    ctx: Any,
    results: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Returns gradients that have a graph, of ``tensors``, the node's first inputs: those of
    torch's operators, with all logits. ``results`` makes of these what its forward has made."""
    settings: Settings = ctx.settings
    if settings.vocabulary is not None:
        raise RuntimeError(
            "the loss of a linear_weight that is sharded over its classes has no double backward "
            "(create_graph=True), which would need whole logits"
        )
    _explain(settings.debug, "backward makes a graph (create_graph=True)")
    needed = ctx.needs_input_grad[: len(tensors)]
    # Aliases: a path from one of the tensors to another is not a part of these gradients.
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in tensors]
    wanted = [alias for alias, need in zip(aliases, needed, strict=True) if need]
    cast: list[Any] = [None if t is None else t.to(settings.dtype) for t in aliases]
    used: list[Any] = [(r, g) for r, g in zip(results(*cast), grads, strict=True) if g is not None]
    outputs, given = [r for r, _ in used], [g.to(r.dtype) for r, g in used]
    found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=True))
    return [next(found) if need else None for need in needed]


def _begin_rows(settings: Settings) -> Rows | None:
    """Begins the step of the weight of the node that autograd runs now.

    Returns None where its gradient has to be whole; ``debug`` warns why.
    """
    begun: Rows | str
    if settings.in_region:
        begun = "the loss is inside of a checkpointed region"
    elif settings.vocabulary is not None:
        begun = "the weight is a shard, a DTensor"
    elif (native := _parts.native("adam")) is None:
        begun = "optimizers of memsave_ext run in pure Python"
    else:
        begun = native.begin_adam_rows(_WEIGHT)
    if isinstance(begun, str):
        _explain(settings.debug, begun)
        return None
    return begun


def _explain(debug: bool, reason: str) -> None:
    if debug:
        warn(
            "memsave_ext: loss head: the gradient of linear_weight is made as a whole, not part by "
            f"part: {reason}",
        )
