"""Checkpointing whole models: a sequence in segments, or the blocks of a model in place."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn

from ..shared.modules import calling_module, is_own_method
from ..shared.warn import warn
from .region import check_options, checkpoint, refuse_unknown, run

_REPLICATE = "_replicate_for_data_parallel"


class ForwardInPlace:
    """Stands in for a module's ``forward``; copied and pickled with the module it belongs to.

    Classes, names, parameters, hooks and the state_dict stay as they are.

    Attributes:
        method: the name of the method that it stands in for.
        own: a bound method of that name that was set on the module before, as accelerate's
            ``prepare()`` does; None where it is the class's.
        removed: whether it calls what it stood in for, and does nothing else.
    """

    removed = False

    def __init__(self, module: nn.Module, options: dict[str, Any], method: str = "forward") -> None:
        self.module = module
        self.options = options
        self.method = method
        own = module.__dict__.get(method)
        self.own = own if isinstance(own, MethodType) else None

    def function(self, module: nn.Module) -> Any:
        """Returns what it stands in for, as a function of ``module`` and its arguments."""
        if isinstance(module, torch.jit.ScriptModule):
            return _scripted
        return getattr(type(module), self.method) if self.own is None else self.own.__func__

    @abstractmethod
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``module`` is the one whose forward is called."""

    @property
    def __signature__(self) -> inspect.Signature:
        """Trainers look there for what the model takes."""
        return inspect.signature(self.function(self.module).__get__(self.module))

    @property
    def __wrapped__(self) -> Any:
        """Lightning looks there for arguments, of which it leaves out the first, ``self``."""
        return self.function(self.module).__get__(self.module)

    @property
    def __code__(self) -> CodeType:
        """torch.export looks there for the names of arguments."""
        code: CodeType = self.function(self.module).__code__
        return code

    @property
    def __globals__(self) -> dict[str, Any]:
        """torch.jit.script looks there for what it compiles, which is a function's source."""
        raise AttributeError(
            f"torch.jit.script cannot compile {type(self.module).__name__}, whose forward "
            "checkpoint_modules or remat_module has replaced: remove() the handle first, or use "
            "torch.jit.trace or torch.export"
        )

    def install(self) -> None:
        self.module.__dict__[self.method] = self
        self.module.__dict__[_REPLICATE] = self.replicate

    @classmethod
    def remove(cls, module: nn.Module, method: str = "forward") -> None:
        found = module.__dict__.get(method)
        if isinstance(found, cls):
            del module.__dict__[method], module.__dict__[_REPLICATE]
            if found.own is not None:
                module.__dict__[method] = found.own
            for left in _in_place_of(module):
                module.__dict__[_REPLICATE] = left.replicate

    def retire(self) -> None:
        """Removes it; where another library has wrapped it since, it does nothing from now on."""
        self.removed = True
        if self.module.__dict__.get(self.method) is self:
            self.remove(self.module, self.method)

    def replicate(self) -> nn.Module:
        """A replica has a copy of ``__dict__``, and would run the forward of this module."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        for each in _in_place_of(self.module):
            standing_in = type(each)(replica, each.options, each.method)
            standing_in.own = each.own
            standing_in.install()
        return replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not torch.compiler.is_compiling():
            module = calling_module(self.method, self, module)
        if self.removed:
            return self.function(module)(module, *args, **kwargs)
        return self.call(module, args, kwargs)


def _in_place_of(module: nn.Module) -> list[ForwardInPlace]:
    """Returns what stands in for methods of a module."""
    return [value for value in module.__dict__.values() if isinstance(value, ForwardInPlace)]


def _scripted(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._c._get_method("forward")(*args, **kwargs)


def without_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments as transformers' own checkpointing hands them to it.

    None stands in the place of each of transformers' caches, and ``use_cache`` is False beside one.
    Layers that only read a cache (``_can_checkpoint_with_cache``) keep it. Warns once for a class.

    Raises:
        RuntimeError: a cache holds positions of an earlier call, which the block would not see.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    kind = library.Cache
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
    if not found or getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs
    name = type(module).__name__
    held = max(_positions(module, cache) for cache in found)
    if held:
        raise RuntimeError(
            f"checkpoint_modules: {name} is called with a cache that holds {held} positions, which "
            "a checkpointed block cannot use: its recompute would fill the cache once more. Call "
            "the model without the cache, or without gradients, or remove() the handle first."
        )
    _warn_once(name)
    args = tuple(None if isinstance(value, kind) else value for value in args)
    kwargs = {key: None if isinstance(value, kind) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _positions(module: nn.Module, cache: Any) -> int:
    """How many positions of an earlier call ``cache`` holds for the block."""
    for part in module.modules():
        index = getattr(part, "layer_idx", None)
        if isinstance(index, int):
            try:
                return int(cache.get_seq_length(index))
            except ValueError:  # a layer with a state of constant size, such as Mamba's
                return int(cache.has_previous_state(index))
    return 0


@functools.cache
def _warn_once(name: str) -> None:
    warn(
        f"checkpoint_modules: {name} is called without its cache, as in transformers' own gradient "
        "checkpointing, since a recompute would fill it once more. Pass use_cache=False to avoid "
        "this warning.",
    )


Select = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]


def checkpoint_sequential(
    functions: nn.Sequential | Iterable[Callable[..., Any]],
    segments: int,
    *inputs: Any,
    **kwargs: Any,
) -> Any:
    """Run ``functions`` one after the other, in ``segments`` checkpointed pieces.

    Args:
        functions: an nn.Sequential, or callables; each gets what the one before returned, a tuple
            as several arguments.
        segments: number of pieces, of sizes that differ by one at most. As in torch, the last one
            is not checkpointed: its backward comes right away.
        *inputs: arguments of the first function. A bool or None in the second place is torch's
            ``use_reentrant``, which stands there in torch's signature; where the first function
            takes one as its second argument, give all of them as one tuple.
        **kwargs: options of :func:`checkpoint`.

    Raises:
        ValueError: ``segments`` is less than 1 or larger than the number of functions.
        TypeError: a function cannot be called; ``segments`` is not an int.
    """
    return run_in_segments(functions, segments, inputs, kwargs, spreads=True)


def run_in_segments(
    functions: nn.Sequential | Iterable[Callable[..., Any]],
    segments: int,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    *,
    spreads: bool,
) -> Any:
    """Does what :func:`checkpoint_sequential` does; ``spreads``: a tuple is several arguments of
    the next function, and else one."""
    # Not children(), which has a module once that occurs twice.
    steps = list(functions) if isinstance(functions, Iterable) else [functions]
    for step in steps:
        if not callable(step):
            raise TypeError(
                "checkpoint_sequential: functions must be an nn.Sequential or callables, got "
                f"{type(step).__name__}"
            )
    if not isinstance(segments, int) or isinstance(segments, bool):
        raise TypeError(
            f"checkpoint_sequential: segments must be an int, got {type(segments).__name__}"
        )
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: segments must be between 1 and {len(steps)}, the number of "
            f"functions, got {segments}"
        )

    if len(inputs) == 2 and (inputs[1] is None or isinstance(inputs[1], bool)):
        if "use_reentrant" in options:
            raise TypeError("checkpoint_sequential: use_reentrant is given twice")
        options = {**options, "use_reentrant": inputs[1]}
        inputs = (inputs[0],)
    refuse_unknown("checkpoint_sequential", options)
    check_options(**options)

    def arguments(value: Any) -> tuple[Any, ...]:
        return value if spreads and isinstance(value, tuple) else (value,)

    def made_of(start: int, end: int) -> Callable[..., Any]:
        own = steps[start:end]  # a region looks at all that its function refers to

        def segment(*values: Any) -> Any:
            result: Any = values if len(values) != 1 else values[0]
            for step in own:
                result = step(*arguments(result))
            return result

        return segment

    bounds = [len(steps) * i // segments for i in range(segments + 1)]
    result: Any = inputs if len(inputs) != 1 else inputs[0]
    for start, end in itertools.pairwise(bounds[:-1]):
        result = checkpoint(made_of(start, end), *arguments(result), **options)
    return made_of(bounds[-2], bounds[-1])(*arguments(result))


class _CheckpointedForward(ForwardInPlace):
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_caches(module, args, kwargs)
        # Not bound to the module: torch.compile of torch 2.11 cannot trace that.
        return run(type(module).forward, (module, *args), kwargs, **self.options)


class CheckpointHandle:
    """What :func:`checkpoint_modules` returns; ``modules`` are those it changed."""

    def __init__(self, forwards: list[_CheckpointedForward]) -> None:
        self._forwards = forwards
        self.modules = [forward.module for forward in forwards]

    def remove(self) -> None:
        """Give the modules their own forward back. A second call does nothing.

        Where another library has wrapped a forward since, it calls the module's own from now on.
        """
        for forward in self._forwards:
            forward.retire()
        self._forwards, self.modules = [], []


def checkpoint_modules(model: nn.Module, select: Select, **options: Any) -> CheckpointHandle:
    """Checkpoint every selected block of ``model``, in place.

    Only the blocks' ``forward`` is replaced: classes, names, parameters, hooks and the state_dict
    stay as they are, and the model can be copied and pickled. Hooks run outside the region. With
    gradients, blocks of transformers' models are called without their caches of keys and values, as
    in transformers' own checkpointing; a cache with content is a RuntimeError there.

    Args:
        model: the model, or a part of one.
        select: a module class, a tuple of classes, or a predicate called with each module.
        **options: of :func:`checkpoint`. With ``chunks``, the positions in ``chunk_args`` are those
            of the arguments that the blocks are called with.

    Returns:
        A handle whose ``remove()`` undoes it.

    Raises:
        ValueError: nothing is selected, or a selected module has a forward of its own already (it
            may be checkpointed), or is scripted. Nothing is changed then.
        TypeError: ``model`` is no module, or ``select`` is none of the above.
        ValueError, TypeError: an option that :func:`checkpoint` refuses.
    """
    refuse_unknown("checkpoint_modules", options)
    check_options(**options)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"checkpoint_modules: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if isinstance(select, (type, tuple)):
        kinds = select if isinstance(select, tuple) else (select,)
        if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
            raise TypeError(f"checkpoint_modules: select must name module classes, got {select!r}")
        chosen = [m for m in model.modules() if isinstance(m, kinds)]
    elif callable(select):
        chosen = [m for m in model.modules() if select(m)]
    else:
        raise TypeError(
            "checkpoint_modules: select must be a module class, a tuple of classes or a predicate, "
            f"got {type(select).__name__}"
        )
    if not chosen:
        raise ValueError(f"checkpoint_modules: select={select!r} matches no module of the model")
    for module in chosen:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                "checkpoint_modules: a scripted module is selected, whose forward is not Python's: "
                "call it by checkpoint(module, ...)"
            )
        own = module.__dict__.get("forward")
        if own is not None and not is_own_method(own, module):
            raise ValueError(
                f"checkpoint_modules: the forward of {type(module).__name__} has been replaced "
                "already: remove() the handle that replaced it first, or call checkpoint_modules "
                "before another library or your code replaces it"
            )
    if options.get("chunk_args") is not None:  # the forward is called with the module before them
        options["chunk_args"] = [
            key if isinstance(key, str) else key + 1 for key in options["chunk_args"]
        ]
    forwards = [_CheckpointedForward(module, options) for module in chosen]
    for forward in forwards:
        forward.install()
    return CheckpointHandle(forwards)
