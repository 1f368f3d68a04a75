"""Fake kernels in place of torch's, which know nothing of a sparse tensor's elements, refuse some
dtypes, and keep strides that a step's kernels make anew."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
_ADDED = (_aten.add, _aten.add_, _aten.sub, _aten.sub_)
_SHARED = (_aten.detach, _aten.alias, _aten.view_as)
_INDICES = (_aten._indices, _aten.indices)
_VALUES = (_aten._values, _aten.values)
_MADE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_GROUPED_MM: Any = getattr(_aten, "_grouped_mm", None)
_ALIGNED = 16  # bytes, of rows of a grouped product
_UNSAFE_VIEW = _aten._unsafe_view.default  # a view of which autograd is not told
_CTC_LOSS = _aten._ctc_loss.Tensor
_MAKE_STRIDES = (_aten.native_layer_norm, _aten.native_batch_norm, _aten._log_softmax)
_KEEP_STRIDES = (_aten.clone, _aten.clamp, _aten.hardtanh)


class _Parts(NamedTuple):
    """Fakes of a sparse fake tensor's indices and values, whose memory is that of the tensor."""

    indices: Tensor
    values: Tensor


def is_view(func: Any) -> bool:
    """Whether an operator returns its argument's memory."""
    return getattr(func, "is_view", False) or func is _UNSAFE_VIEW


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: bool) -> Any:
    """Runs an operator on fakes; one that asks a sparse tensor for its parts gets them.

    Args:
        plain: whether arguments are strided fake tensors without values, numbers and texts, and
            the result is new memory or what the operator changed in place.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is not None and packet is _GROUPED_MM and args[0].dtype is not torch.bfloat16:
        return _grouped_mm(*args, **kwargs)
    if func is _CTC_LOSS:
        return _ctc_loss(*args)
    parts = _parts_of(args[0]) if args else None
    if parts is not None:
        if packet in _INDICES:
            return parts.indices.detach()
        if packet in _VALUES:
            return parts.values.detach()
        if packet is _aten._nnz:
            return parts.values.shape[0]
    result = _of_meta_kernel(func, args, kwargs) if plain and args else None
    if result is None:
        result = func(*args, **kwargs)
    if isinstance(result, FakeTensor) and result.layout is torch.sparse_coo:
        made = _parts_made(func, packet, args, kwargs)
        if made is not None:
            result._memsave_ext_parts = made  # type: ignore[attr-defined]
    if _makes_strides(func, packet, args, kwargs):
        return _with_new_strides(result)
    return result


# Of torch's own fake kernels: whether an operator has one. Empty where a version has no such list.
_HAS_FAKE: list[tuple[Any, Any]] = getattr(fake_impls, "op_implementations_checks", [])


@functools.cache
def _has_meta_kernel(func: Any) -> bool:
    """Whether torch has a compiled kernel for the meta device, and no fake one."""
    if not _HAS_FAKE or any(check(func) for check, _ in _HAS_FAKE):
        return False
    # It may be behind one in Python. Results of those that are in Python alone depend on devices.
    return "RegisterMeta" in torch._C._dispatch_dump(func.name())


def _of_meta_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what the kernel for the meta device makes of fakes of the CPU, None where there is
    none. It is what the kernel on a device asks for its results' shapes and strides.

    The fake mode would compute most operators by formulas in Python, which takes many times as
    long.
    """
    if not _has_meta_kernel(func) or "device" in kwargs:
        return None
    fakes = [value for value in tree_iter(args) if isinstance(value, FakeTensor)]
    if not fakes or any(fake.fake_device.type != "cpu" for fake in fakes):
        return None
    mode = fakes[0].fake_mode
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return _as_fake(result, mode)
    if type(result) in (list, tuple):
        return type(result)(_as_fake(part, mode) for part in result)
    return None


def _as_fake(result: Any, mode: Any) -> Any:
    is_made = isinstance(result, Tensor) and not isinstance(result, FakeTensor)
    return FakeTensor(mode, result, torch.device("cpu")) if is_made else result


def _makes_strides(func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step's kernel makes the strides of its result anew, those of dimensions of one
    element, too.

    Elementwise kernels do so of contiguous tensors of one shape. A model may look at such strides:
    they tell whether the channels of an image of one pixel are last.
    """
    if packet in _MAKE_STRIDES:
        return bool(args[0].is_contiguous())
    if packet is None or packet in _KEEP_STRIDES or "Scalar" in func._overloadname:
        return False
    if torch.Tag.pointwise not in func.tags or func._schema.is_mutable or kwargs:
        return False
    kinds = zip(args, func._schema.arguments, strict=False)
    read = [arg for arg, kind in kinds if isinstance(kind.type, torch.TensorType)]
    return all(
        type(t) is FakeTensor and t.shape == read[0].shape and t.is_contiguous() for t in read
    )


def _with_new_strides(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(map(_with_new_strides, result))
    if not isinstance(result, FakeTensor) or result._is_view() or not result.is_contiguous():
        return result
    made = torch.empty(result.shape, dtype=result.dtype, device=result.device)
    return result if made.stride() == result.stride() else made


def parts_of(tensor: Any) -> tuple[Any, ...]:
    """Returns the indices and values of a sparse fake tensor, such as the gradient of
    ``nn.Embedding(sparse=True)``; nothing of another."""
    return _parts_of(tensor) or ()


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
        named = dict(zip(names, args, strict=False)) | kwargs
        return _Parts(named["indices"], named["values"])
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


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Returns a fake of what ``torch.nn.functional.grouped_mm`` makes in other dtypes than
    bfloat16: a product for each group, or one of all groups' rows or columns.

    Experts of models use it so. It runs there, one product after the other.
    """
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():
        groups = (len(offs) if offs is not None else a.shape[0],)
    shape = (*groups, a.shape[-2], b.shape[-1])
    in_row = _ALIGNED // a.element_size()
    row = -(-shape[-1] // in_row) * in_row
    stride = (*(shape[-2] * row for _ in groups), row, 1)
    return torch.empty_strided(shape, stride, dtype=a.dtype, device=a.device)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, _: Tensor, target_lengths: Tensor, *__: Any
) -> tuple[Tensor, Tensor]:
    """Returns fakes of each row's loss and of its alphas, which are of the longest target; where
    lengths are not known, of the longest that there can be."""
    steps, *rows = log_probs.shape[:-1]
    lengths = getattr(target_lengths, "constant", None)
    longest = targets.shape[-1] if lengths is None else int(lengths.max())
    return log_probs.new_empty(rows), log_probs.new_empty((*rows, steps, 2 * longest + 1))
