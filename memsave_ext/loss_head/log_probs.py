"""The log-probabilities of chosen tokens, of which losses of preferences and policies are made."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .chunks import Chunks, Settings, shape_of_chunk
from .function import (
    as_asked,
    check_low_rank,
    check_softcap,
    check_tensors,
    logits_dtype,
    loss_of,
)
from .reference import Found
from .vocabulary import replicated

_OF_CAPPED = 3  # tensors of a chunk's logits at once, where a mean is of capped ones


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    return_lse: bool = False,
    return_predicted: bool = False,
    return_entropy: bool = False,
    debug: bool = False,
) -> Any:
    """Compute ``log_softmax(linear(input, linear_weight))`` at the target of each token, without
    the logits, forward and backward::

        log_probs = ms.linear_log_probs(hidden[:, :-1], head.weight, ids[:, 1:])
        log_probs.sum(1)  # of each sequence

    It is the :func:`linear_cross_entropy` of each token with its sign turned, and what is said
    there of chunks and of rows that are stepped holds here, too.

    Args:
        input: ``(..., in_features)``, such as hidden states ``(batch, tokens, in_features)``.
        linear_weight: ``(C, in_features)``, of the C classes: the head's.
        target: ``(...)``, the class of each token, int64.
        linear_bias: ``(C)``.
        low_rank: ``(low, b)``, of shapes ``(..., r)`` and ``(C, r)``, as in
            :func:`linear_cross_entropy`.
        ignore_index: tokens of this target have a log-probability of 0 and no gradient.
        softcap: logits are ``softcap * tanh(logits / softcap)``, as in Gemma. None: they stay.
        temperature: logits, capped ones where there is a cap, are divided by it. For a model that
            multiplies its logits by a number, ``1 / number``.
        chunk_size, debug: as in :func:`linear_cross_entropy`.
        return_lse: also return the log-sum-exp of each token's logits, which has a gradient.
        return_predicted: also return the class of each token's largest logit, int64.
        return_entropy: also return the entropy of each token's softmax, in nats, those of ignored
            tokens, too; it has a gradient, of a bonus for instance.

    Returns:
        The log-probabilities ``(...)``, in float32, or in float64 for inputs of it; or a tuple of
        them and of what else is asked for, of their shape, in the order of the arguments.

    Raises:
        TypeError: something else is given for a tensor, as a module for its weight.
        ValueError: shapes do not fit each other; ``temperature``, ``softcap`` or ``chunk_size`` is
            not allowed.
        RuntimeError, IndexError: other wrong arguments, as torch raises them.
    """
    check_tensors(input=input, linear_weight=linear_weight, target=target)
    if linear_weight.dim() != 2 or input.shape != (*target.shape, linear_weight.shape[1]):
        raise ValueError(
            "input, linear_weight and target must have shapes (..., in_features), (C, in_features) "
            f"and (...), got {tuple(input.shape)}, {tuple(linear_weight.shape)} and "
            f"{tuple(target.shape)}"
        )
    check_temperature(temperature)
    check_softcap("softcap", softcap)
    check_low_rank(low_rank, input, linear_weight)
    rows, linear_bias, low_rank = scaled_layer(input, linear_bias, low_rank, 1 / temperature)
    found = loss_of(
        rows,
        linear_weight,
        replicated(target).reshape(-1),
        linear_bias=linear_bias,
        low_rank=low_rank,
        reduction="none",
        ignore_index=ignore_index,
        softcap=None if softcap is None else softcap / temperature,
        chunk_size=chunk_size,
        loss_dtype=torch.promote_types(input.dtype, torch.float32),
        return_lse=return_lse,
        return_predicted=return_predicted,
        return_entropy=return_entropy,
        debug=debug,
    )
    more = (None if v is None else v.view(target.shape) for v in found[1:])
    return as_asked(Found(-found.loss.view(target.shape), *more))


@torch.no_grad()
def mean_logits(
    input: Tensor,
    linear_weight: Tensor,
    *,
    linear_bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    softcap: float | None,
) -> Tensor:
    """Returns (N), the mean of each token's logits over the classes, in float32 at least. Capped
    ones are computed in chunks; the mean of others is the product with the mean row."""
    wide = torch.promote_types(input.dtype, torch.float32)
    if softcap is None:
        with torch.autocast(input.device.type, enabled=False):
            total = input.to(wide) @ linear_weight.mean(0, dtype=wide)
            if linear_bias is not None:
                total += linear_bias.mean(dtype=wide)
            if low_rank is not None:
                total += low_rank[0].to(wide) @ low_rank[1].mean(0, dtype=wide)
            return total
    tokens, classes = shape_of_chunk(
        len(input), linear_weight.shape, linear_weight.is_cuda, _OF_CAPPED
    )
    settings = Settings(logits_dtype(input), classes, tokens, in_region=False, debug=False)
    total = input.new_zeros(len(input), dtype=wide)
    with torch.autocast(input.device.type, enabled=False):
        for chunk in Chunks(input, linear_weight, linear_bias, settings, *(low_rank or ())):
            capped = torch.tanh(chunk.logits.to(wide) / softcap)
            total[chunk.tokens] += softcap * capped.sum(1)
    return total / len(linear_weight)


def check_temperature(temperature: float) -> None:
    if not (isinstance(temperature, (int, float)) and 0 < temperature < math.inf):
        raise ValueError(f"temperature must be a positive number, got {temperature!r}")


def scaled(input: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """Returns an input and a bias that make the same layer's logits times ``scale``."""
    if scale == 1:
        return input, bias
    return input * scale, None if bias is None else bias * scale


def scaled_layer(
    input: Tensor, bias: Tensor | None, low_rank: tuple[Tensor, Tensor] | None, scale: float
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Returns the same of a whole layer, as rows of one token each."""
    input = replicated(input)
    tokens = input.shape[:-1].numel()
    rows, bias = scaled(input.reshape(tokens, input.shape[-1]), bias, scale)
    if low_rank is not None:
        low, low_weight = replicated(low_rank[0]), low_rank[1]
        low_rank = scaled(low.reshape(tokens, low.shape[-1]), None, scale)[0], low_weight
    return rows, bias, low_rank
