"""The tensors that a function can reach without being given them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_LARGEST = 1000  # elements of a container
_DEEPEST = 64
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # names that torch gives to every module's

Visitor = Callable[[Tensor, str], None]


def walk(roots: Iterable[Any], visitor: Visitor) -> None:
    """Call ``visitor`` with the tensors that ``roots`` lead to, always in the same order.

    Without the tensors' ``__torch_function__``: a lazy module's parameter refuses to be looked at.
    """
    visited: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():
        for root in roots:
            _walk(root, visitor, visited, "", 0)


def _walk(value: Any, visitor: Visitor, visited: set[int], name: str, depth: int) -> None:
    if depth > _DEEPEST:
        return
    if not isinstance(value, Tensor):
        # Once each: objects that lead to each other would be visited along every path.
        if value is None or isinstance(value, (int, float, str)) or id(value) in visited:
            return
        visited.add(id(value))

    def visit(child: Any, key: object = None, index: int = -1) -> None:
        path = f"{name}[{index}]" if index >= 0 else name
        if key is not None:
            path = f"{path}.{key}" if path else str(key)
        _walk(child, visitor, visited, path, depth + 1)

    if isinstance(value, Tensor):
        visitor(value, name)
    elif isinstance(value, (tuple, list)):
        if len(value) <= _LARGEST:
            for i, item in enumerate(value):
                visit(item, index=i)
    elif isinstance(value, dict):
        if len(value) <= _LARGEST:
            for key, item in value.items():
                visit(item, key)
    elif isinstance(value, nn.Module):
        for key, item in (*value._parameters.items(), *value._modules.items()):
            visit(item, key)
        for key, item in vars(value).items():
            if key not in _OWN_ATTRIBUTES:
                visit(item, key)
    elif isinstance(value, FunctionType):
        _walk_function(value, visit)
    elif isinstance(value, MethodType):
        visit(value.__self__)
        visit(value.__func__)
    elif type(value) is functools.partial:
        for part in (value.func, value.args, value.keywords):
            visit(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        visit(getattr(value, "__dict__", {}))


def _walk_function(function: FunctionType, visit: Callable[[Any, object], None]) -> None:
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            continue
        visit(content, key)
    for key in function.__code__.co_names:
        value = function.__globals__.get(key)
        if isinstance(value, (Tensor, nn.Module)):
            visit(value, key)
