"""Whether the rows of the weight are stepped as soon as their gradient is complete."""

from __future__ import annotations

import warnings
from typing import Protocol

from torch import Tensor

from .. import _parts

WEIGHT = 1  # the position of the weight among the inputs of the autograd Function


class Rows(Protocol):
    """The step of a weight, in parts. Made by an optimizer that steps in backward."""

    def step(self, first: int, grad: Tensor) -> None:
        """Steps the rows from ``first`` on with their gradient."""
        ...


def begin(in_region: bool, debug: bool) -> Rows | None:
    """Begins the step of the weight of the node that autograd runs now.

    Returns None where its gradient has to be whole; ``debug`` warns why.
    """
    begun: Rows | str
    if in_region:
        begun = "the loss is inside of a checkpointed region"
    elif (native := _parts.native("adam")) is None:
        begun = "optimizers of memsave_ext run in pure Python"
    else:
        begun = native.begin_adam_rows(WEIGHT)
    if isinstance(begun, str):
        explain(debug, begun)
        return None
    return begun


def explain(debug: bool, reason: str) -> None:
    if debug:
        warnings.warn(
            f"memsave_ext: linear_cross_entropy: the gradient of linear_weight is whole: {reason}",
            UserWarning,
            stacklevel=3,
        )
