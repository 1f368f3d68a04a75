"""What a region of ``CheckpointFunction`` returns in place of its function's outputs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import errors


def check_outputs(outputs: Sequence[Any]) -> None:
    for i, output in enumerate(outputs):
        if _holds_tensor(output):
            raise errors.output_holds_tensors(i, output)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return False
    return any(isinstance(item, Tensor) or _holds_tensor(item) for item in value)


def alias_of(output: Tensor, inputs: Sequence[Tensor], outputs: Sequence[Any]) -> Tensor:
    """Where memory of an output has a history that the region does not see, it is a view, which
    torch refuses to change in place."""
    has_other_history = (
        output.requires_grad
        or any(output is other for other in inputs)
        or sum(output is other for other in outputs) > 1
        or (output._is_view() and _shares_base(output))
    )
    with torch.no_grad():
        return output.view_as(output) if has_other_history else output.detach()


def _shares_base(view: Tensor) -> bool:
    """Whether anybody but this view keeps what it is a view of."""
    return _references_to_base(view) > _references_of_nobody()


@functools.cache
def _references_of_nobody() -> int:
    """How many references torch itself keeps to a view's base; this differs between versions."""
    return _references_to_base(torch.ones(2)[1:])


def _references_to_base(view: Tensor) -> int:
    base = view._base
    assert base is not None
    uses: int = base._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(base) + uses
