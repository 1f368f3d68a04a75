"""The activations: their names, values and derivatives; those of kernels are in csrc's list.

Values are selected, not multiplied by 0: NaN stays NaN, and infinity is left out where it is not
chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Activation(NamedTuple):
    forward: Callable[[Tensor, float], Tensor]  # of z and the negative slope
    backward: Callable[[Tensor, Tensor, float], Tensor]  # of the gradient, z and the slope


ACTIVATIONS = {
    "none": Activation(lambda z, _: z, lambda grad, z, _: grad),
    "relu": Activation(lambda z, _: F.relu(z), lambda grad, z, _: torch.where(z <= 0, 0, grad)),
    "leaky_relu": Activation(
        lambda z, slope: F.leaky_relu(z, slope),
        lambda grad, z, slope: torch.where(z > 0, grad, grad * slope),
    ),
}


def check_activation(who: str, activation: object, none: str | None = "none") -> None:
    """``none`` is what stands for the first of them."""
    names = [none, *list(ACTIVATIONS)[1:]]
    if activation not in names:
        *first, last = map(repr, names)
        raise ValueError(
            f"{who}: activation must be {', '.join(first)} or {last}, got {activation!r}"
        )
