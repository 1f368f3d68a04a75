"""What sparse fake tensors hold, such as the gradient of ``nn.Embedding(sparse=True)``.

torch's fakes forget how many elements they have. Here each keeps fakes of its indices and values,
whose memory is that of the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
_ADDED = (_aten.add, _aten.add_, _aten.sub, _aten.sub_)
_SHARED = (_aten.detach, _aten.alias, _aten.view_as)
_INDICES = (_aten._indices, _aten.indices)
_VALUES = (_aten._values, _aten.values)
_MADE = _aten._sparse_coo_tensor_with_dims_and_tensors.default


class _Parts:
    def __init__(self, indices: Tensor, values: Tensor) -> None:
        self.indices, self.values = indices, values


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator; one that asks a sparse tensor for its parts gets those that it has."""
    packet = getattr(func, "_overloadpacket", None)
    parts = _parts_of(args[0]) if args else None
    if parts is not None:
        if packet in _INDICES:
            return parts.indices.detach()
        if packet in _VALUES:
            return parts.values.detach()
        if packet is _aten._nnz:
            return parts.values.shape[0]
    result = func(*args, **kwargs)
    if isinstance(result, FakeTensor) and result.layout is torch.sparse_coo:
        made = _parts_made(func, packet, args, kwargs)
        if made is not None:
            result._memsave_ext_parts = made  # type: ignore[attr-defined]
    return result


def parts_of(tensor: Any) -> list[Any]:
    """Returns the indices and values of a sparse fake tensor, nothing of another."""
    parts = _parts_of(tensor)
    return [parts.indices, parts.values] if parts else []


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, of a sparse one's parts."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.nbytes for part in parts_of(tensor))


def _parts_of(tensor: Any) -> _Parts | None:
    return getattr(tensor, "_memsave_ext_parts", None) if isinstance(tensor, FakeTensor) else None


def _parts_made(
    func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Parts | None:
    """Returns what a sparse result holds: no fewer elements than a step's can have."""
    if func is _MADE:
        names = ("sparse_dim", "dense_dim", "size", "indices", "values")
        given = dict(zip(names, args, strict=False)) | kwargs
        return _Parts(given["indices"], given["values"])
    sparse = [parts for value in tree_iter((args, kwargs)) if (parts := _parts_of(value))]
    if not sparse:
        return None
    if packet in _SHARED:
        return sparse[0]
    if packet not in _ADDED and isinstance(args[0], FakeTensor) and func._schema.is_mutable:
        return sparse[0]  # changed in place
    count = len(sparse) if packet in _ADDED else 1
    return _Parts(
        torch.cat([parts.indices for parts in sparse[:count]], 1),
        torch.cat([parts.values for parts in sparse[:count]]),
    )
