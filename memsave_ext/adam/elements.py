"""Views of a parameter's elements as real numbers, in the order in which they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


class Elements:
    """Converts between tensors of a parameter's shape and flat ones.

    The flat order is that of memory, or of indices where the memory has gaps (not ``dense``).
    """

    def __init__(self, param: Tensor) -> None:
        param = real(param)
        dims = sorted(range(param.dim()), key=param.stride, reverse=True)
        self.dense = param.permute(dims).is_contiguous()
        if not self.dense:
            dims = list(range(param.dim()))
        self._dims = dims
        self._shape = param.permute(dims).shape
        self._back = sorted(range(len(dims)), key=dims.__getitem__)

    def flat(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self._dims).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.view(self._shape).permute(self._back)


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy where its memory does not hold its values.

    Those are conjugate and negative views, and zero tensors without memory.
    """
    if torch._is_zerotensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


def real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as a view of its pairs of real numbers, any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_type(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def zeros_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns zeros of the shape of ``param``, with its strides where it is dense."""
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
