"""Calling the function of ``CheckpointFunction``, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CallSite(NamedTuple):
    """A line of Python code that calls CheckpointFunction.apply."""

    code: CodeType
    instruction: int
    line: int

    @staticmethod
    def of(frame: FrameType) -> CallSite:
        return CallSite(frame.f_code, frame.f_lasti, frame.f_lineno)


class Result:
    """What a function returned: a tensor, or a tuple or list of tensors and anything else."""

    def __init__(self, value: Any) -> None:
        self._kind = type(value) if isinstance(value, (tuple, list)) else None
        self.elements: list[Any] = [value] if self._kind is None else list(value)

    def rebuild(self, elements: list[Any]) -> Any:
        """The same kind of tuple or list, with these elements."""
        if self._kind is None:
            return elements[0]
        # A named tuple takes its fields one by one.
        make: Callable[[list[Any]], Any] = getattr(self._kind, "_make", self._kind)
        return make(elements)


def call(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Result:
    return Result(function(*inputs))


def is_differentiable(element: Any) -> bool:
    return isinstance(element, Tensor) and (element.is_floating_point() or element.is_complex())


def as_type(alias: Tensor, kind: type[Tensor]) -> Tensor:
    """``alias`` as an object of the subclass ``kind``; a Parameter's alias is a plain Tensor."""
    if type(alias) is kind or issubclass(kind, torch.nn.Parameter):
        return alias
    return alias.as_subclass(kind)
