"""Recomputes count nothing: no module's running statistics, whatever its class.

torch's norms, and all that derive from them, update buffers in each forward. In the recompute of a
region of this package they are called as a shallow copy of themselves whose buffers are copies:
what they compute is the same, from the same batch, and what they write is dropped. Nothing that
another thread could see is changed, and nothing has to be undone.

``_call_impl`` of their common base class is where each of them passes, called from a closure, too.
Other modules do not pass here. In eval mode norms update nothing and are called as they are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .function import _is_recomputing

M = TypeVar("M", bound=nn.Module)


def copy_of(module: M) -> M:
    """``module`` with the same parameters, submodules and hooks, and copies of its buffers."""
    copy: M = object.__new__(type(module))
    with torch.no_grad():
        buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    copy.__dict__.update(module.__dict__, _buffers=buffers)
    return copy


def _counts(module: object) -> TypeGuard[_NormBase]:
    # Norms with a _call_impl of their own detect recomputes by themselves.
    return isinstance(module, _NormBase) and type(module)._call_impl is _call


def _call(self: _NormBase, *args: Any, **kwargs: Any) -> Any:
    if self.training and not torch.compiler.is_compiling() and _is_recomputing():
        self = copy_of(self)
    # Looked up at each call, because others may replace it.
    return nn.Module._call_impl(self, *args, **kwargs)


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
        norm, forward, given = function.__self__, function.__func__, 0
    elif args:
        norm, forward, given = args[0], function, 1
    if not _counts(norm) or forward is not type(norm).forward:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        of = copy_of(norm) if norm.training else norm
        return forward(of, *args[given:], **kwargs)

    return run
