"""What a leaf needs before a ``torch.autograd.Function`` in Python uses it from several threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def hold_accumulators(values: Iterable[Any]) -> list[Any]:
    """The nodes that add to the gradients of the leaves among ``values``. Keep the list for as long
    as ``Function.apply`` runs with these leaves.

    Making such a node takes the leaf's mutex and then the GIL, and ``Function.apply`` awaits the
    mutex with the GIL held: where one thread does the first while another does the second, torch
    hangs. With a node that exists nobody has to make one. An operator makes it here, because
    operators release the GIL.
    """
    with torch.enable_grad():
        return [value.view_as(value).grad_fn for value in values if _is_strided_leaf(value)]


def _is_strided_leaf(value: Any) -> bool:
    leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return leaf and value.layout == torch.strided
