"""``autograd.Function``s that are declared to be pure: a block computes again what they make."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from .. import _parts

# Those of libraries that are known to be, by module and name. Where a module is not loaded, nothing
# has called them.
KNOWN = tuple(("bitsandbytes.autograd._functions", name) for name in ("MatMul4Bit", "MatMul8bitFp"))

_TENSOR = object()  # stands for one among arguments


def check_pure(who: str, pure: object) -> tuple[type[Function], ...]:
    """Raises TypeError where it is no sequence of classes of autograd.Function."""
    if pure == ():
        return ()
    is_list = isinstance(pure, (list, tuple))
    items: Sequence[object] = pure if is_list else (pure,)  # type: ignore[assignment]
    for item in items:
        if not (is_list and isinstance(item, type) and issubclass(item, Function)):
            given = item.__name__ if isinstance(item, type) else type(item).__name__
            raise TypeError(
                f"{who}: pure must be a list of classes of torch.autograd.Function, whose forwards "
                f"compute the same from the same arguments, got {given}"
            )
    return tuple(items)  # type: ignore[arg-type]


def tell(pure: tuple[type[Function], ...]) -> ExitStack | None:
    """Until what it returns is closed, the forwards of these Functions, and of those known, tell
    blocks of themselves. None: there are none."""
    loaded = [(sys.modules[module], name) for module, name in KNOWN if module in sys.modules]
    if not (loaded or pure):
        return None  # as in most steps
    known = [getattr(module, name, None) for module, name in loaded]
    stack = ExitStack()
    try:
        _install({*pure, *(f for f in known if f is not None)}, stack)
    except BaseException:
        stack.close()
        raise
    return stack


class _Declared:
    """A Function whose forward tells the block that is open where it begins and ends."""

    def __init__(self, function: type[Function], number: int) -> None:
        self.function, self.number = weakref.ref(function), number
        self.users = 0  # blocks that are open
        self.own: Any = None  # the class's own forward; None where it is another class's
        self.forward: Any = None  # what stands in its place while blocks are open

    def install(self) -> None:
        self.users += 1
        if self.users > 1:
            return
        function: Any = self.function()
        forward = function.forward
        self.own = function.__dict__.get("forward")
        takes_context = not _is_defined(function.setup_context)
        self.forward = _recorded_forward(forward, takes_context, self.number)
        function.forward = staticmethod(self.forward)

    def remove(self) -> None:
        self.users -= 1
        if self.users > 0:
            return
        function: Any = self.function()
        own, forward = self.own, self.forward
        self.own = self.forward = None  # which may refer to the class
        if function is None:
            return
        if getattr(function.__dict__.get("forward"), "__func__", None) is not forward:
            return  # somebody else has replaced it meanwhile
        if own is None:
            del function.forward
        else:
            function.forward = own


def _is_defined(setup_context: Any) -> bool:
    return setup_context is not Function.setup_context


_all: weakref.WeakKeyDictionary[type[Function], _Declared] = weakref.WeakKeyDictionary()
_names: dict[str, int] = {}  # how many Functions have it
_lock: Any = threading.RLock()
# A process that was forked while a thread held it does not have that thread.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)


def _install(functions: Iterable[type[Function]], stack: ExitStack) -> None:
    native: Any = _parts.native("remat")
    for function in functions:
        with _lock:
            declared = _all.get(function)
            if declared is None:
                name = f"{function.__module__}::{function.__qualname__}"
                _names[name] = count = _names.get(name, 0) + 1
                number = native.remat_declare_function(name if count == 1 else f"{name}#{count}")
                declared = _all[function] = _Declared(function, number)
            declared.install()
        stack.callback(_remove, declared)


def _remove(declared: _Declared) -> None:
    with _lock:
        declared.remove()


def _recorded_forward(
    forward: Callable[..., Any], takes_context: bool, number: int
) -> Callable[..., Any]:
    native: Any = _parts.native("remat")

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # What torch.compile traces runs elsewhere.
        if torch.compiler.is_compiling() or kwargs or not native.remat_is_recording():
            return forward(*args, **kwargs)
        context = args[0] if takes_context else None
        given = args[1:] if takes_context else args
        tensors = [arg for arg in given if isinstance(arg, Tensor)]
        others = [_TENSOR if isinstance(arg, Tensor) else arg for arg in given]
        # Of tensors in lists nobody would tell whether they have changed.
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(others)):
            return forward(*args)
        call = _Call(forward, others, context)
        running = native.remat_begin_function(number, tensors, call, hash(_described(others)))
        if running is None:
            return forward(*args)
        try:
            out = forward(*args)
            changes = getattr(context, "dirty_tensors", None)
            running.end([] if changes else _results(out, context))
            return out
        except BaseException:
            running.cancel()
            raise

    return recorded


def _results(out: Any, context: Any) -> list[Tensor]:
    """What a forward returned and what it saved; the native part leaves inputs out."""
    returned = out if isinstance(out, (tuple, list)) else (out,)
    saved = getattr(context, "to_save", None) or ()
    return [t for t in (*returned, *saved) if isinstance(t, Tensor)]


def _described(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return type(value)


class _Call:
    """Calls a forward again, with other tensors."""

    def __init__(self, forward: Callable[..., Any], others: list[Any], context: Any) -> None:
        self.forward, self.others = forward, others
        self.takes_context = context is not None
        self.needs_grad = getattr(context, "needs_input_grad", ())
        self.autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        args = [next(rest) if arg is _TENSOR else arg for arg in self.others]
        context = _Context(self.needs_grad) if self.takes_context else None
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            out = self.forward(context, *args) if context else self.forward(*args)
        return _results(out, context)


class _Context:
    """Stands for the ``ctx`` of a forward that runs again."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.to_save = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
