"""A model's modules: their names, what is known of each, and calls that are watched.

Watching leaves nothing in a module that a copy, a file or a compiled graph would keep. Forward
hooks stay in copies that are made meanwhile, cannot be pickled, and torch.compile traces them: what
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
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Function = TypeVar("Function", bound=Callable[..., Any])

_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP, _DEFAULT = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
_NAME = "_compiled_call_impl"
_lock = threading.RLock()  # what is collected meanwhile may end its watching
# By id, as code of a module that was loaded again is equal. A few: functions made anew share it.
_not_compiled: dict[int, CodeType] = {}
_Watch = tuple[Callable[[int], object], Callable[[], object], int]


def no_hook() -> Callable[..., None]:
    """Returns what stands in copies and pickles in place of a hook that is one module's alone."""
    return _nothing


def _nothing(*_: Any) -> None:
    pass


class Layer(NamedTuple):
    """What is to be known of a module, which may be gone when it is asked for.

    Attributes:
        inputs: the number of its inputs, where it says so.
        outputs: that of its outputs, where it is a linear layer.
        is_list: it only holds other modules.
        is_batch_norm: it needs its whole batch.
    """

    inputs: int | None
    outputs: int | None
    is_list: bool
    is_batch_norm: bool

    @classmethod
    def of(cls, module: nn.Module) -> Layer:
        try:
            inputs = getattr(module, "in_features", None)
        except Exception:  # of other libraries' modules it may be anything
            inputs = None
        return cls(
            inputs if isinstance(inputs, int) else None,
            module.out_features if isinstance(module, nn.Linear) else None,
            isinstance(module, (nn.ModuleList, nn.ModuleDict)),
            isinstance(module, _NormBase) and module.training,
        )


class Modules:
    """Numbers a model's modules; the model itself is number 0.

    ``names``, ``parents`` and ``layers`` are indexed by that number. A parent is the number of the
    module that holds it, -1 for the model. All three are empty without a model. The modules are not
    kept alive.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.names: list[str] = []
        self.parents: list[int] = []
        self.layers: list[Layer] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        if model is not None:
            self._add(model, "", -1, set())
            self.names[0] = type(without_compiler(model)).__name__

    def _add(self, module: nn.Module, name: str, parent: int, seen: set[nn.Module]) -> None:
        # In the order of named_modules(), which takes three times as long.
        seen.add(module)
        number = len(self.names)
        self.names.append(name)
        self.parents.append(parent)
        self.layers.append(Layer.of(module))
        self._modules.append(weakref.ref(module))
        for key, child in module._modules.items():
            if child is not None and child not in seen:
                self._add(child, f"{name}.{key}" if name else key, number, seen)

    def watch(
        self, stack: ExitStack, before: Callable[[int], object], after: Callable[[], object]
    ) -> None:
        """Watches the calls of all modules until ``stack`` is closed.

        A module that is called again inside its own call is watched again. What is called after
        it is so also where the forward raises. Neither is called where a tracer inlines the
        module, nor for a module that is compiled in place meanwhile. Modules inside of one that is
        compiled are left out: it runs without calling them.

        Args:
            before: what is called before each, with the module's number. Neither this nor what is
                called after it may be a function that a compiler would take: see not_compiled().
        """
        left_out: set[int] = set()
        watched: list[tuple[_Calls, _Watch]] = []
        stack.callback(_forget, watched)
        scripted, optimized = torch.jit.ScriptModule, _optimized()
        with _lock:
            for number, reference in enumerate(self._modules):
                module = reference()
                if isinstance(module, scripted) or self.parents[number] in left_out:
                    left_out.add(number)
                elif module is not None:
                    calls = module.__dict__.get(_NAME)
                    if not isinstance(calls, _Calls):
                        calls = module.__dict__[_NAME] = _Calls(reference, calls)
                    if calls.compiled is not None or isinstance(module, optimized):
                        left_out.add(number)
                    watch = (before, after, number)
                    calls.watches = (*calls.watches, watch)
                    watched.append((calls, watch))


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Returns the module and all in it, in the order of ``Module.modules()``."""
    found: dict[nn.Module, None] = {}

    def add(part: nn.Module) -> None:
        found[part] = None
        for child in part._modules.values():
            if child is not None and child not in found:
                add(child)

    add(module)
    return list(found)


def first_parameter(module: nn.Module) -> Tensor | None:
    """Returns that of ``Module.parameters()``, in a quarter of its time."""
    for param in parameters_of(module):
        return param
    for part in module._modules.values():
        found = None if part is None else first_parameter(part)
        if found is not None:
            return found
    return None


def parameters_of(part: nn.Module) -> list[Tensor]:
    """Returns those of a module itself. A replica of nn.DataParallel has them elsewhere."""
    former = part.__dict__.get("_former_parameters", {})
    return [p for p in (*part._parameters.values(), *former.values()) if p is not None]


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of its first parameter; the CPU where it has none."""
    first = first_parameter(module)
    return torch.device("cpu") if first is None else first.device


def is_own_method(value: object, module: nn.Module) -> bool:
    """Whether an attribute ``forward`` of a module is its class's: libraries leave that where they
    take back what they had put there."""
    own = getattr(type(module), "forward", None)
    return getattr(value, "__self__", None) is module and getattr(value, "__func__", None) is own


def not_compiled(function: Function) -> Function:
    """Has torch.compile run ``function`` as it is, and what it calls, where it is not inlined.

    ``torch.compiler.disable`` does so, too, but imports the compiler, which takes a second.
    """
    if isinstance(function, FunctionType) and id(function.__code__) not in _not_compiled:
        strategy = _eval_frame._FrameExecStrategy(_SKIP, _SKIP)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)
        _not_compiled[id(function.__code__)] = function.__code__
    return function


def _optimized() -> tuple[type[nn.Module], ...]:
    """The class of what ``torch.compile`` returns for a module, if it was imported."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return () if eval_frame is None else (eval_frame.OptimizedModule,)


def without_compiler(module: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile`` made ``module`` of, or ``module`` itself."""
    if not isinstance(module, _optimized()):
        return module
    original: Any = module._orig_mod
    assert isinstance(original, nn.Module)
    return original


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returned, or was compiled in place."""
    found = module.__dict__.get(_NAME)
    in_place = found.compiled if isinstance(found, _Calls) else found
    return in_place is not None or isinstance(module, _optimized())


def calling_module(name: str, value: object, module: nn.Module) -> nn.Module:
    """Returns the module whose method has called the caller, as its attribute ``name``; ``module``
    where it was another one's.

    A shallow copy, as DataParallel's replicas are, shares a module's attributes, and only this says
    which of them is meant.
    """
    frame = sys._getframe(2)
    # Until Python 3.12 a frame that is asked for its variables keeps them: not a user's loop.
    is_torchs = frame.f_globals.get("__name__", "").startswith("torch.")
    if not is_torchs and frame.f_code.co_name != "__call__":
        return module
    caller = frame.f_locals.get("self")
    if isinstance(caller, nn.Module) and caller.__dict__.get(name) is value:
        return caller
    return module


def _forget(watched: list[tuple[_Calls, _Watch]]) -> None:
    with _lock:
        for calls, watch in watched:
            if len(calls.watches) == 1:
                calls.give_back()
            else:
                calls.watches = tuple(w for w in calls.watches if w is not watch)


class _Calls:
    """Stands in for the calls of a module that is watched."""

    __slots__ = ("_module", "compiled", "watches")

    def __init__(self, module: weakref.ref[nn.Module], compiled: Callable[..., Any] | None) -> None:
        self._module = module  # it may be deleted meanwhile, and then free its memory
        self.compiled = compiled
        self.watches: tuple[_Watch, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if torch.compiler.is_compiling():
            return (self.compiled or module._call_impl)(*args, **kwargs)
        module = calling_module(_NAME, self, module)
        watches = self.watches
        for before, _, number in watches:
            before(number)
        try:
            return (self.compiled or module._call_impl)(*args, **kwargs)
        finally:
            for _, after, _ in watches[::-1]:
                after()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A module that copies or pickles its attributes itself gets None, which is torch's."""
        return type(None), ()

    def give_back(self) -> None:
        self.watches = ()
        module = self._module()
        if module is None or module.__dict__.get(_NAME) is not self:
            return
        if self.compiled is None:
            del module.__dict__[_NAME]
        else:
            module.__dict__[_NAME] = self.compiled


for _function in (_Calls.__call__, calling_module):
    _eval_frame.set_code_exec_strategy(
        _function.__code__, _eval_frame._FrameExecStrategy(_SKIP, _DEFAULT)
    )
