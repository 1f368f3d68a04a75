"""Avoids a deadlock in torch where a ``torch.autograd.Function`` uses leaves in several threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def hold_accumulators(values: Iterable[Any]) -> list[Any]:
    """Returns nodes that hold the gradient accumulators of the strided leaves in ``values``.

    Keep the list for as long as ``Function.apply`` runs with these leaves.

    Making an accumulator takes the leaf's mutex and then the GIL, while ``Function.apply`` waits
    for the mutex with the GIL held. Where two threads do one each, torch hangs. If the accumulator
    exists, nobody has to make one. Here an operator makes it, because operators release the GIL.
    """
    with torch.enable_grad():
        return [value.view_as(value).grad_fn for value in values if _is_strided_leaf(value)]


def _is_strided_leaf(value: Any) -> bool:
    leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return leaf and value.layout == torch.strided
