"""Measures what oneDNN's convolutions and LSTMs, and other libraries' operators, allocate inside of
their kernels on the CPU.

oneDNN cannot be asked: torch exports none of its functions. Which of its kernels runs, and what
that one copies, depends on the processor's instructions, on threads and shapes. So each kind of
call runs on real memory, once in the life of a process: in a child, in a thread of its own, as that
has a pool of OpenMP's threads where the thread that was forked has none. Of a large batch two small
ones run, and each allocation is taken to grow with the batch as it does from one to the other.

Of other libraries' operators, as bitsandbytes', a fake kernel tells the results alone. They run on
zeros of the whole size, in a child of the child, whose end or standstill ends nothing else.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dry_run.child import allow, in_child
from ..memory.figures import make_tracker
from ..shared.warn import warn

_aten = torch.ops.aten
_LSTM = _aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = _aten.mkldnn_rnn_layer_backward.default
_GROWING = {  # the arguments whose first dimension is that of the batch, of an LSTM that of time
    _aten.convolution.default: ("input",),
    _aten.convolution_backward.default: ("grad_output", "input"),
    _LSTM: ("input",),
    _LSTM_BACKWARD: ("input", "output", "grad_output"),
}
_BYTES = 0  # the column of a record's blocks
_MOST_CHANGES = 1 << 16
_FEW_IMAGES = 2, 4  # for each thread, of which kernels are those of many
_FEW_STEPS = 64, 128  # in time, whose memory is padded to pages
_CPU = torch.device("cpu")
_OURS = "memsave_ext"  # whose operators run on fakes as they are
_SECONDS = 60.0  # that an operator of a library may take


class _Like(NamedTuple):
    """What a tensor is like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_CPU).zero_()


class Allocations(NamedTuple):
    """What a call allocates, in order; what it frees is negative."""

    changes: list[int]
    last: int  # bytes of the last result

    def workspace(self) -> int:
        """Bytes at its peak beside those of its results."""
        return max(itertools.accumulate(self.changes, initial=0)) - sum(self.changes)


_Key = tuple[Any, ...]
Known = dict[_Key, Allocations | None]
_known: Known = {}  # of this process
_new: Known = {}  # what it has measured itself, as a child does


def is_measured(func: Any) -> bool:
    return func in _GROWING or _is_of_library(func)


@functools.cache
def _is_of_library(func: Any) -> bool:
    """Whether it has a fake kernel in Python, as libraries register it, and one for the CPU."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == _OURS:
        return False
    entry = torch._library.simple_registry.singleton.find(func._schema.name)
    return (
        entry.fake_impl.kernel is not None
        and torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU")
    )


def allocations(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Allocations | None:
    """Returns what a call allocates with arguments like these; None if it cannot be measured."""
    if func not in _GROWING:
        try:
            named = tuple((name, _like(value, None)) for name, value in (kwargs or {}).items())
            return _measured(func, tuple(_like(arg, None) for arg in args), named)
        except (RuntimeError, TypeError):  # of other layouts, or of a class without a hash
            return None
    names = [argument.name for argument in func._schema.arguments]
    size: int = args[names.index("input")].shape[0]

    def of(size: int) -> Allocations | None:
        resized = (
            _like(arg, size if name in _GROWING[func] else None)
            for name, arg in zip(names, args, strict=False)
        )
        return _measured(func, tuple(resized))

    if func in (_LSTM, _LSTM_BACKWARD):
        small, large = _FEW_STEPS
    else:
        small, large = (few * torch.get_num_threads() for few in _FEW_IMAGES)
    if size <= large:
        return of(size)
    a, b = of(small), of(large)
    if a is None or b is None or len(a.changes) != len(b.changes):
        return of(size)

    def grown(before: int, after: int) -> int:
        return before - (before - after) * (size - small) // (large - small)

    return Allocations(list(map(grown, a.changes, b.changes)), grown(a.last, b.last))


def _like(arg: Any, size: int | None) -> Any:
    """Returns an argument as part of a key; of a tensor what it is like, where ``size`` is given
    with such a first dimension."""
    if isinstance(arg, (list, tuple)):
        return tuple(_like(part, None) for part in arg)
    if not isinstance(arg, Tensor):
        return arg
    shape, stride = tuple(arg.shape), arg.stride()
    if size is not None and size != shape[0]:
        # Dimensions outside of the first one in memory are closer together, or further apart.
        stride = tuple(s // shape[0] * size if s > stride[0] else s for s in stride)
        shape = (size, *shape[1:])
    return _Like(shape, stride, arg.dtype)


def _as_made(like: Any) -> Any:
    if isinstance(like, _Like):
        return like.zeros()
    return tuple(map(_as_made, like)) if isinstance(like, tuple) else like


def _measured(
    func: Any, likes: tuple[Any, ...], named: tuple[tuple[str, Any], ...] = ()
) -> Allocations | None:
    mkldnn: Any = torch.backends.mkldnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = func._name, torch.get_num_threads(), mkldnn.enabled, deterministic, likes, named
    if key not in _known:
        begun = time.monotonic()
        taken, error = None, None
        try:
            if func in _GROWING:
                taken = _in_thread(func, likes, named)
            else:
                taken = in_child(lambda: _in_thread(func, likes, named), _SECONDS)
        except Exception as raised:  # whatever an operator raises
            error = raised
        torch.set_num_threads(1)  # of MKL, which has one number for all threads
        allow(time.monotonic() - begun)
        if error is not None:
            text = str(error).partition("\n")[0]
            warn(
                f"memsave_ext: predict: the temporary memory of {func} is not known, and is not "
                f"counted: {text}",
            )
        _known[key] = _new[key] = taken
    return _known[key]


def _in_thread(
    func: Any, likes: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> Allocations:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, func, likes, named).result()


def _measure(func: Any, likes: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Allocations:
    torch.set_num_threads(torch.get_num_threads())  # those of the process that is predicted
    args = list(map(_as_made, likes))
    kwargs = {name: _as_made(like) for name, like in named}
    if func not in _GROWING:
        func(*args, **kwargs)  # what it makes once, it has made
    if func is _LSTM_BACKWARD:
        args[-1] = _lstm_workspace(args)
    tracker = make_tracker(_CPU, [], False, _MOST_CHANGES)
    tracker.start(None)
    try:
        results = func(*args, **kwargs)
    finally:
        tracker.stop()
    last = results[-1] if isinstance(results, tuple) else results
    record = tracker.record()
    changes = [
        sign * int(record.blocks[block, _BYTES])
        for _, _, block, sign, _, _ in record.changes.tolist()
        if block >= 0
    ]
    size = last.untyped_storage().nbytes() if isinstance(last, Tensor) else 0
    return Allocations(changes, size)


def _lstm_workspace(args: list[Any]) -> Tensor:
    """Returns what the forward leaves to the backward that is called with these."""
    (x, *weights), (hidden, cell) = args[:5], args[5:7]
    reverse, mode, size, layers, biases, train, bidirectional, batch_sizes, first = args[13:22]
    options = reverse, batch_sizes, mode, size, layers, biases, bidirectional, first, train
    workspace: Tensor = _LSTM(x, *weights, hidden, cell, *options)[-1]
    return workspace


def learned() -> Known:
    """Returns what this process has measured, for :func:`learn` in the one that forked it."""
    return _new


def learn(known: Known) -> None:
    _known.update(known)
