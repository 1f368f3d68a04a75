"""What convolutions and LSTMs on the CPU allocate inside their kernels, which are mostly oneDNN's.

oneDNN cannot be asked: torch exports none of its functions. The sizes here follow its sources and
measured steps: channels are copied into blocks of 16, rows of an LSTM are padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK = 16  # convolutions keep channels in blocks of this size
_WIDEST = 14  # kernels for gradients of weights are at most this wide
_WIDEST_DEPTHWISE = 3
_BACKENDS: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
_ONEDNN = (_BACKENDS.Mkldnn, _BACKENDS.MkldnnEmpty)
_TO_IMAGE = (_BACKENDS.SlowTranspose2d, _BACKENDS.SlowTranspose3d)
_IM2COL = (_BACKENDS.Slow2d, _BACKENDS.Slow3d)
_IM2COL_OF_IMAGES = (_BACKENDS.SlowDilated2d, _BACKENDS.SlowDilated3d)
_STRIP = 1 << 14  # bytes beside an image that a thread of a strided transposed convolution takes

_PAGE = 4096  # each part of an LSTM's workspace fills pages
_LINE = 64  # bytes that rows of numbers are padded to
_FLOAT = 4
_GATES = 4


class _Convolution(NamedTuple):
    """A convolution's tensors and options; ``y`` is its result, or that result's gradient."""

    y: Tensor
    x: Tensor
    weight: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.weight.shape[:2] == (self.groups, 1)

    @property
    def is_mostly_padding(self) -> bool:
        """Whether oneDNN multiplies matrices of patches, for lack of a kernel for tiny images."""
        return not _is_last(self.x) and self.padding[-1] > self.y.shape[-1]

    def is_onednns_transposed(self, backend: Any) -> bool:
        """Whether it is oneDNN's transposed convolution, for whose backend torch has no name."""
        return self.transposed and backend not in (*_ONEDNN, *_TO_IMAGE, _BACKENDS.Empty)

    def has_weight_kernel(self) -> bool:
        """Whether oneDNN has a kernel for the gradient of the weight. It multiplies matrices
        otherwise, or, where channels are last, takes a kernel that fills a block for each group.

        The conditions are those of jit_uni_dw_conv_kernel_utils.hpp and, as measured, a widest
        kernel.
        """
        sizes, kernel = self.x.shape[2:], self.weight.shape[2:]
        if not self.is_depthwise:
            reach = zip(kernel, self.dilation, sizes, strict=True)
            fits = all(step == 1 or (width - 1) * step < size for width, step, size in reach)
            return fits and max(kernel) <= _WIDEST
        needed = zip(sizes, kernel, self.stride, self.padding, strict=True)
        fits = all(size >= width + -pad % step for size, width, step, pad in needed)
        return fits and kernel[-1] <= _WIDEST_DEPTHWISE

    def weight_copy(self) -> int:
        """Bytes of the weight in blocks of channels."""
        out, inside = self.weight.shape[:2]
        if self.is_depthwise:
            return _resized(self.weight, _in_blocks(out))
        inside = _in_blocks(inside) if inside >= _BLOCK else inside
        return _resized(self.weight, _in_blocks(out), inside)

    def columns(self, images: int) -> int:
        """Bytes of the patches of so many images, which a 1 x 1 kernel does without."""
        if self.weight.shape[2:].numel() == 1:
            return 0
        per_image = math.prod(self.weight.shape[1:]) * self.y.shape[2:].numel()
        return images * per_image * self.x.element_size()

    def columns_of_group(self) -> int:
        """Bytes of the patches of one group of an image."""
        return int(self.weight[0].numel() * self.y.shape[2:].numel() * self.y.element_size())

    def patches(self) -> int:
        """Bytes of the patches that a transposed convolution makes of an image, and adds up."""
        count = math.prod(self.weight.shape[1:]) * self.x.shape[2:].numel()
        return int(count * self.x.element_size())


def _backend_of(*arguments: Any) -> Any:
    """Returns what torch chooses with the threads of the process that is predicted: a child has
    one, and says that it has as many."""
    torch.set_num_threads(torch.get_num_threads())
    try:
        return torch._C._select_conv_backend(*arguments)
    finally:
        torch.set_num_threads(1)


def convolution(y: Tensor, x: Tensor, weight: Tensor, bias: Any, *options: Any) -> int:
    made = _Convolution(y, x, weight, *options)
    backend = _backend_of(x, weight, bias, *options)
    if backend in (*_IM2COL, *_IM2COL_OF_IMAGES):
        return made.columns(x.shape[0] if backend in _IM2COL else 1)
    if backend in _TO_IMAGE:
        at_once = x.shape[0] if backend == _BACKENDS.SlowTranspose2d else 1
        return at_once * made.patches()
    if made.is_onednns_transposed(backend):
        return _transposed(made, bias is not None)
    if backend not in _ONEDNN:
        return 0
    if made.is_mostly_padding:
        return max(made.columns_of_group(), y.nbytes)
    copy = _reordered(y)
    before = _reordered(x, is_input=True) + made.weight_copy() + (copy - y.nbytes if copy else 0)
    return max(before, copy)


def convolution_backward(
    result: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> int:
    *options, mask = rest
    made = _Convolution(grad, x, weight, *options)
    backend = _backend_of(x, weight, None, *options, bias_sizes)
    if backend in (*_IM2COL, *_IM2COL_OF_IMAGES):
        return made.columns(x.shape[0] if backend in _IM2COL else 1)
    if backend in _TO_IMAGE:
        copy = 0 if grad.is_contiguous() else grad.nbytes
        return copy + (made.patches() if weight.shape[2:].numel() > 1 else 0)
    transposed = made.is_onednns_transposed(backend)
    if backend not in _ONEDNN and not transposed:
        return 0
    # A slice of a gradient, as that of what was concatenated, is copied first.
    copy = 0 if grad.is_contiguous() or _is_last(grad) else grad.nbytes
    moments = (_transposed_gradients if transposed else _gradients)(made, mask, result)
    return copy + max(0, *moments)


def _transposed(made: _Convolution, has_bias: bool) -> int:
    """Bytes of a transposed convolution, whose kernels are those of a convolution's gradient."""
    x, y, weight = made.x, made.y, made.weight
    copy = _reordered(y)
    # A weight without groups is copied in blocks of all its channels.
    blocks = map(_in_blocks, weight.shape[:2])
    weight_copy = weight.nbytes if made.groups > 1 else _resized(weight, *blocks)
    if min(made.stride) == 1 or made.is_depthwise:
        # The bias is added in a second result.
        scratch = copy if has_bias else 0
        later = copy
    else:
        threads = min(torch.get_num_threads(), x.shape[0])
        scratch = threads * ((_reordered(x) or x.nbytes) // x.shape[0] + _STRIP)
        later = 2 * y.nbytes if copy else 0  # by way of channels that are last
    before = scratch + _reordered(x) + weight_copy + (copy - y.nbytes if copy else 0)
    return max(before, later)


def _transposed_gradients(made: _Convolution, mask: Sequence[bool], result: Any) -> Iterator[int]:
    """Yields what :func:`_gradients` does, of a transposed convolution: the gradient of its input
    is a convolution of the gradient of its result."""
    grad, x, weight = made.y, made.x, made.weight
    later: int = sum(t.nbytes for t in result[1:] if t is not None)
    grad_copy, copy = _reordered(grad, is_input=True), _reordered(x)
    weight_copy = weight.nbytes if made.groups > 1 else made.weight_copy()
    if mask[0]:
        yield grad_copy + weight_copy + copy - (x.nbytes if copy else 0) - later
        yield copy - later
    if mask[1] or mask[2]:
        bias = result[2].nbytes if result[2] is not None else 0
        yield grad_copy + copy + weight_copy + bias - later
        yield weight_copy


def _gradients(made: _Convolution, mask: Sequence[bool], result: Any) -> Iterator[int]:
    """Yields what is made besides the results at each of the moments that may need the most.

    The gradient of the input is made first, then those of the weight and bias, then copies of
    these. All results are counted when this is asked, so that those not made yet are taken off.
    """
    grad, x, weight = made.y, made.x, made.weight
    later: int = sum(t.nbytes for t in result[1:] if t is not None)
    x_copy, grad_copy = _reordered(x, is_input=True), _reordered(grad)
    weight_copy = made.weight_copy()
    if mask[0] and made.is_mostly_padding and not made.is_depthwise:
        yield made.columns_of_group() - later
    elif mask[0]:
        yield x_copy + grad_copy + weight_copy - (x.nbytes if x_copy else 0) - later
        if min(made.stride) > 1 and not (made.is_depthwise or _is_last(x)):
            # The kernel's result has its channels last, and goes by way of blocks.
            yield 2 * x.nbytes - later
    if not (mask[1] or mask[2]):
        return
    bias = result[2].nbytes if result[2] is not None else 0
    if not made.has_weight_kernel():
        if not _is_last(x):
            threads = min(torch.get_num_threads(), x.shape[0] * made.groups)
            yield threads * (made.columns_of_group() + 4 * weight.nbytes)
            return
        # Every group fills blocks of its own.
        padded_groups = made.groups * _in_blocks(weight.shape[0] // made.groups)
        weight_copy = _resized(weight, padded_groups, _in_blocks(weight.shape[1]))
    yield x_copy + grad_copy + weight_copy + bias - later
    yield weight_copy + bias + (weight.nbytes if _is_last(x) else 0)


def _is_last(tensor: Tensor) -> bool:
    """Whether channels are the last dimension in memory."""
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return (
        tensor.dim() in (4, 5)
        and tensor.is_contiguous(memory_format=last)
        and not tensor.is_contiguous()
    )


def _reordered(tensor: Tensor, *, is_input: bool = False) -> int:
    """Bytes of a copy in blocks of channels; 0 if the kernel reads the tensor as it is."""
    channels = tensor.shape[1]
    if _is_last(tensor) or (is_input and channels < _BLOCK):
        return 0
    return tensor.nbytes // channels * _in_blocks(channels)


def _resized(weight: Tensor, *sizes: int) -> int:
    """Bytes of a weight whose first dimensions have these sizes."""
    return weight.nbytes // math.prod(weight.shape[: len(sizes)]) * math.prod(sizes)


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def lstm_workspace(*args: Any) -> int:
    """Bytes of what an LSTM's forward leaves to its backward: gates, states and the gradients of
    states, of each step in time. torch's fake kernel leaves it empty."""
    x, hidden = args[0], args[10]
    steps, rows = x.shape[:2]  # also of a batch that comes first, which torch transposes
    size, widest = x.element_size(), max(x.shape[2], hidden)
    later = 2 * (steps + 1) * rows  # with the states before the first step, of input and output
    parts = (
        steps * rows * _row(_GATES * hidden, size),
        later * _row(widest, size),
        steps * rows * _row(hidden, size),
        later * hidden * size,
        *(2 * [later * _row(widest, _FLOAT)]),
        later * hidden * _FLOAT,
    )
    return sum(map(_in_pages, parts))


def lstm(*args: Any) -> int:
    """Bytes of the scratch and the copies of weights."""
    x, *weights = args[:3]
    hidden, size = args[10], x.element_size()
    copies = sum(_packed(weight, size) for weight in weights)
    return int(copies + _GATES * hidden * size) + _scratch(x, hidden)


def lstm_backward(*args: Any) -> int:
    """Bytes of the scratch, the copies of weights and gradients in the kernel's own layout."""
    x, *weights = args[:3]
    outputs, grads, hidden = args[7:10], args[10:13], args[15]
    size = x.element_size()
    made = sum(_gradient(g, y) for g, y in zip(grads, outputs, strict=True))
    for weight in weights:
        rows, columns = weight.shape
        if size < _FLOAT or _row(columns, size) != columns * size:
            made += int(rows) * _row(columns, size)
        made += _packed(weight, _FLOAT)
    biases = _GATES * hidden * (size + _FLOAT)
    return int(made + biases) + _scratch(x, hidden)


def _gradient(grad: Tensor | None, output: Tensor) -> int:
    """Bytes of zeros where there is none, and of copies that are contiguous and in float32."""
    plain = grad is not None and grad.is_contiguous()
    widened = output.numel() * _FLOAT if output.element_size() < _FLOAT else 0
    return (0 if plain else output.nbytes) + widened


def _scratch(x: Tensor, hidden: int) -> int:
    """Bytes of the sums before the gates: of all steps in time, or of one where they are widened
    from a narrow dtype; and about those of a step's states."""
    steps, rows = x.shape[:2]
    if x.element_size() < _FLOAT:
        steps = 1
    gates = steps * rows * _row(_GATES * hidden, _FLOAT)
    return _in_pages(gates) + 2 * _in_pages(rows * hidden * _FLOAT)


def _packed(weight: Tensor, size: int) -> int:
    """Bytes of a weight's copy, transposed to rows of all gates."""
    gates, columns = weight.shape
    return int(columns) * _row(gates, size)


def _row(count: int, size: int) -> int:
    """Bytes of a padded row. One of a multiple of 256 numbers is padded by a line more, so that
    rows are not at the same place of the caches."""
    per_line = _LINE // size
    padded = -(-count // per_line) * per_line
    return (padded + per_line if padded % 256 == 0 else padded) * size


def _in_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
