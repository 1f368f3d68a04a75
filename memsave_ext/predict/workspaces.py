"""What kernels make for themselves, which no operator shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import conversions, lstm
from .storages import Workspace

_BLOCK = 16  # oneDNN's convolutions keep channels in blocks of this size
_WIDEST = 14  # its kernels for gradients of weights are at most this wide
_WIDEST_DEPTHWISE = 3
_BACKENDS: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
_ONEDNN = (_BACKENDS.Mkldnn, _BACKENDS.MkldnnEmpty)
_TO_IMAGE = (_BACKENDS.SlowTranspose2d, _BACKENDS.SlowTranspose3d)
_STRIP = 1 << 14  # bytes beside an image that a thread of a strided transposed convolution takes
_IM2COL = (_BACKENDS.Slow2d, _BACKENDS.SlowDilated2d)


def workspace_of(device: torch.device) -> Workspace | None:
    """Returns what tells the workspaces of the kernels of a device: those of convolutions,
    attention and LSTMs on the CPU. cuDNN's depend on the algorithm that it picks on the card."""
    return _on_cpu if device.type == "cpu" else None


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if func is torch.ops.aten.convolution.default:
        return _convolution(result, args)
    if func is torch.ops.aten.convolution_backward.default:
        return _convolution_backward(args, result)
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _attention(*args[:2])
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _attention_backward(*args[:3])
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        return lstm.of_forward(args)
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return lstm.of_backward(args)
    return conversions.of_arguments(func, args, result)


def _convolution(y: Tensor, args: tuple[Any, ...]) -> int:
    x, weight, bias, *options = args
    backend = torch._C._select_conv_backend(x, weight, bias, *options)
    if backend in _IM2COL:
        return _columns(x, weight, y)
    if backend in _TO_IMAGE:
        at_once = x.shape[0] if backend == _BACKENDS.SlowTranspose2d else 1
        return at_once * _patches(x, weight)
    if _is_onednns_transposed(backend, options):
        return _transposed(y, args)
    if backend not in _ONEDNN:
        return 0
    groups = options[-1]
    if _is_mostly_padding(x, y, options):
        return max(_columns_of_group(weight, y), int(y.nbytes))
    copy = _reordered(y)
    made = _reordered(x, is_input=True) + _weight(weight, groups) + (copy - y.nbytes if copy else 0)
    return max(made, copy)


def _convolution_backward(args: tuple[Any, ...], result: Any) -> int:
    grad, x, weight, bias_sizes, *options, _ = args
    backend = torch._C._select_conv_backend(x, weight, None, *options, bias_sizes)
    if backend in _IM2COL:
        return _columns(x, weight, grad)
    if backend in _TO_IMAGE:
        copy = 0 if grad.is_contiguous() else grad.nbytes
        return copy + (_patches(x, weight) if weight.shape[2:].numel() > 1 else 0)
    transposed = _is_onednns_transposed(backend, options)
    if backend not in _ONEDNN and not transposed:
        return 0
    # A slice of a gradient, as that of what was concatenated, is copied first.
    copy = 0 if grad.is_contiguous() or _is_last(grad) else grad.nbytes
    gradients = _gradients_of_transposed if transposed else _gradients
    return copy + max(0, *gradients(args, result))


def _is_onednns_transposed(backend: Any, options: list[Any]) -> bool:
    """``options``: the stride and what follows it. torch has no name for oneDNN's backend."""
    others = (*_ONEDNN, *_TO_IMAGE, _BACKENDS.Empty)
    return bool(options[3]) and backend not in others


def _transposed(y: Tensor, args: tuple[Any, ...]) -> int:
    """Bytes of a transposed convolution, whose kernels are those of a convolution's gradient."""
    x, weight, bias, stride = args[:4]
    groups = args[-1]
    copy = _reordered(y)
    weight_copy = weight.nbytes if groups > 1 else _in_blocks_both(weight)
    if min(stride) == 1 or _is_depthwise(weight, groups):
        # The bias is added to a result of its own.
        scratch = copy if bias is not None else 0
        later = copy
    else:
        threads = min(torch.get_num_threads(), x.shape[0])
        scratch = threads * ((_reordered(x) or x.nbytes) // x.shape[0] + _STRIP)
        later = 2 * y.nbytes if copy else 0  # by way of channels that are last
    made = scratch + _reordered(x) + weight_copy + (copy - y.nbytes if copy else 0)
    return int(max(made, later))


def _gradients_of_transposed(args: tuple[Any, ...], result: Any) -> Iterator[int]:
    """Yields what :func:`_gradients` does, of a transposed convolution: the gradient of its input
    is a convolution of the gradient of its result."""
    grad, x, weight = args[:3]
    mask = args[-1]
    later: int = sum(t.nbytes for t in result[1:] if t is not None)
    given, made, groups = _reordered(grad, is_input=True), _reordered(x), args[-2]
    weight_copy = weight.nbytes if groups > 1 else _weight(weight, groups)
    if mask[0]:
        yield given + weight_copy + made - (x.nbytes if made else 0) - later
        yield made - later
    if mask[1] or mask[2]:
        bias = result[2].nbytes if result[2] is not None else 0
        yield given + made + weight_copy + bias - later
        yield weight_copy


def _gradients(args: tuple[Any, ...], result: Any) -> Iterator[int]:
    """Yields what is made besides the results at each of the moments that may need the most.

    The gradient of the input is made first, then those of the weight and bias, then copies of
    these. All results are counted when this is asked, so that those not made yet are taken off.
    """
    grad, x, weight, _, *options, mask = args
    groups = options[-1]
    later: int = sum(t.nbytes for t in result[1:] if t is not None)
    given = _reordered(x, is_input=True), _reordered(grad)
    weight_copy = _weight(weight, groups)
    if mask[0] and _is_mostly_padding(x, grad, options) and not _is_depthwise(weight, groups):
        yield _columns_of_group(weight, grad) - later
    elif mask[0]:
        yield sum(given) + weight_copy - (x.nbytes if given[0] else 0) - later
        if min(options[0]) > 1 and not (_is_depthwise(weight, groups) or _is_last(x)):
            # The kernel's result has its channels last, and goes by way of blocks.
            yield 2 * x.nbytes - later
    if not (mask[1] or mask[2]):
        return
    bias = result[2].nbytes if result[2] is not None else 0
    has_kernel = _has_kernel(x, weight, options)
    if not has_kernel and not _is_last(x):
        threads = min(torch.get_num_threads(), x.shape[0] * groups)
        yield threads * (_columns_of_group(weight, grad) + 4 * weight.nbytes)
        return
    made = weight_copy if has_kernel else _weight_of_groups(weight, groups)
    yield sum(given) + made + bias - later
    yield made + bias + (weight.nbytes if _is_last(x) else 0)


def _is_mostly_padding(x: Tensor, y: Tensor, options: list[Any]) -> bool:
    """Whether oneDNN multiplies matrices of patches, for lack of a kernel for tiny images."""
    return not _is_last(x) and options[1][-1] > y.shape[-1]


def _has_kernel(x: Tensor, weight: Tensor, options: list[Any]) -> bool:
    """Whether oneDNN has its own kernel for the gradient of the weight. It multiplies matrices
    otherwise, or, where channels are last, takes a kernel that fills a block for each group.

    Its conditions are those of jit_uni_dw_conv_kernel_utils.hpp and, as measured, a widest kernel.
    """
    stride, padding, dilation, groups = *options[:3], options[-1]
    if not _is_depthwise(weight, groups):
        reach = zip(weight.shape[2:], dilation, x.shape[2:], strict=True)
        fits = all(step == 1 or (kernel - 1) * step < size for kernel, step, size in reach)
        return fits and max(weight.shape[2:]) <= _WIDEST
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    fits = all(size >= kernel + -pad % step for size, kernel, step, pad in sizes)
    return fits and weight.shape[-1] <= _WIDEST_DEPTHWISE


def _is_last(tensor: Tensor) -> bool:
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return (
        tensor.dim() in (4, 5)
        and tensor.is_contiguous(memory_format=last)
        and not tensor.is_contiguous()
    )


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[0] == groups and weight.shape[1] == 1


def _reordered(tensor: Tensor, *, is_input: bool = False) -> int:
    """Bytes of a copy in blocks of channels; 0 if the kernel reads the tensor as it is."""
    channels = tensor.shape[1]
    if _is_last(tensor) or (is_input and channels < _BLOCK):
        return 0
    return tensor.nbytes // channels * _in_blocks(channels)


def _weight(weight: Tensor, groups: int) -> int:
    out, inside = weight.shape[:2]
    if _is_depthwise(weight, groups):
        return weight.nbytes // out * _in_blocks(out)
    inside_copied = _in_blocks(inside) if inside >= _BLOCK else inside
    return weight.nbytes // (out * inside) * _in_blocks(out) * inside_copied


def _in_blocks_both(weight: Tensor) -> int:
    """Bytes of a copy in blocks of all channels."""
    ins, outs = weight.shape[:2]
    return weight.nbytes // (ins * outs) * _in_blocks(ins) * _in_blocks(outs)


def _weight_of_groups(weight: Tensor, groups: int) -> int:
    """Bytes of a copy in which every group fills blocks of its own."""
    out, inside = weight.shape[:2]
    blocks = groups * _in_blocks(out // groups) * _in_blocks(inside)
    return weight.nbytes // (out * inside) * blocks


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _columns(x: Tensor, weight: Tensor, y: Tensor) -> int:
    """Bytes of the patches of all images, which a 1 x 1 kernel does without."""
    if weight.shape[2:].numel() == 1:
        return 0
    return x.shape[0] * math.prod(weight.shape[1:]) * y.shape[2:].numel() * x.element_size()


def _patches(x: Tensor, weight: Tensor) -> int:
    """Bytes of the patches that a transposed convolution makes of an image, and adds up."""
    return int(math.prod(weight.shape[1:]) * x.shape[2:].numel() * x.element_size())


def _columns_of_group(weight: Tensor, y: Tensor) -> int:
    """Bytes of the patches of one group of an image."""
    return int(weight[0].numel() * y.shape[2:].numel() * y.element_size())


def _attention(query: Tensor, key: Tensor) -> int:
    """Bytes of the tiles of torch's FlashAttentionKernel.cpp: scores, two sums and the result of
    some rows, for each thread; the scores again in the dtype of the arguments if that is narrow."""
    rows, columns, wide = _tile(query, key)
    narrow = query.element_size() if query.element_size() < wide else 0
    size = wide * rows * (columns + 2 + query.shape[3]) + narrow * rows * columns
    return int(torch.get_num_threads() * size)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor) -> int:
    """Bytes of the tiles of the scores and their gradients, and of a copy of the result's gradient
    if it is not laid out as the result. Packed tiles of narrow dtypes, which are less, are not
    known."""
    rows, columns, wide = _tile(query, key)
    narrow = query.element_size() if query.element_size() < wide else 0
    size = 2 * (wide + narrow) * rows * columns + wide * rows
    copy = 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes
    return int(torch.get_num_threads() * size + copy)


def _tile(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """Returns the rows and columns of a tile of scores, and the bytes of a number in it."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2]), max(4, query.element_size())
