"""The activations: their names, values and derivatives.

The list of the C++ and CUDA kernels is csrc/batch_norm/activations.h. Values are selected instead
of multiplied by 0, so that a NaN stays NaN and an infinity that is not selected has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Activation(NamedTuple):
    forward: Callable[[Tensor, float], Tensor]  # (z, slope) -> the value
    # (gradient of the value, z, slope) -> gradient of z
    backward: Callable[[Tensor, Tensor, float], Tensor]


ACTIVATIONS = {
    "none": Activation(lambda z, _: z, lambda grad, z, _: grad),
    "relu": Activation(lambda z, _: F.relu(z), lambda grad, z, _: torch.where(z <= 0, 0, grad)),
    "leaky_relu": Activation(
        lambda z, slope: F.leaky_relu(z, slope),
        lambda grad, z, slope: torch.where(z > 0, grad, grad * slope),
    ),
}


def check_activation(who: str, activation: object, none: str | None = "none") -> None:
    """Raise ValueError for an unknown activation. ``none`` is what stands for no activation."""
    names = [none, *list(ACTIVATIONS)[1:]]
    if activation not in names:
        *first, last = map(repr, names)
        raise ValueError(
            f"{who}: activation must be {', '.join(first)} or {last}, got {activation!r}"
        )
