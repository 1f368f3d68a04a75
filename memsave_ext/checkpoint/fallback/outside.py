"""Tensors from outside of a region's function that it may read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import rules
from ..errors import Read
from .stepped import ByteRange, Pending

_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # names that torch gives to every module's

_LOOKED_AT = (
    Tensor, nn.Module, tuple, list, dict, MethodType, functools.partial, torch.Generator
)  # fmt: skip

Place = tuple[int, str]  # the root that leads to it, and its name from there
# With its place, whether it is a buffer, and whether a name that leads to it was another object.
Visitor = Callable[[Tensor, Place, bool, bool], None]
# With what a name of a function stands for, the name's place, and where the object was visited
# first. Where the name was another object before, returns where that one was visited first.
NameVisitor = Callable[[Any, Place, Place], "Place | None"]


@dataclass
class _Walk:
    visitor: Visitor
    names: NameVisitor
    visited: dict[int, Place]
    generators: list[torch.Generator]
    of_another: bool = False


def walk(roots: Iterable[Any], visitor: Visitor, names: NameVisitor) -> list[torch.Generator]:
    """Call ``visitor`` with the tensors that ``roots`` lead to, always in the same order, and
    return the generators.

    Where a name of a function was another object before, what it stands for is visited as if it
    were where that one was visited first, whether or not it was already.
    Without the tensors' ``__torch_function__``: a lazy module's parameter refuses to be looked at.
    """
    one = _Walk(visitor, names, {}, [])
    with torch._C.DisableTorchFunctionSubclass():
        for number, root in enumerate(roots):
            _walk(root, one, (number, ""), 0)
    return one.generators


def _walk(value: Any, one: _Walk, place: Place, depth: int, is_buffer: bool = False) -> None:
    if depth > rules.DEEPEST:
        return
    if not isinstance(value, Tensor):
        # Once each: objects that lead to each other would be visited along every path.
        if value is None or isinstance(value, (int, float, str)) or id(value) in one.visited:
            return
        one.visited[id(value)] = place

    def below(key: object, index: int = -1) -> Place:
        root, name = place
        path = f"{name}[{index}]" if index >= 0 else name
        if key is not None:
            path = f"{path}.{key}" if path else str(key)
        return root, path

    def visit(child: Any, key: object = None, index: int = -1, is_buffer: bool = False) -> None:
        _walk(child, one, below(key, index), depth + 1, is_buffer)

    def visit_named(child: Any, key: str, code: CodeType | None = None) -> None:
        if child is None or isinstance(child, (int, float, str)):
            return
        here = below(key)
        before = one.names(child, here, one.visited.get(id(child), here))
        # Asked where something differs alone, as it takes long.
        if before is None or (code is not None and not rules.reads_global(code, key)):
            return visit(child, key)
        # Within such an object what has been visited stays so: names that lead to each other would
        # be followed along every path.
        inside = one if one.of_another else replace(one, visited={}, of_another=True)
        _walk(child, inside, before, depth + 1)

    if isinstance(value, Tensor):
        one.visitor(value, place, is_buffer, one.of_another)
    elif isinstance(value, (tuple, list)):
        if len(value) <= rules.LARGEST:
            for i, item in enumerate(value):
                visit(item, index=i)
    elif isinstance(value, dict):
        if len(value) <= rules.LARGEST:
            for key, item in value.items():
                visit(item, key)
    elif isinstance(value, nn.Module):
        for key, item in (*value._parameters.items(), *value._modules.items()):
            visit(item, key)
        # A norm in training only writes its buffers; in recomputes it has others (norms.py).
        if not isinstance(value, _NormBase) or not value.training:
            for key, item in value._buffers.items():
                visit(item, key, is_buffer=True)
        for key, item in vars(value).items():
            if key not in _OWN_ATTRIBUTES:
                visit(item, key)
        # Its class's, where it has no other one. torch's read nothing but what their modules have.
        forward = getattr(type(value), "forward", None)
        is_torchs = (getattr(forward, "__module__", None) or "").startswith("torch.")
        if isinstance(forward, FunctionType) and not is_torchs:
            visit(forward, "forward()")  # which no attribute is called
    elif isinstance(value, FunctionType):
        _walk_function(value, visit, visit_named)
    elif isinstance(value, MethodType):
        visit(value.__self__)
        visit(value.__func__)
    elif type(value) is functools.partial:
        for part in (value.func, value.args, value.keywords):
            visit(part)
    elif _is_record(value):
        for key, item in _attributes(value):
            visit(item, key)
    elif isinstance(value, torch.Generator):
        one.generators.append(value)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in what a function has returned: itself, or those in dicts, tuples, lists,
    sets, dataclasses and SimpleNamespace, nested, each of which is looked into once."""
    pending, seen = [output], set()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_record(value):
            value = [item for _, item in _attributes(value)]
        if isinstance(value, dict):
            value = value.values()
        if isinstance(value, (tuple, list, set, frozenset, ValuesView)):
            pending += value


def _is_record(value: Any) -> bool:
    """Whether its class has attributes alone."""
    if type(value) is SimpleNamespace:
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _attributes(record: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values: those in its dict, and a dataclass's in slots."""
    own = getattr(record, "__dict__", {})
    if len(own) > rules.LARGEST:
        return
    yield from own.items()
    kind = type(record)
    for name in getattr(kind, "__dataclass_fields__", ()):
        if isinstance(getattr(kind, name, None), MemberDescriptorType) and hasattr(record, name):
            yield name, getattr(record, name)


def _walk_function(
    function: FunctionType, visit: Callable[..., None], visit_named: Callable[..., None]
) -> None:
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            continue
        visit_named(content, key)
    visit(function.__defaults__, "__defaults__")
    visit(function.__kwdefaults__, "__kwdefaults__")
    for code, key in _names_in(function.__code__):
        value = function.__globals__.get(key)
        if isinstance(value, FunctionType):
            if value.__globals__ is function.__globals__:  # of the same file
                visit_named(value, key, code)
        elif isinstance(value, _LOOKED_AT) or _is_record(value):
            visit_named(value, key, code)


def _names_in(code: CodeType) -> Iterator[tuple[CodeType, str]]:
    """Yields the names that a function uses; also in what it defines: comprehensions, lambdas."""
    for name in code.co_names:
        yield code, name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a wrapper subclass without memory of its own, such as a DTensor."""
    return tensor.layout != torch.strided or torch._C._dispatch_keys(tensor).has("Python")


def storage_address(tensor: Tensor) -> int | None:
    return None if _is_wrapper(tensor) else tensor.untyped_storage()._cdata


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """How its elements lie in its storage: views of one storage that differ in it have other
    values. Empty for those that have none, or no sizes in one piece."""
    if tensor.is_nested or _is_wrapper(tensor) or is_lazy(tensor):
        return ()
    bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return *bits, tensor.storage_offset(), tensor.shape, tensor.stride()


def _storage_of(tensor: Tensor) -> StorageWeakRef | None:
    return None if _is_wrapper(tensor) else StorageWeakRef(tensor.untyped_storage())


def version_of(tensor: Tensor) -> int:
    """The version counter; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class _Noted:
    tensor: int  # its id
    storage: StorageWeakRef | None  # a weak reference: the number is not given to another storage
    layout: tuple[Any, ...]
    version: int
    requires_grad: bool  # on which it depends what autograd saves
    changed_by_forward: bool = False  # and not made by it, where there was none

    @staticmethod
    def of(tensor: Tensor) -> _Noted:
        storage, layout = _storage_of(tensor), _layout_of(tensor)
        return _Noted(id(tensor), storage, layout, version_of(tensor), tensor.requires_grad)

    def is_(self, tensor: Tensor) -> bool:
        before = None if self.storage is None else self.storage.cdata, self.layout
        now = storage_address(tensor), _layout_of(tensor)
        return self.tensor == id(tensor) and before == now

    def is_as_it_was(self, tensor: Tensor) -> bool:
        state = version_of(tensor), tensor.requires_grad
        return self.is_(tensor) and state == (self.version, self.requires_grad)


@dataclass
class ChangedTensor:
    tensor: int
    storage: StorageWeakRef | None  # a recompute may put another in its place, which frees it
    range: ByteRange
    description: str
    has_same_values: bool  # only whether it needs a gradient has changed
    # Where it is another view of the memory that the forward had there, which may be read by right
    # through others: then what lies there as it does is this one.
    layout: tuple[Any, ...] | None


def cuda_devices(tensors: Iterable[Any]) -> set[int]:
    """Returns the indices of the CUDA devices that those of the values which are tensors are on."""
    return {t.get_device() for t in tensors if isinstance(t, Tensor) and t.is_cuda}


class OutsideTensors:
    """``roots`` are what the function is called with, and the function itself."""

    def __init__(self) -> None:
        self._noted: dict[Place, _Noted] = {}
        # The ids of what a name of a function stood for, and where each was visited first: a
        # variable and a global of one name have the same place.
        self._names: dict[Place, dict[int, Place]] = {}
        self.devices: set[int] = set()  # CUDA's, that these are on

    def note(self, roots: Iterable[Any]) -> list[torch.Generator]:
        """Returns the generators that are reached, too."""

        def see(tensor: Tensor, place: Place, *_: bool) -> None:
            self._noted[place] = _Noted.of(tensor)
            self.devices.update(cuda_devices([tensor]))

        return walk(roots, see, self._note_name)

    def _note_name(self, value: Any, place: Place, first: Place) -> None:
        self._names.setdefault(place, {})[id(value)] = first

    def leave_out_changes_of_forward(self, roots: Iterable[Any]) -> None:
        now: dict[Place, _Noted] = {}

        def compare(tensor: Tensor, place: Place, *_: bool) -> None:
            noted = now[place] = _Noted.of(tensor)
            same = self._find(tensor, place)
            noted.changed_by_forward = (
                place in self._noted if same is None else not same.is_as_it_was(tensor)
            )

        self._names.clear()
        walk(roots, compare, self._note_name)
        self._noted = now

    def _find(self, tensor: Tensor, place: Place) -> _Noted | None:
        there = self._noted.get(place)
        if there is not None and there.is_(tensor):
            return there
        return next((noted for noted in self._noted.values() if noted.is_(tensor)), None)

    def has(self, tensor: Tensor) -> bool:
        """Whether it was there before the forward, which has left it as it was."""
        address = storage_address(tensor)
        return address is not None and any(
            noted.storage is not None and noted.storage.cdata == address
            for noted in self._noted.values()
            if not noted.changed_by_forward
        )

    def find_changed(
        self, roots: Iterable[Any]
    ) -> tuple[list[ChangedTensor], list[torch.Generator]]:
        """Returns the generators that are reached, too."""
        changed: list[ChangedTensor] = []

        def was_another(value: Any, place: Place, _: Place) -> Place | None:
            known = self._names.get(place, {})
            return None if id(value) in known else next(iter(known.values()), None)

        def compare(tensor: Tensor, place: Place, is_buffer: bool, of_another: bool) -> None:
            there = self._noted.get(place)
            is_there = there is not None and there.is_(tensor)
            by_forward = there is not None and there.changed_by_forward
            before: int | None = None  # its version; None: there was another tensor
            is_view = False  # whether that one shared its memory
            if by_forward:
                if not is_buffer:
                    return
            elif (same := self._find(tensor, place)) is not None and (is_there or not of_another):
                if same.changed_by_forward or same.is_as_it_was(tensor):
                    return
                before = same.version
            elif there is None or there.storage is None or _is_wrapper(tensor):
                return
            else:
                is_view = there.storage.cdata == storage_address(tensor)
                if is_view and there.layout == _layout_of(tensor):
                    return
            range_ = ByteRange(0, 0) if _is_wrapper(tensor) else ByteRange.of(tensor)
            what = rules.change(tensor, place[1], before, version_of(tensor), by_forward)
            if what is not None:
                same_values = before == version_of(tensor) and not by_forward
                layout = _layout_of(tensor) if is_view else None
                storage = _storage_of(tensor)
                changed.append(
                    ChangedTensor(id(tensor), storage, range_, what, same_values, layout)
                )

        generators = walk(roots, compare, was_another)
        return changed, generators


@contextmanager
def observed_reads(changed: list[ChangedTensor], region: Pending | None) -> Iterator[ReadObserver]:
    """Collects the recompute's operators that read a tensor which has changed or was stepped."""
    observer = ReadObserver(changed, region)
    if changed or (region is not None and region.any_stepped()):
        with observer:
            yield observer
    else:
        yield observer


class ReadObserver(TorchDispatchMode):
    def __init__(self, changed: list[ChangedTensor], region: Pending | None) -> None:
        super().__init__()
        self._changed, self._region = changed, region
        self.reads: list[Read] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
        reads_values = not (
            schema.name.startswith(rules.SHAPE_ALONE_BEGINNINGS)
            or schema.name.endswith(rules.SHAPE_ALONE_ENDINGS)
        )
        for argument in schema.arguments if reads_values else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(values.get(argument.name)):
                if isinstance(tensor, Tensor):
                    self.look(str(func), tensor)
        return func(*args, **(kwargs or {}))

    def look(self, name: str, tensor: Tensor) -> None:
        storage, change = storage_address(tensor), ""
        for changed in self._changed:
            if storage is None:
                same = changed.storage is None and changed.tensor == id(tensor)
            else:
                same = (
                    changed.storage is not None
                    and changed.storage.cdata == storage
                    and (
                        changed.range.overlaps(ByteRange.of(tensor))
                        if changed.layout is None
                        else changed.layout == _layout_of(tensor)
                    )
                )
            if same and (not changed.has_same_values or torch.is_grad_enabled()):
                change = changed.description
        position = None
        if storage is not None and self._region is not None:
            position = self._region.stepped(tensor)
        if change or position is not None:
            self.reads.append((name, change, position, list(tensor.shape), tensor.dtype))
