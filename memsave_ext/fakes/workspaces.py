"""What kernels on the CPU allocate for themselves, which no operator shows.

Convolutions, LSTMs and other libraries' operators are measured (``measured.py``). Here are torch's
own kernels: attention, and copies of arguments in the dtype that is computed in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_iter

from . import measured

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
_LEFT_IN_ELEMENTS = (
    *(_aten.mse_loss, _aten.smooth_l1_loss, _aten.soft_margin_loss, _aten.binary_cross_entropy),
)
_NORMS = {  # and where in their arguments the weight is
    _aten.native_batch_norm.default: 1,
    _aten.native_group_norm.default: 1,
    _aten.native_layer_norm.default: 2,
}
_BATCH_NORMS = (
    *(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default),
    *(_aten._native_batch_norm_legit.no_stats, _aten._batch_norm_with_update.default),
)
# Where in their arguments tensors are that kernels copy if their elements do not fill memory in
# order, as a gradient of a sum does not: it is one number, expanded.
_COPIED = {
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    _aten.log_sigmoid_forward.default: (0,),
    _aten._softmax.default: (0,),
    _aten._softmax_backward_data.default: (0, 1),
    _aten._log_softmax.default: (0,),
    _aten._log_softmax_backward_data.default: (0, 1),
    _aten.nll_loss_forward.default: (0,),
    _aten.embedding.default: (1,),
    _aten.embedding_dense_backward.default: (0, 1),
    _aten.index_select.default: (0,),
    _aten.max_pool2d_with_indices.default: (0,),
    _aten.avg_pool2d.default: (0,),
    _aten._adaptive_avg_pool2d.default: (0,),
    _aten.adaptive_max_pool2d.default: (0,),
    _aten.max_pool3d_with_indices.default: (0,),
    _aten.avg_pool3d.default: (0,),
    _aten.upsample_nearest2d_backward.default: (0,),
    _aten.upsample_bilinear2d_backward.default: (0,),
    _aten.reflection_pad2d.default: (0,),
    _aten.im2col.default: (0,),
    _aten.col2im.default: (0,),
}
# And where those are that products of matrices copy if neither rows nor columns lie in order.
_MATRICES = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
}
_NARROW = (torch.bfloat16, torch.float16)
_FLOAT = 4
_COUNT = 8
_MEAN = 1  # the reduction of a loss that is the mean of its elements


def workspace_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Returns the bytes that the kernel of an operator on the CPU makes and frees itself.

    cuDNN's and cuBLAS's on CUDA depend on the algorithm that is picked on the card.
    """
    if measured.is_measured(func):
        taken = measured.allocations(func, args, kwargs)
        return taken.workspace() if taken else 0
    rule = _RULES.get(func)
    own: int = rule(*args) if rule else _converted(func, args, result)
    return own + _copies(func, args)


def _copies(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of what a kernel copies, as it takes it in order alone."""
    strided = [t if isinstance(t, Tensor) and t.layout is torch.strided else None for t in args]
    copied = (strided[place] for place in _COPIED.get(func, ()))
    matrices = (strided[place] for place in _MATRICES.get(func, ()))
    bytes_copied: int = sum(t.nbytes for t in copied if t is not None and not _is_dense(t))
    for t in matrices:
        if t is not None and t.numel() and not _is_for_blas(t):  # several are copied one by one
            bytes_copied += t.nbytes // (len(t) if t.dim() == 3 else 1)
    return bytes_copied


def _is_for_blas(matrices: Tensor) -> bool:
    (rows, columns), (by_row, by_column) = matrices.shape[-2:], matrices.stride()[-2:]
    return (by_column == 1 and by_row >= columns) or (by_row == 1 and by_column >= rows)


def as_left_by_kernel(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Returns a fake result in the memory that the kernel on the CPU leaves it in: an LSTM's with
    its workspace, the mean of a loss in the memory of the loss of each element, of a batch norm no
    gradient that nobody asks for, and what norms of narrow numbers with wide weights make in the
    dtypes of the kernel: statistics are wide, and the gradient of the input is narrow."""
    if func is _aten.mkldnn_rnn_layer.default:
        *outputs, workspace = result
        taken = measured.allocations(func, args)
        return (*outputs, workspace.new_empty(taken.last if taken else 0))
    if func is _aten.native_batch_norm_backward.default and not args[-1][0]:
        return (None, *result[1:])
    if func in _BATCH_NORMS and not _is_dense(args[0]):
        return (torch.empty(result[0].shape, dtype=result[0].dtype, device="cpu"), *result[1:])
    if func in _NORMS and args[0].dtype in _NARROW:
        weight, (output, *statistics) = args[_NORMS[func]], result
        if weight is not None and weight.dtype == torch.float32:
            return (output, *(torch.empty_like(s, dtype=torch.float32) for s in statistics))
    if func is _aten.native_group_norm_backward.default and result[0] is not None:
        return (torch.empty_like(result[0], dtype=args[1].dtype), *result[1:])
    packet = getattr(func, "_overloadpacket", None)
    if packet not in _LEFT_IN_ELEMENTS or result.dim() or not args[0].dim():
        return result
    return result.new_empty(args[0].numel()).as_strided((), ())


def _attention(query: Tensor, key: Tensor, *_: Any) -> int:
    """Bytes of the tiles of torch's FlashAttentionKernel.cpp: scores, two sums and the result of
    some rows, for each thread; the scores again in the dtype of the arguments if that is narrow."""
    rows, columns, wide = _tile(query, key)
    narrow = query.element_size() if query.element_size() < wide else 0
    size = wide * rows * (columns + 2 + query.shape[3]) + narrow * rows * columns
    return int(torch.get_num_threads() * size)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
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


def _wide(x: Tensor, reduction: int) -> int:
    """Bytes of the copy of narrow numbers whose mean is computed."""
    return x.numel() * _FLOAT if reduction == _MEAN and x.dtype in _NARROW else 0


def _reduced_loss(x: Tensor, _: Tensor, reduction: int = _MEAN, *__: Any) -> int:
    """Bytes of the loss of each element."""
    return x.nbytes + _wide(x, reduction) if reduction else 0


def _binary_cross_entropy(
    x: Tensor, _: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> int:
    return _wide(x, reduction)


def _binary_cross_entropy_with_logits(
    x: Tensor, _: Tensor, weight: Any = None, positive: Any = None, reduction: int = _MEAN
) -> int:
    """Bytes of the loss of each element, and of its parts."""
    return x.nbytes * (2 if reduction else 1) + _wide(x, reduction)


def _gelu_backward(grad: Tensor, x: Tensor) -> int:
    """Bytes of the gradient in order, and of the result, where that is to be as the gradient."""
    if grad.is_contiguous() or not x.is_contiguous():
        return 0
    return grad.nbytes * (1 if 0 in grad.stride() else 2)


def _masked_scatter_backward(grad: Tensor, mask: Tensor, *_: Any) -> int:
    """Bytes of the mask as numbers that are counted, or of positions, or of two parts."""
    counts = mask.numel() * _COUNT
    made = mask.numel() * grad.itemsize
    return max(counts - made, made) if grad.is_contiguous() else 2 * counts


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    summed: Sequence[int],
    unrolled: int = 1,
) -> int:
    """Bytes of a product of two arguments, and of that with the third: sums over dimensions that
    the third has not are taken first, and one dimension is gone through index by index."""
    dims = a.dim() + len(expand_a)
    sizes = [1] * dims
    for tensor, expand in ((a, expand_a), (b, expand_b), (c, expand_c)):
        kept = (i for i in range(dims) if i not in expand)
        for place, size in zip(kept, tensor.shape, strict=True):
            sizes[place] = max(sizes[place], size)
    sizes[unrolled] = 1

    def numel(left_out: Callable[[int], bool]) -> int:
        return math.prod(size for i, size in enumerate(sizes) if not left_out(i))

    of_two = numel(lambda i: (i in expand_a and i in expand_b) or (i in summed and i in expand_c))
    return (of_two + numel(lambda i: i in summed)) * a.element_size()


def _batch_norm_backward(grad: Tensor, x: Tensor, *rest: Any) -> int:
    """Bytes of the input's gradient, which torch makes twice where it is contiguous; otherwise of
    narrow images in float32."""
    mask = rest[-1]
    if any(all(t.is_contiguous(memory_format=f) for t in (grad, x)) for f in _formats(x)):
        return x.nbytes if mask[0] else 0
    return x.numel() * _FLOAT if x.dtype in _NARROW and x.dim() > 2 else 0


def _formats(x: Tensor) -> list[torch.memory_format]:
    """Returns those in which elements of such a tensor fill memory in order."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    return [torch.contiguous_format, *([last[x.dim()]] if x.dim() in last else [])]


def _is_dense(x: Tensor) -> bool:
    return any(x.is_contiguous(memory_format=layout) for layout in _formats(x))


def _pool_backward(grad: Tensor, x: Tensor, *rest: Any) -> int:
    """Bytes of the gradient in order, and of the input's, which is made in the order of that one;
    so are the positions read that a pool of the largest has."""
    order = suggest_memory_format(grad)
    read = [grad, *(part for part in rest[-1:] if isinstance(part, Tensor))]
    copied = sum(tensor.nbytes for tensor in read if not tensor.is_contiguous(memory_format=order))
    return copied + (x.nbytes if suggest_memory_format(x) != order else 0)


def _layer_norm_backward(grad: Tensor, x: Tensor, shape: Sequence[int], *rest: Any) -> int:
    """Bytes of each thread's sums of the gradients of weight and bias."""
    return 2 * torch.get_num_threads() * math.prod(shape) * _FLOAT if any(rest[-1][1:]) else 0


def _reduced(x: Tensor, dims: Sequence[int]) -> int:
    """Bytes of one number for all those along some dimensions."""
    return x.nbytes // max(math.prod(x.shape[dim] for dim in dims), 1)


def _group_norm_backward(*args: Any) -> int:
    """Bytes of two sums for each channel of an image."""
    return int(2 * args[5] * args[6] * _FLOAT)


# For each operator, the bytes of its arguments.
_RULES: dict[Any, Callable[..., int]] = {
    _aten._trilinear.default: _trilinear,
    _aten._ctc_loss_backward.Tensor: lambda *args: args[6].nbytes,  # betas, as many as alphas
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.mse_loss.default: _reduced_loss,
    _aten.smooth_l1_loss.default: _reduced_loss,
    _aten.huber_loss.default: _reduced_loss,
    _aten.binary_cross_entropy.default: _binary_cross_entropy,
    _aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.max_pool2d_with_indices_backward.default: _pool_backward,
    _aten.avg_pool2d_backward.default: _pool_backward,
    _aten._adaptive_avg_pool2d_backward.default: _pool_backward,
    _aten.gelu_backward.default: _gelu_backward,
    _aten.logsumexp.default: lambda x, dims, *_: x.nbytes + _reduced(x, dims),
    _aten.kthvalue.default: lambda x, *_: x.nbytes + x.numel() * _COUNT,
    _aten.median.default: lambda x, *_: x.nbytes,
    _aten.nanmedian.default: lambda x, *_: x.nbytes,
    _aten.soft_margin_loss_backward.default: lambda _, x, *__: 2 * x.nbytes,
    _aten.masked_scatter_backward.default: _masked_scatter_backward,
}


def _converted(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes of the arguments' copies in another dtype, and of the result's in the dtype that is
    computed in."""
    packet = getattr(func, "_overloadpacket", None)
    if not args or not isinstance(args[0], Tensor) or not isinstance(result, Tensor):
        return 0
    x = args[0]
    if packet in _SCATTERED or (packet is _aten.gather and x.dim() > 1):
        index = args[2]
        wide = result.numel() * _FLOAT if x.dtype in _NARROW and index.numel() else 0
        return wide + (0 if index.dtype is torch.int64 else index.numel() * _COUNT)
    if packet is _aten.mean:
        is_narrow = {x.dtype, result.dtype} & {*_NARROW}
        return (x.numel() + result.numel()) * _FLOAT if is_narrow else 0
    if func is _aten.sum.dim_IntList and x.dtype == result.dtype:
        is_wide = x.dtype in _NARROW and _is_split(x, args[1])
        return (x.numel() + result.numel()) * _FLOAT if is_wide else 0
    if packet in _IN_RESULTS_DTYPE or packet is _aten.linalg_vector_norm:
        is_part = x.dtype.is_complex and not result.dtype.is_complex
        return 0 if is_part or x.dtype == result.dtype else x.numel() * result.itemsize
    if torch.Tag.pointwise not in func.tags or packet in _AS_THEY_ARE:
        return 0
    return _elementwise(packet, args, result)


def _is_split(x: Tensor, dims: Sequence[int] | None) -> bool:
    """Whether dimensions that are summed up have others between them."""
    summed = {dim % x.dim() for dim in dims or () if x.dim()}
    kinds = [dim in summed for dim in range(x.dim()) if x.shape[dim] > 1]
    begins = [kind for before, kind in zip([False, *kinds], kinds, strict=False) if kind > before]
    return len(begins) > 1


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
