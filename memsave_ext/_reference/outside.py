"""Tensors from outside of a region's function that it may read: csrc/checkpoint/{walk,outside}."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .stepped import ByteRange, PendingRegion

_LARGEST = 1000  # elements of a container
_DEEPEST = 64
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # names that torch gives to every module's

Visitor = Callable[[Tensor, str], None]


def walk(roots: Iterable[Any], visitor: Visitor) -> None:
    """Call ``visitor`` with the tensors that ``roots`` lead to, always in the same order."""
    visited: set[int] = set()
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


def _is_wrapper(tensor: Tensor) -> bool:
    """One without memory of its own, such as a DTensor."""
    return tensor.layout != torch.strided or torch._C._dispatch_keys(tensor).has("Python")


def _storage(tensor: Tensor) -> int | None:
    return None if _is_wrapper(tensor) else tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """0 of inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class _Noted:
    tensor: int  # its id
    storage: StorageWeakRef | None  # which keeps its number from being given to another
    version: int
    changed_by_forward: bool = False

    @staticmethod
    def of(tensor: Tensor) -> _Noted:
        storage = None if _is_wrapper(tensor) else StorageWeakRef(tensor.untyped_storage())
        return _Noted(id(tensor), storage, version_of(tensor))

    def is_(self, tensor: Tensor) -> bool:
        before = None if self.storage is None else self.storage.cdata
        return self.tensor == id(tensor) and before == _storage(tensor)

    def is_as_it_was(self, tensor: Tensor) -> bool:
        return self.is_(tensor) and self.version == version_of(tensor)


@dataclass
class ChangedTensor:
    tensor: int
    storage: int | None
    range: ByteRange
    description: str


def describe(tensor: Tensor, name: str) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} (shape {list(tensor.shape)}, dtype {dtype})"


class OutsideTensors:
    """``roots`` are what the function is called with, and the function itself."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._same_places = True  # before and after the forward

    def note(self, roots: Iterable[Any]) -> None:
        walk(roots, lambda tensor, _: self._noted.append(_Noted.of(tensor)))

    def leave_out_own_changes(self, roots: Iterable[Any]) -> None:
        index = 0

        def compare(tensor: Tensor, _: str) -> None:
            nonlocal index
            if index == len(self._noted):  # made by the forward
                self._noted.append(_Noted.of(tensor))
                self._same_places = False
            if not self._noted[index].is_as_it_was(tensor):
                self._noted[index].changed_by_forward = True
            index += 1

        walk(roots, compare)
        self._same_places = self._same_places and index == len(self._noted)

    def find_changed(self, roots: Iterable[Any]) -> list[ChangedTensor]:
        changed: list[ChangedTensor] = []
        index = 0

        def compare(tensor: Tensor, name: str) -> None:
            nonlocal index
            there = None  # what the forward had at this place
            if self._same_places and index < len(self._noted):
                there = self._noted[index]
                index += 1
                if there.changed_by_forward:
                    return
            known = there
            if known is None or not known.is_(tensor):
                known = next((noted for noted in self._noted if noted.is_(tensor)), None)
            if known is not None:
                if known.changed_by_forward or known.is_as_it_was(tensor):
                    return
                what = describe_versions(known.version, version_of(tensor))
            else:
                # What holds parts of parameters elsewhere (FSDP, offloading) puts others in their
                # places.
                if there is None or there.storage is None or _is_wrapper(tensor):
                    return
                if tensor.is_meta or tensor.numel() == 0:
                    return
                if there.storage.cdata == _storage(tensor):
                    return
                what = "replaced: the forward had another tensor there"
            range_ = ByteRange(0, 0) if _is_wrapper(tensor) else ByteRange.of(tensor)
            changed.append(
                ChangedTensor(
                    id(tensor), _storage(tensor), range_, f"{describe(tensor, name)}: {what}"
                )
            )

        walk(roots, compare)
        return changed


class ReadObserver(TorchDispatchMode):
    """Notes operators inside it that read tensors which have changed."""

    def __init__(self, changed: list[ChangedTensor], region: PendingRegion) -> None:
        super().__init__()
        self._changed, self._region = changed, region
        self._reads: dict[str, str] = {}  # the first operator, by what was read

    @property
    def reads(self) -> str:
        return "".join(f"{what}, read by {name}\n" for what, name in self._reads.items())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                continue
            for tensor in tree_leaves((given | (kwargs or {})).get(argument.name)):
                if isinstance(tensor, Tensor):
                    self._look(str(func), tensor)
        return func(*args, **(kwargs or {}))

    def _look(self, name: str, tensor: Tensor) -> None:
        operator = name.split(".")[1]
        if operator.startswith("new_") or operator.endswith("_like"):  # reads a shape alone
            return
        storage, what = _storage(tensor), ""
        for changed in self._changed:
            if storage is None:
                same = changed.tensor == id(tensor)
            else:
                same = changed.storage == storage and changed.range.overlaps(ByteRange.of(tensor))
            if same:
                what = changed.description
        if storage is not None and (step := self._region.stepped(tensor)) is not None:
            what = f"{what}; {step}" if what else describe(tensor, step)
        if what:
            self._reads.setdefault(what, name)


def mutation_message(mutations: str) -> str:
    return (
        "memsave_ext: tensors from outside the checkpointed function, which it uses in both runs, "
        f"have changed between forward and recompute.\n{mutations}"
        "The recompute would give gradients of another function. Change them after backward, or "
        "give the function a clone of them; let an optimizer without in_backward step a parameter "
        "that a region reads without a gradient."
    )


def describe_versions(in_forward: int, in_recompute: int) -> str:
    return (
        f"modified by an inplace operation: version {in_forward} in the forward, {in_recompute} in "
        "the recompute"
    )
