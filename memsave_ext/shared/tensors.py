"""Finds the plain tensors, which have a storage of their own, in a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(value: Any) -> list[Tensor]:
    """Returns the plain tensors in a tensor, mapping, list or tuple, at any depth.

    A wrapper subclass has those it wraps: a DTensor its local shard.
    """
    if type(value) is Tensor:  # most often, and once for each gradient of a step
        return [value]
    parts: Iterable[Any]
    if isinstance(value, Tensor):
        wrapper: Any = value
        if not is_traceable_wrapper_subclass(wrapper):
            return [value]
        names, _ = wrapper.__tensor_flatten__()
        parts = (getattr(wrapper, name) for name in names)
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        return []
    return [tensor for part in parts for tensor in plain_tensors(part)]
