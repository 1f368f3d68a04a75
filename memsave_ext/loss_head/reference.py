"""The loss with torch's operators, whose logits exist as a whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Found(NamedTuple):
    """What a call finds; ``lse`` and ``predicted`` have the shape of losses that are not reduced.

    ``lse`` is the logarithm of the sum of the exponentials of a token's logits, in float32 at
    least, ``predicted`` the class of the largest one, and ``entropy`` that of their softmax, in
    nats and the type of ``lse``; None where none is asked for.
    """

    loss: Tensor
    lse: Tensor | None
    predicted: Tensor | None
    entropy: Tensor | None


class Options(NamedTuple):
    """What the loss depends on beside its tensors."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    lse: bool = False  # whether it is asked for
    predicted: bool = False  # whether it is
    entropy: bool = False  # whether it is


def reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
    *,
    wide: bool = False,
) -> Found:
    """Differentiable as often as one likes. Raises torch's errors for wrong arguments.

    ``wide``: logits are cast to float32 before the loss, as those of chunks are.
    """
    classes, *dims = linear_weight.shape[:-1]
    flat = linear_weight.reshape(-1, linear_weight.shape[-1]) if dims else linear_weight
    bias = linear_bias.reshape(-1) if linear_bias is not None and dims else linear_bias
    logits = F.linear(input, flat, bias)
    if low is not None and low_weight is not None:
        logits = logits + F.linear(low, low_weight)
    if dims:
        logits = logits.reshape(*input.shape[:-1], classes, *dims)
    if wide:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weight = None if weight is None else weight.to(logits.dtype)
        target = target.to(logits.dtype) if target.is_floating_point() else target
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    loss = F.cross_entropy(
        logits,
        target,
        weight=weight,
        reduction=options.reduction,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
    )
    of_class = input.dim() - 1  # the dimension of the classes
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = exact.logsumexp(of_class) if options.lse else None
    predicted = logits.argmax(of_class) if options.predicted else None
    entropy = _entropy(exact, of_class) if options.entropy else None
    return Found(loss, lse, predicted, entropy)


def _entropy(logits: Tensor, of_class: int) -> Tensor:
    """Returns that of the softmax. A class of a logit of minus infinity has no part in it."""
    log_p = logits.log_softmax(of_class)
    return -(log_p.exp() * torch.where(log_p == -torch.inf, 0.0, log_p)).sum(of_class)


def check(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None
) -> tuple[int, ...]:
    """Returns the logits' shape. Raises RuntimeError as torch's linear_cross_entropy does."""
    if input.dim() not in (1, 2):
        raise RuntimeError(f"expected input with dimensionality 1 or 2, got {input.dim()}")
    if linear_weight.dim() < 2:
        raise RuntimeError(
            f"expected linear_weight with dimensionality at least 2, got {linear_weight.dim()}"
        )
    if input.shape[-1] != linear_weight.shape[-1]:
        raise RuntimeError(
            "expected equal input and linear_weight last dimensions (in_features), got "
            f"{input.shape[-1]} and {linear_weight.shape[-1]}, respectively"
        )
    outputs = tuple(linear_weight.shape[:-1])
    if linear_bias is not None and tuple(linear_bias.shape) != outputs:
        raise RuntimeError(f"expected linear_bias shape {outputs}, got {tuple(linear_bias.shape)}")
    if len(outputs) > 1 and input.dim() == 1:
        raise RuntimeError(
            f"K-dimensional loss defined by linear_weight shape {tuple(linear_weight.shape)} "
            f"requires batched input, (N, {input.shape[-1]}), got unbatched input with shape "
            f"{tuple(input.shape)}"
        )
    return (*input.shape[:-1], *outputs)
