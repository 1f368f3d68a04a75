"""torch's norms in recomputes, which must not count their running statistics once more.

torch's norms, and all that derive from them, update buffers in each forward. In the recompute of a
region of this package they are called as a shallow copy of themselves whose buffers are copies:
what they compute is the same, from the same batch, and what they write is dropped. Nothing that
another thread could see is changed, and nothing has to be undone.

``_call_impl`` of their common base class is where each of them passes, called from a closure, too.
Other modules do not pass here. In eval mode norms update nothing and are called as they are.

Here, too, a norm raises that computes statistics of a whole batch and is called with a piece of it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode

from .function import _is_recomputing

M = TypeVar("M", bound=nn.Module)


class _Thread(threading.local):
    in_piece = False  # whether a forward of one of several pieces of a batch runs


_thread = _Thread()


def copy_of(module: M) -> M:
    """``module`` with the same parameters, submodules and hooks, and copies of its buffers."""
    copy: M = object.__new__(type(module))
    # Selective checkpointing's mode expects the operators of the forward. Others may count memory.
    is_selective = isinstance(_get_current_dispatch_mode(), _CachedTorchDispatchMode)
    with torch.no_grad(), _pop_mode_temporarily() if is_selective else contextlib.nullcontext():
        buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    copy.__dict__.update(module.__dict__, _buffers=buffers)
    return copy


def _counts(module: object) -> TypeGuard[_NormBase]:
    # Norms with a _call_impl of their own detect recomputes by themselves.
    return isinstance(module, _NormBase) and type(module)._call_impl is _call


def _call(self: _NormBase, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        check_batch(self)
        if self.training and _is_recomputing():
            self = copy_of(self)
    # Looked up at each call, because others may replace it.
    return nn.Module._call_impl(self, *args, **kwargs)


@contextlib.contextmanager
def refuse_batch_statistics() -> Iterator[None]:
    """In the block norms raise that need the whole batch: they are called with a piece of it."""
    outer, _thread.in_piece = _thread.in_piece, True
    try:
        yield
    finally:
        _thread.in_piece = outer


def check_batch(norm: _NormBase) -> None:
    """Raises where a norm that needs the whole batch is called with a piece of it."""
    # Not in a recompute that the function itself asks for, of a region of another batch.
    if _thread.in_piece and _needs_batch(norm) and not _is_recomputing():
        raise RuntimeError(
            f"checkpoint: {type(norm).__name__} computes or counts statistics of the whole batch, "
            "and chunks=n gives it one piece after the other. Leave chunks out, or call the norm "
            "outside of the function; in eval mode, with running statistics, it works."
        )


def _needs_batch(norm: _NormBase) -> bool:
    if isinstance(norm, _InstanceNorm):  # has statistics of each row, which it may count
        return norm.training and norm.track_running_stats
    return norm.training or norm.running_mean is None or norm.running_var is None


_NormBase._call_impl = _call  # type: ignore[assignment, method-assign]


def for_recompute(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """``function``, except where it is the forward of a norm, which goes past its ``_call_impl``.

    That is ``norm.forward``, or ``type(norm).forward`` called with the norm.
    """
    if isinstance(function, functools.partial):
        inner = for_recompute(function.func, (*function.args, *args))
        if inner is function.func:
            return function
        return functools.partial(inner, *function.args, **function.keywords)
    norm: object = None
    if isinstance(function, types.MethodType):
        norm, forward, skipped = function.__self__, function.__func__, 0
    elif args:
        norm, forward, skipped = args[0], function, 1
    if not _counts(norm) or forward is not type(norm).forward:
        return function
    check_batch(norm)

    def run(*args: Any, **kwargs: Any) -> Any:
        called = copy_of(norm) if norm.training else norm
        return forward(called, *args[skipped:], **kwargs)

    return run
