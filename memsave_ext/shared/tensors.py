"""Finds plain tensors, which have a storage of their own, in a value, and counts their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_DEEPEST = 4  # a parameter's attributes, an object there, an object in that, and its tensors
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_CUDA_BLOCK = 512  # bytes; CUDA's caching allocator rounds sizes up to a multiple of this


def plain_tensors(value: Any) -> list[Tensor]:
    """Returns the plain tensors in a tensor, mapping, list or tuple, at any depth.

    A wrapper subclass has those it wraps: a DTensor its local shard. One of another class has what
    its attributes hold, too: weights in four bits have their scales there.
    """
    if type(value) in _PLAIN:  # most often, and once for each gradient of a step
        return [value]
    parts: Iterable[Any]
    if isinstance(value, Tensor):
        wrapper: Any = value
        if not hasattr(wrapper, "__tensor_flatten__"):
            return [value, *_attached(value.__dict__, _DEEPEST)]
        names, _ = wrapper.__tensor_flatten__()
        parts = (getattr(wrapper, name) for name in names)
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        return []
    return [tensor for part in parts for tensor in plain_tensors(part)]


def _attached(value: Any, depth: int) -> list[Tensor]:
    """Returns the tensors in a container or in an object's attributes, at most so deep."""
    if isinstance(value, Tensor):
        return plain_tensors(value) if hasattr(value, "__tensor_flatten__") else [value]
    if not depth or isinstance(value, (type, nn.Module, TorchDispatchMode)):
        return []
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    return [tensor for part in parts for tensor in _attached(part, depth - 1)]


def storage_of(tensor: Tensor) -> tuple[object, int]:
    """Returns what tells a plain tensor's storage from others while it lives, and its bytes."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # its backend keeps memory without a storage
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage._cdata, storage.nbytes()


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor has the storage of ``tensor``, too."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # by more than both of these


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the tensor, or the indices and values of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if (indices := _COMPRESSED.get(tensor.layout)) is not None:
        return [*(getattr(tensor, name)() for name in indices), tensor.values()]
    return [tensor]


def bytes_held(values: Iterable[Any], seen: set[object] | None = None) -> int:
    """Returns the bytes of the storages of all tensors in ``values``, each once, as rounded.

    ``seen``: the storages that were counted before and do not count, to which these are added.
    """
    seen = set() if seen is None else seen
    total = 0
    for tensor in plain_tensors(list(values)):
        for part in dense_parts(tensor):
            key, size = storage_of(part)
            if key not in seen:
                seen.add(key)
                total += rounded(size, part.device)
    return total


def rounded(size: int, device: torch.device) -> int:
    """Returns the bytes that a device's allocator gives out where it is asked for ``size``."""
    return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if device.type == "cuda" else size
