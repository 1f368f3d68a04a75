"""The plain tensors, those with memory of their own, that a value is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Those in a tensor, a mapping, a list or a tuple, at any depth; a DTensor's is its shard."""
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
