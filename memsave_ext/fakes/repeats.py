"""Remembers what operators return for arguments of the same kind.

The fake mode's own memory of them asks each argument for everything that a fake tensor may be,
which is most of the time of a prediction. Here few properties of plain ones are compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._pytree import tree_iter

from . import kernels, measured

_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_mkldnn: Any = torch.backends.mkldnn
_VALUES_MATTER = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _New(NamedTuple):
    """A result with memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Costs(NamedTuple):
    """What the kernel of an operator takes."""

    bytes: int  # that it makes and frees itself
    seconds: float  # about, for plans
    on_device: float  # about, on the device that is predicted


class _Same(NamedTuple):
    """A result that is a number, or none."""

    value: int | None


class _Known(NamedTuple):
    # A position among the arguments stands for that argument, which an operator changed in place.
    results: list[_New | _Same | int]
    sequence: Any  # the class that holds them, None for a single one
    costs: Costs


_Key = tuple[Any, ...]
Learned = tuple[_Key, dict[_Key, _Known], measured.Known]
# Of this process, by what decides the results of all operators together.
_of_process: dict[_Key, dict[_Key, _Known]] = {}
_MOST = 1 << 16  # calls that are remembered


class Repeats:
    """What is known of calls on a device, of this prediction and of those before it."""

    def __init__(self, device: torch.device) -> None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._key = device.type, torch.get_num_threads(), _mkldnn.enabled, deterministic
        self._known = _of_process.setdefault(self._key, {})
        self._new: dict[_Key, _Known] = {}
        self._fitting: dict[Any, bool] = {}

    def learned(self) -> Learned:
        """Returns what this prediction has added, for :func:`learn` in another process."""
        return self._key, self._new, measured.learned()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Returns a call that may be a repeat, None if values or aliases decide its result."""
        if not self._is_fitting(func):
            return None
        if kwargs and any(isinstance(value, FakeTensor) for value in kwargs.values()):
            return None  # such as `out`, which the result is
        key: list[Any] = [func._name, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not _describe(args, key) or (kwargs and not _describe(kwargs.items(), key)):
            return None
        return Call(self._known, self._new, tuple(key))

    def view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a view, made without asking the fake mode; None if it may be no plain one."""
        if not kernels.is_view(func):
            return None
        if not args or type(args[0]) is not FakeTensor:
            return None
        if not self._is_fitting(func) or not _describe((args, *kwargs.values()), []):
            return None
        mode, device = args[0].fake_mode, args[0].fake_device
        with in_kernel_invocation_manager(mode):
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return FakeTensor(mode, result, device)
        return type(result)(FakeTensor(mode, part, device) for part in result)

    def _is_fitting(self, func: Any) -> bool:
        if func not in self._fitting:
            self._fitting[func] = _is_fitting(func)
        return self._fitting[func]


class Call:
    def __init__(self, known: dict[_Key, _Known], new: dict[_Key, _Known], key: _Key) -> None:
        self._known, self._new, self._key = known, new, key

    def repeated(self, args: tuple[Any, ...]) -> tuple[Any, list[FakeTensor], Costs] | None:
        """Returns the result, the tensors in it with new memory, and what it takes; None if this
        is the first such call."""
        known = self._known.get(self._key)
        if known is None:
            return None
        made: list[FakeTensor] = []
        results: list[Any] = []
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        for result in known.results:
            if isinstance(result, _New):
                made.append(_made(result, mode))
                results.append(made[-1])
            else:
                results.append(result.value if isinstance(result, _Same) else args[result])
        whole = known.sequence(results) if known.sequence else results[0]
        return whole, made, known.costs

    def remember(self, args: tuple[Any, ...], result: Any, costs: Costs) -> None:
        several = type(result) if type(result) in (tuple, list) else None
        storages = {t.untyped_storage()._cdata for t in tree_iter(args) if type(t) is FakeTensor}
        results: list[_New | _Same | int] = []
        for part in result if several else (result,):
            if part is None or type(part) is int:
                results.append(_Same(part))
                continue
            place = next((i for i, arg in enumerate(args) if arg is part), None)
            if place is None and (not _is_new(part) or part.untyped_storage()._cdata in storages):
                return
            results.append(
                _New(part.shape, part.stride(), part.dtype, part.fake_device)
                if place is None
                else place
            )
        self._known[self._key] = self._new[self._key] = _Known(results, several, costs)


def learn(learned: Learned) -> None:
    """Remembers what a prediction in a child process has learned."""
    key, new, taken = learned
    measured.learn(taken)
    known = _of_process.setdefault(key, {})
    if len(known) > _MOST:
        known.clear()
    known.update(new)


def _made(new: _New, mode: Any) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        tensor = torch.empty_strided(new.shape, new.stride, dtype=new.dtype, device="meta")
    return FakeTensor(mode, tensor, new.device)


def _is_fitting(func: Any) -> bool:
    """Whether an operator returns a view, new memory or what it changed in place, and the same for
    arguments of the same kind."""
    tags = func.tags if isinstance(func, torch._ops.OpOverload) else _VALUES_MATTER
    return not (
        any(tag in tags for tag in (*_VALUES_MATTER, torch.Tag.inplace_view))
        or func.namespace != "aten"
        or "lift" in func.name()
        or "resize" in func.name()
        or "set_" in func.name()
        # Of others: it may return a view. Some have a kernel of the CPU besides (silu_backward).
        or (_has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, "CPU"))
    )


def _has_kernel(func: Any, key: str) -> bool:
    keys = torch._C.DispatchKey
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), getattr(keys, key))


def _describe(values: Any, key: list[Any]) -> bool:
    """Adds what decides a result's sizes to ``key``; returns False where more may decide it."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_plain(value):
                return False
            key += (value.shape, value.stride(), value.dtype, value.fake_device)
        elif kind in (list, tuple):
            key.append(len(value))
            if not _describe(value, key):
                return False
        elif isinstance(value, _PLAIN):
            key += (kind, value)
        else:
            return False
    return True


def _is_plain(value: FakeTensor) -> bool:
    """Whether it is strided, real, and of unknown values."""
    strided = value.layout is torch.strided
    return strided and value.constant is None and not value.dtype.is_complex


def _is_new(value: Any) -> bool:
    """Whether it is a tensor that fills memory of its own, as far as can be told."""
    if type(value) is not FakeTensor or not _is_plain(value):
        return False
    if value.storage_offset() or value.requires_grad:
        return False
    with in_kernel_invocation_manager(value.fake_mode):
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return bool(like.untyped_storage().nbytes() == value.untyped_storage().nbytes())
