"""What kernels make for themselves, which no operator shows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .storages import Workspace

_BLOCK = 16  # oneDNN's convolutions keep channels in blocks of this size
_BACKENDS: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
_ONEDNN = (_BACKENDS.Mkldnn, _BACKENDS.MkldnnEmpty)
# With larger kernels, as in the patches of vision transformers, the gradient of the weight is a
# matrix product of oneDNN's, whose scratch memory is, as measured, that of four copies.
_LARGEST = 14
_IM2COL = (_BACKENDS.Slow2d, _BACKENDS.SlowDilated2d)


def workspace_of(device: torch.device) -> Workspace:
    """Returns what tells the workspaces of the kernels of a device: those of convolutions on the
    CPU. cuDNN's depend on the algorithm that it picks on the card."""
    return _on_cpu if device.type == "cpu" else _nothing


def _nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    return 0


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if func is torch.ops.aten.convolution.default:
        return _convolution(result, args)
    if func is torch.ops.aten.convolution_backward.default:
        return _convolution_backward(args, result)
    return 0


def _convolution(y: Tensor, args: tuple[Any, ...]) -> int:
    x, weight, bias, *options = args
    backend = torch._C._select_conv_backend(x, weight, bias, *options)
    if backend in _ONEDNN:
        made = _reordered(x) + _weight(weight, options[-1]) + _reordered(y) - y.nbytes
        return max(made, _reordered(y))
    return _columns(x, weight, y) if backend in _IM2COL else 0


def _convolution_backward(args: tuple[Any, ...], result: Any) -> int:
    grad, x, weight, bias_sizes, *options, mask = args
    backend = torch._C._select_conv_backend(x, weight, None, *options, bias_sizes)
    if backend in _IM2COL:
        return _columns(x, weight, grad)
    if backend not in _ONEDNN:
        return 0
    for_input, for_weight = mask[0], mask[1] or mask[2]
    # First the gradient of the input, then that of the weight, then a copy of that.
    weight_copy = _weight(weight, options[-1])
    later: int = sum(t.nbytes for t in result[1:] if t is not None)
    needs = [0]
    if for_weight and max(weight.shape[2:]) > _LARGEST:
        scratch: int = 4 * (weight.nbytes + grad.nbytes // grad.shape[0])
        return weight_copy + scratch - later
    if for_input:
        needs.append(weight_copy + _reordered(grad) + _reordered(x) - later)
    if for_weight:
        needs.append(_reordered(x) + _reordered(grad) + weight_copy - later)
        needs.append(weight_copy)
    return max(needs)


def _reordered(tensor: Tensor) -> int:
    """Bytes of a copy in blocks of channels; 0 if the kernel reads the tensor as it is."""
    channels = tensor.shape[1]
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    if channels < _BLOCK or (tensor.dim() in (4, 5) and tensor.is_contiguous(memory_format=last)):
        return 0
    return tensor.nbytes // channels * _in_blocks(channels)


def _weight(weight: Tensor, groups: int) -> int:
    out, inside = weight.shape[:2]
    if groups > 1 and inside == 1:  # depthwise
        return weight.nbytes // out * _in_blocks(out)
    inside_copied = _in_blocks(inside) if inside >= _BLOCK else inside
    return weight.nbytes // (out * inside) * _in_blocks(out) * inside_copied


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _columns(x: Tensor, weight: Tensor, y: Tensor) -> int:
    """Bytes of the patches of all images, which a 1 x 1 kernel does without."""
    if weight.shape[2:].numel() == 1:
        return 0
    return x.shape[0] * math.prod(weight.shape[1:]) * y.shape[2:].numel() * x.element_size()
