"""Finds the plain tensors, which have a storage of their own, in a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the plain tensors in a tensor, mapping, list or tuple, at any depth.

    A wrapper subclass yields the tensors it wraps: a DTensor its local shard.
    """
    if isinstance(value, Tensor):
        wrapper: Any = value
        if type(value) is not Tensor and is_traceable_wrapper_subclass(wrapper):
            names, _ = wrapper.__tensor_flatten__()
            for name in names:
                yield from plain_tensors(getattr(wrapper, name))
        else:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from plain_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from plain_tensors(item)
