"""What kernels on the CPU copy for themselves: arguments in the dtype that they compute in."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
_AS_THEY_ARE = {  # elementwise, and each argument is read in its own dtype
    *(_aten.masked_fill, _aten.masked_fill_, _aten._to_copy, _aten.copy_, _aten.copy, _aten.clone),
    *(_aten.complex, _aten.polar, _aten.view_as_complex, _aten.view_as_real, _aten.native_dropout),
}
_IN_RESULTS_DTYPE = (_aten.sum, _aten.prod, _aten.nansum, _aten.cumsum, _aten.cumprod)
_SCATTERED = (
    *(_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_),
    *(_aten.scatter_reduce, _aten.scatter_reduce_),
)
_NARROW = (torch.bfloat16, torch.float16)
_FLOAT = 4
_COUNT = 8
# Copies, positions, sums before each element: by the operator, of its arguments.
_OF_ELEMENTS = {
    _aten.kthvalue: lambda x, *_: x.nbytes + x.numel() * _COUNT,
    _aten.median: lambda x, *_: x.nbytes,
    _aten.nanmedian: lambda x, *_: x.nbytes,
    _aten.masked_scatter_backward: lambda _, mask, *__: 2 * mask.numel() * _COUNT,
}


def of_arguments(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes of the arguments' copies in another dtype, and of a result in another than its own."""
    packet = getattr(func, "_overloadpacket", None)
    if not args or not isinstance(args[0], Tensor):
        return 0
    x = args[0]
    if packet in _OF_ELEMENTS:
        return int(_OF_ELEMENTS[packet](*args))
    if not isinstance(result, Tensor):
        return 0
    if packet in _SCATTERED or (packet is _aten.gather and x.dim() > 1):
        return result.numel() * _FLOAT if x.dtype in _NARROW else 0
    if packet is _aten.mean:
        return x.numel() * _FLOAT if {x.dtype, result.dtype} & {*_NARROW} else 0
    if packet in _IN_RESULTS_DTYPE or packet is _aten.linalg_vector_norm:
        is_part = x.dtype.is_complex and not result.dtype.is_complex
        return 0 if is_part or x.dtype == result.dtype else x.numel() * result.itemsize
    if torch.Tag.pointwise not in func.tags or packet in _AS_THEY_ARE:
        return 0
    return _elementwise(packet, args, result)


def _elementwise(packet: Any, args: tuple[Any, ...], result: Tensor) -> int:
    read = [t for t in tree_iter(args[packet is _aten.where :]) if isinstance(t, Tensor)]
    tensors = [t for t in read if t.dim()]
    if len({t.dtype for t in (*tensors, result)}) == 1:
        return 0
    common = result.dtype
    if result is args[0] or common is torch.bool:
        common = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.bool)
    elif not common.is_complex and any(t.dtype.is_complex for t in tensors):
        return result.numel() * 2 * result.itemsize  # absolute values are computed as complex ones
    made = sum(t.numel() for t in tensors if t.dtype != common)
    if result is args[0] and result.dtype != common:
        made += result.numel()
    return made * common.itemsize
