"""Watches calls of modules with nothing in them that a copy, a file or a compiled graph would keep.

Forward hooks stay in copies made meanwhile, cannot be pickled, and torch.compile traces them: what
it compiles among hooks is split at each of them, also when they are gone, as it does not look for
them again. Watched calls therefore go through ``_compiled_call_impl``, where torch keeps the
function of ``Module.compile()``: torch leaves it out of copies and pickles, and a tracer that meets
a module without hooks goes on to its ``forward``.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP, _DEFAULT = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
_NAME = "_compiled_call_impl"
_lock = threading.Lock()


def not_compiled(function: Function) -> Function:
    """Has torch.compile run ``function`` as it is, and what it calls, where it is not inlined.

    ``torch.compiler.disable`` does so, too, but imports the compiler, which takes a second.
    """
    if isinstance(function, FunctionType):
        strategy = _eval_frame._FrameExecStrategy(_SKIP, _SKIP)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def without_compiler(module: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile`` made ``module`` of, or ``module`` itself."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None or not isinstance(module, eval_frame.OptimizedModule):
        return module
    original: nn.Module = module._orig_mod
    return original


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returned, or was compiled in place."""
    found = module.__dict__.get(_NAME)
    in_place = found.compiled if isinstance(found, _Calls) else found
    return in_place is not None or without_compiler(module) is not module


def watch_calls(
    stack: ExitStack, module: nn.Module, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Calls ``before`` and ``after`` around every call of ``module`` until ``stack`` is closed.

    ``after`` is called also where the forward raises. Neither is called where a tracer inlines the
    module, nor for a module that is compiled in place meanwhile.
    """
    watcher = (not_compiled(before), not_compiled(after))
    with _lock:
        calls = module.__dict__.get(_NAME)
        if not isinstance(calls, _Calls):
            calls = module.__dict__[_NAME] = _Calls(module, calls)
        calls.watchers = (*calls.watchers, watcher)
    stack.callback(calls.forget, watcher)


class _Calls:
    """Stands in for the calls of a module that is watched."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)  # it may be deleted meanwhile, and then free its memory
        self.compiled = compiled
        self.watchers: tuple[tuple[Callable[[], None], Callable[[], None]], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if torch.compiler.is_compiling():
            return (self.compiled or module._call_impl)(*args, **kwargs)
        # DataParallel's replicas share a module's attributes; only the caller says which is meant.
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, nn.Module) and caller.__dict__.get(_NAME) is self:
            module = caller
        watchers = self.watchers
        for before, _ in watchers:
            before()
        try:
            return (self.compiled or module._call_impl)(*args, **kwargs)
        finally:
            for _, after in reversed(watchers):
                after()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A module that copies or pickles its attributes itself gets None, which is torch's."""
        return type(None), ()

    def forget(self, watcher: tuple[Callable[[], None], Callable[[], None]]) -> None:
        with _lock:
            self.watchers = tuple(w for w in self.watchers if w is not watcher)
            module = self._module()
            if self.watchers or module is None or module.__dict__.get(_NAME) is not self:
                return
            if self.compiled is None:
                del module.__dict__[_NAME]
            else:
                module.__dict__[_NAME] = self.compiled


_eval_frame.set_code_exec_strategy(
    _Calls.__call__.__code__, _eval_frame._FrameExecStrategy(_SKIP, _DEFAULT)
)
