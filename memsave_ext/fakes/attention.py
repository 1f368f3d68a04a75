"""Attention on fake tensors as a card computes it, whose kernels are others than a CPU's.

They keep the logarithms of sums of exponentials and random numbers' state for backward, and draw
dropout themselves. Around them it is as in ``scaled_dot_product_attention`` of torch's
``ATen/native/transformers/attention.cpp``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends import cuda as backends
from torch.nn import functional
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_FLASH_MULTIPLE = 8  # of elements, to which each head is padded
_MASK_MULTIPLE = 8  # of elements, of a mask's strides
_MOST_IN_HEAD = 256  # elements
_CUDNN_LEAST = -65504.0  # in place of minus infinity
torchs_attention = functional.scaled_dot_product_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` of fakes that stand for a card's tensors; else torch's."""
    tensors = (query, key, value, attn_mask)
    options = (dropout_p, is_causal, scale, enable_gqa)
    if not all(t is None or isinstance(t, FakeTensor) for t in tensors):
        return torchs_attention(*tensors[:3], attn_mask, *options[:2], **_named(*options[2:]))
    if torch.is_autocast_enabled("cpu"):
        query, key, value, attn_mask = map(_narrowed, tensors)
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return _attention(query, key, value, attn_mask, *options)


def _named(scale: float | None, enable_gqa: bool) -> dict[str, Any]:
    return {"scale": scale, "enable_gqa": enable_gqa}


def _narrowed(tensor: Any) -> Any:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    chosen = backend(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    keeps_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    result: Tensor
    if chosen == SDPBackend.FLASH_ATTENTION:
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        padded = (_padded(t, _FLASH_MULTIPLE) for t in (query, key, value))
        kernel = _aten._scaled_dot_product_flash_attention
        result = kernel(*padded, dropout_p, is_causal, False, scale=scale)[0]
        size = query.shape[-1]
        return result if result.shape[-1] == size else _aten.slice(result, -1, 0, size)
    if chosen == SDPBackend.CUDNN_ATTENTION:
        mask = _added(mask, query, _CUDNN_LEAST)
        result = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, keeps_sums, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    mask = _added(mask, query, -math.inf)
    if chosen == SDPBackend.EFFICIENT_ATTENTION:
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        result = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale
        )[0]
        return result
    result = _aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> SDPBackend:
    """Returns the kernel that torch chooses on a card of compute capability 8.0 or more, where
    flash attention comes first. No card is asked: a child process cannot."""
    if not _is_fusible(query, key, value, mask):
        return SDPBackend.MATH
    head, heads, dtype = query.shape[-1], [t.shape[1] for t in (query, key, value)], query.dtype
    are_groups = enable_gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0
    same_heads = len(set(heads)) == 1
    is_flash = (
        backends.flash_sdp_enabled()
        and mask is None
        and dtype in _NARROW
        and (same_heads or are_groups)
        and head == key.shape[-1] == value.shape[-1] <= _MOST_IN_HEAD
        and (not is_causal or query.shape[-2] == key.shape[-2])
    )
    if is_flash:
        return SDPBackend.FLASH_ATTENTION
    multiple = 8 if dtype in _NARROW else 4
    is_efficient = (
        backends.mem_efficient_sdp_enabled()
        and dtype in (*_NARROW, torch.float32)
        and same_heads
        and head == key.shape[-1]
        and head % multiple == 0
        and value.shape[-1] % multiple == 0
    )
    return SDPBackend.EFFICIENT_ATTENTION if is_efficient else SDPBackend.MATH


def _is_fusible(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether kernels of either kind take such tensors."""
    tensors = (query, key, value)
    return (
        all(t.dim() == 4 and t.dtype == query.dtype for t in tensors)
        and all(t.shape[0] == query.shape[0] for t in tensors)
        and query.shape[2] > 0
        and key.shape[2] > 0
        and all(t is None or t.stride(-1) == 1 for t in (*tensors, mask))
    )


def _added(mask: Tensor | None, query: Tensor, hidden: float) -> Tensor | None:
    """Returns a mask that is added: one of bools says what takes part."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    # torch.scalar_tensor() would run below autograd, where a block does not see it.
    return torch.where(mask, 0.0, _aten.scalar_tensor(hidden, dtype=query.dtype))


def _aligned(mask: Tensor) -> Tensor:
    strides = mask.stride()
    if strides[-1] == 1 and all(stride % _MASK_MULTIPLE == 0 for stride in strides[:-1]):
        return mask
    size = mask.shape[-1]
    more = _MASK_MULTIPLE - size % _MASK_MULTIPLE
    cut: Tensor = _aten.slice(functional.pad(mask, (0, more)), -1, 0, size)
    return cut


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    more = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, more)) if more else tensor
