"""Puts fake tensors in the place of real ones, everywhere in a process. For a child alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from ..store.mapped import is_mapped, pretend

_COUNTS = (torch.bool, torch.int32, torch.int64)
_MOST_KNOWN = 1 << 24  # elements of a tensor of counts, whose values stay known
_MOST_COPIED = _MOST_KNOWN * torch.int64.itemsize  # bytes of memory that others have, too
_DEFAULT_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl


def swap_all(
    tensors: Iterable[Tensor],
    mode: FakeTensorMode,
    storages: dict[int, torch.UntypedStorage] | None = None,
) -> list[Tensor]:
    """Makes tensors fake ones, and their gradients, and returns all of them.

    The tensor objects stay, so that closures, caches and lists have fakes, too: each gets another
    implementation. They share storages, and have gradients, hooks and attributes, as before. What
    a model may look at keeps its values: whole numbers, and single numbers that are not trained.
    Subclasses with a dispatch of their own stay, and have fakes inside.

    Args:
        tensors: all of the process.
        mode: of the fakes.
        storages: those of fakes that were made before, by the addresses of the real ones.
    """
    kinds = _Kinds()
    found = [tensor for tensor in tensors if kinds[type(tensor)]]
    known = set(map(id, found))
    gradients: list[tuple[Tensor, Tensor]] = []
    for tensor in list(found):
        if tensor.is_leaf and tensor.requires_grad and (gradient := tensor.grad) is not None:
            gradients.append((tensor, gradient))
            if id(gradient) not in known and kinds[type(gradient)]:  # no object referred to it
                known.add(id(gradient))
                found.append(gradient)
    storages = {} if storages is None else storages
    constants = _Constants()
    swapped = []
    for tensor in found:
        kind, made = kinds[type(tensor)], _fake_of(tensor, mode, storages)
        if kind is not None and made is not None and _swap(tensor, made, kind, mode, constants):
            swapped.append(tensor)
        elif made is not None:
            _real.append(tensor)  # no other memory may have its address
    for tensor, gradient in gradients:
        if isinstance(tensor, FakeTensor) and isinstance(gradient, FakeTensor):
            tensor.grad = gradient
    return swapped


class _Kinds(dict[type, "type[FakeTensor] | None"]):
    """By a class of objects: that of the fakes in their place; None where they stay."""

    def __missing__(self, kind: type) -> type[FakeTensor] | None:
        made = self[kind] = self._made(kind)
        return made

    def _made(self, kind: type) -> type[FakeTensor] | None:
        if kind in (Tensor, nn.Parameter, FakeTensor):
            return FakeTensor
        if FakeTensor in kind.__mro__:
            return None
        dispatch = getattr(kind, "__torch_dispatch__", _DEFAULT_DISPATCH)
        if dispatch is not _DEFAULT_DISPATCH:
            return None
        try:  # with its methods and attributes, as of weights in four bits
            return type(kind.__name__, (FakeTensor, kind), {"__module__": kind.__module__})
        except TypeError:
            return None


def _fake_of(
    tensor: Tensor, mode: FakeTensorMode, storages: dict[int, torch.UntypedStorage]
) -> FakeTensor | None:
    """Returns a fake tensor of the CPU; None where none can be made.

    ``storages``: those of the fakes, by the addresses of the real ones.
    """
    cpu = torch.device("cpu")
    try:
        if is_lazy(tensor):
            return None
        if not _is_plain(tensor):
            return mode.from_tensor(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            storages[storage._cdata] = memory.untyped_storage()
        on_meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        made = FakeTensor(mode, on_meta.set_(storages[storage._cdata], *geometry), cpu)
    except (RuntimeError, NotImplementedError, TypeError, AssertionError):
        return None  # of a kind that has no fake, as without a storage
    if tensor.requires_grad:
        made.requires_grad_()
    return made


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Constants:
    """Of tensors whose values stay known: tensors that have them, which operators may change.

    They are the real ones. Where other processes have the same memory, as that of a batch which a
    worker of a DataLoader has made, they are copies, which share memory as the real ones do; of no
    more than there is room for.
    """

    def __init__(self) -> None:
        self._copies: dict[int, torch.UntypedStorage] = {}  # by the addresses of the real ones
        self._left = _MOST_COPIED

    @cached_property
    def _shared(self) -> list[tuple[int, int]]:
        return _shared_memory()

    def of(self, real: Tensor) -> Tensor | None:
        storage = real.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a fake of others, such as what torch.compile has left
            return real
        if not any(begin <= address < end for begin, end in self._shared):
            return real
        if storage._cdata not in self._copies:
            is_part = storage.nbytes() > _MOST_COPIED
            size = real.nbytes if is_part else storage.nbytes()
            if size > self._left:
                return None
            self._left -= size
            if is_part:
                return real.clone()
            self._copies[storage._cdata] = storage.clone()
        made = torch.empty(0, dtype=real.dtype)
        geometry = real.storage_offset(), real.shape, real.stride()
        return made.set_(self._copies[storage._cdata], *geometry)


def _shared_memory() -> list[tuple[int, int]]:
    """Returns where this process has memory in which it changes what others have."""
    found = []
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            where, mode, *_ = line.split(maxsplit=2)
            if mode[1] == "w" and mode[3] == "s":
                begin, _, end = where.partition("-")
                found.append((int(begin, 16), int(end, 16)))
    return found


def _swap(
    tensor: Tensor,
    fake: FakeTensor,
    kind: type[FakeTensor],
    mode: FakeTensorMode,
    constants: _Constants,
) -> bool:
    """Gives a tensor the fake's implementation and class; returns False where it cannot have it."""
    is_parameter, is_known = isinstance(tensor, nn.Parameter), _keeps_values(tensor)
    lies_elsewhere = is_mapped(tensor)
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    attributes = dict(fake.__dict__)
    try:
        tensor.__class__ = kind
    except TypeError:  # it has slots, for example
        return False
    torch._C._swap_tensor_impl(tensor, fake)
    real: Tensor = fake
    real.__dict__.clear()
    real.__class__ = Tensor
    _real.append(real)
    tensor.__dict__.update(attributes)
    if is_parameter:
        tensor._is_param = True
    if lies_elsewhere:
        pretend(tensor)
    # The new implementation knows none of them, nor of hooks to come, if there is a dict for them.
    if hooks is not None:
        tensor._backward_hooks = _of_users(hooks)
    if after is not None:
        tensor._post_accumulate_grad_hooks = _of_users(after)
    if is_known and (constant := constants.of(real)) is not None:
        tensor.constant = constant  # type: ignore[attr-defined]
        converter: Any = mode.fake_tensor_converter
        converter.add_constant_storage_mapping(tensor)
    return True


_real: list[Tensor] = []  # kept, as nothing of CUDA may be freed in a child


def _keeps_values(tensor: Tensor) -> bool:
    try:
        is_here = not tensor.is_meta and tensor.device.type == "cpu" and _is_plain(tensor)
    except RuntimeError:  # it is a fake already, of a child that this one is in
        return False
    if not is_here:
        return False
    if tensor.dtype in _COUNTS:
        return tensor.numel() <= _MOST_KNOWN
    return tensor.numel() == 1 and not tensor.requires_grad


def _of_users(hooks: Any) -> Any:
    """Leaves out this package's: what they look after is not the step that runs here."""
    ours = __name__.partition(".")[0]
    kept = type(hooks)()
    for number, hook in hooks.items():
        if (getattr(hook, "__module__", None) or "").partition(".")[0] != ours:
            kept[number] = hook
    return kept
