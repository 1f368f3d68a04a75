"""Gradients whose formulas go another way for subclasses of tensors, as fakes are.

Those of products are made of running products then. In a step they divide by the factors, none of
which is taken to be zero. Those of ``max()`` and ``min()`` of all elements look for NaN by masks,
which a step does on CUDA alone.
"""

from __future__ import annotations

from typing import Any

import torch

_COUNT = torch.int64.itemsize


def made_by(node: Any, on_cpu: bool) -> int | None:
    """Returns the bytes of what a step's formula makes at its worst moment, with its result; None
    if it is that of fakes."""
    name = node.name()
    formula = _FORMULAS.get(name) or (_FORMULAS_ON_CPU.get(name) if on_cpu else None)
    return formula(node) if formula else None


def _of_product(node: Any) -> int:
    x = node._saved_self
    conjugate = x.nbytes if x.dtype.is_complex else 0
    return int(max(2 * x.nbytes + conjugate, x.numel()))


def _of_products_along_a_dimension(node: Any) -> int:
    """The zeros are counted first."""
    numel = node._saved_self.numel()
    count = node._saved_result.numel() * _COUNT
    return int(numel + count + max(_of_product(node), numel * _COUNT))


def _of_running_products(node: Any) -> int:
    """A product with the gradient, reversed, its running sum, and that reversed."""
    x = node._saved_self
    return int(x.numel() + 4 * x.nbytes)


def _of_an_extreme(node: Any) -> int:
    """A mask, zeros, and the mask again as the numbers that are counted."""
    x = node._saved_self
    return int(x.numel() + x.nbytes + x.numel() * _COUNT)


_FORMULAS = {
    "ProdBackward0": _of_product,
    "ProdBackward1": _of_products_along_a_dimension,
    "CumprodBackward0": _of_running_products,
}
_FORMULAS_ON_CPU = dict.fromkeys(
    ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), _of_an_extreme
)
