"""``torch.nn.functional.grouped_mm`` in other dtypes than bfloat16, as experts of models use it.

It runs there, one product after the other, but torch's fake kernel refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OPERATOR: Any = getattr(torch.ops.aten, "_grouped_mm", None)
_ALIGNED = 16  # bytes, of rows


def is_refused(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is that operator, and in a dtype that its fake kernel does not know."""
    refused = _OPERATOR is not None and func is _OPERATOR.default
    return refused and args[0].dtype is not torch.bfloat16


def product(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Returns a fake of the result: a product for each group, or one of all groups' rows or
    columns."""
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():
        groups = (len(offs) if offs is not None else a.shape[0],)
    shape = (*groups, a.shape[-2], b.shape[-1])
    in_row = _ALIGNED // a.element_size()
    row = -(-shape[-1] // in_row) * in_row
    stride = (*(shape[-2] * row for _ in groups), row, 1)
    return torch.empty_strided(shape, stride, dtype=a.dtype, device=a.device)
