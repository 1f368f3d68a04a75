"""Finds what the command line profiles: a function by its name, its model and its optimizer."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..shared.modules import first_parameter

T = TypeVar("T", nn.Module, Optimizer)


class UsageError(Exception):
    """The command line is wrong; the message is for the person who typed it."""


def load(where: str, option: str) -> Any:
    """Returns the object at ``where``, ``"MODULE:NAME"``.

    Args:
        where: what to load.
        option: the option that asked for it, for error messages.

    Raises:
        UsageError: there is no such module or no such name. What the module itself raises while it
            is imported is passed on.
    """
    module_name, colon, name = where.partition(":")
    if not (module_name and colon and name) or os.sep in module_name or module_name[0] == ".":
        raise UsageError(f"{option} must look like package.module:name, got {where!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise  # the module exists, but imports one that does not
        stem = module_name.removesuffix(".py")
        hint = f"; did you mean {stem}:{name}?" if stem != module_name else ""
        raise UsageError(
            f"{option}: there is no module {module_name!r} in {os.getcwd()} or where Python looks"
            f"{hint}"
        ) from None
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UsageError(f"{option}: {module_name!r} has no {name!r}") from None
    return found


def load_function(where: str) -> Callable[[], object]:
    """Returns the function at ``where``, which can be called without arguments.

    Raises:
        UsageError: it needs arguments, is no function, or :func:`load` does not find it.
    """
    found = load(where, "MODULE:FUNCTION")
    if not callable(found):
        raise UsageError(f"{where} must be a function, got {type(found).__name__}")
    try:
        inspect.signature(found).bind()
    except ValueError:
        pass  # its signature is not known
    except TypeError as error:
        raise UsageError(f"{where} must take no arguments: {error}") from None
    function: Callable[[], object] = found
    return function


def load_instance(where: str, option: str, kind: type[T]) -> T:
    """Returns the model or optimizer at ``where``.

    Raises:
        UsageError: it is not of ``kind``, or :func:`load` does not find it.
    """
    found = load(where, option)
    if not isinstance(found, kind):
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise UsageError(f"{option}: {where} must be a {name}, got {type(found).__name__}")
    return found


def find_model(function: Callable[[], object], where: str) -> nn.Module | None:
    """Returns the model that ``function`` uses, None if there is none.

    Models without parameters and submodules of another model that it uses do not count.

    Raises:
        UsageError: it uses several models.
    """

    def is_model(value: object) -> bool:
        return isinstance(value, nn.Module) and first_parameter(value) is not None

    def without_parts(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
        parts = {id(part) for model in found.values() for part in list(model.modules())[1:]}
        return {name: model for name, model in found.items() if id(model) not in parts}

    found = _used(function, is_model)
    return _only(without_parts(found), where, "model")


def find_optimizer(function: Callable[[], object], where: str) -> Optimizer | None:
    """Returns the optimizer that ``function`` uses, None if there is none.

    Raises:
        UsageError: it uses several optimizers.
    """
    return _only(_used(function, lambda value: isinstance(value, Optimizer)), where, "optimizer")


def _only(found: Mapping[str, T], where: str, what: str) -> T | None:
    if len(found) > 1:
        names = ", ".join(f"{name} ({type(value).__name__})" for name, value in found.items())
        raise UsageError(
            f"{where} uses several {what}s, {names}: say which with --{what} MODULE:NAME"
        )
    return next(iter(found.values()), None)


def _used(function: Callable[[], object], wanted: Callable[[object], bool]) -> dict[str, Any]:
    """Returns the wanted objects that ``function`` uses, by name, each object once.

    If it uses none, those among all names of its module are returned.
    """
    named, everything = _names(function)
    for names in (named, everything):
        found: dict[int, tuple[str, object]] = {}
        for name, value in names.items():
            if wanted(value):
                found.setdefault(id(value), (name, value))
        if found:
            return dict(found.values())
    return {}


def _names(function: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the names that a function uses, and all names of its module, with their values."""
    named: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        named |= {f"argument {i}": value for i, value in enumerate(function.args)}
        named |= function.keywords
        function = function.func
    if not inspect.isroutine(function):
        function = function.__call__  # an instance of a class with __call__
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        named |= getattr(owner, "__dict__", {})
    function = inspect.unwrap(getattr(function, "__func__", function))
    try:
        closure = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not written in Python; or a closure name is not yet bound
        pass
    else:
        named |= {**closure.globals, **closure.nonlocals}
    return named, getattr(function, "__globals__", {})
