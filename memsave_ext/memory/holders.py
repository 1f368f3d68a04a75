"""Says what of a Python program holds memory: a variable, an attribute, an element of a list."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from ..shared.tensors import dense_parts, plain_tensors

_FARTHEST = 8  # objects, at most, from a tensor to what has a name
_MOST_VIEWS = 100  # of one address, that are looked for
_OF_NOBODY_ELSE = 3  # references to a frame's locals: the frame's, a variable's, an argument's
_NO_KEY = object()  # of a step to a dict by one of its keys
_OWN = __name__.partition(".")[0] + "."


@dataclass(frozen=True)
class Holder:
    """A tensor's shape, and in words where the program has it."""

    shape: tuple[int, ...]
    text: str


def holders_of(addresses: Iterable[int]) -> dict[int, Holder]:
    """Returns, by address, who holds the memory that begins there, as far as it is found.

    Memory of a tensor that Python has is held by what refers to the tensor; other memory by the
    graph of a tensor that has it saved for backward. Of what a NumPy array alone has the shape is
    known, as the collector does not follow arrays. The search looks at all objects of the process,
    some ten times for each address, but for those that ``gc.freeze()`` has set aside.
    """
    if not (wanted := set(addresses)):
        return {}
    tensors = _tensors()
    known: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        for address, _ in _storages(tensor, wanted):
            known.setdefault(address, []).append(tensor)
    ours = {id(tensors), *map(id, known.values())}
    found = {}
    in_graphs = set(wanted)
    for address, views in known.items():
        # To one that a graph alone has nothing refers, though it is still an object of Python.
        place, tensor, last = _try_to_place(views[:_MOST_VIEWS], ours)
        found[address] = Holder(tuple(tensor.shape), place)
        # What a Function has on `ctx` is held by who has the graph.
        if place and not _is(last, BackwardCFunction):
            in_graphs.remove(address)
        del views
    del known
    saved = _saved_by(tensors, in_graphs)
    ours = {id(tensors), id(saved), *map(id, saved.values())}
    for address in saved:
        shape, root = saved[address]
        place, *_ = _try_to_place([root], ours)
        if place or address not in found or not found[address].text:
            of = f"graph of a tensor of shape {list(root.shape)}"
            found[address] = Holder(shape, f"{of}: {place}" if place else of)
    return found


def storages_at(addresses: Iterable[int]) -> dict[int, StorageWeakRef]:
    """Returns, by address, the storage that a tensor or a graph has there now; it is not kept."""
    if not (missing := set(addresses)):
        return {}
    tensors = _tensors()
    found: dict[int, StorageWeakRef] = {}
    for tensor in chain(tensors, (saved for saved, _ in _saved(tensors))):
        for address, storage in _storages(tensor, missing):
            found[address] = StorageWeakRef(storage)
            missing.discard(address)
        if not missing:
            break
    return found


def _tensors() -> list[Tensor]:
    """Returns the tensors that are objects of Python."""
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def _storages(tensor: Tensor, wanted: set[int]) -> list[tuple[int, torch.UntypedStorage]]:
    """Returns the storages of the tensor that begin at one of ``wanted``, with their addresses."""
    try:
        parts = [part for plain in plain_tensors(tensor) for part in dense_parts(plain)]
        storages = [part.untyped_storage() for part in parts]
        found = [(storage.data_ptr(), storage) for storage in storages]
    except Exception:  # of a fake one, of another backend, of a lazy module's, of whatever class
        return []
    return [each for each in found if each[0] in wanted]


def _saved_by(
    tensors: Iterable[Tensor], wanted: set[int]
) -> dict[int, tuple[tuple[int, ...], Tensor]]:
    """Returns, by address, the shape of what a graph has saved there, and a tensor of that graph.

    Of several tensors it is the one that was computed last, as the sum of all losses.
    """
    found: dict[int, tuple[tuple[int, ...], Tensor]] = {}
    for tensor, root in _saved(tensors) if wanted else ():
        for address, _ in _storages(tensor, wanted):
            found.setdefault(address, (tuple(tensor.shape), root))
    return found


def _saved(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields what the graphs of these tensors have saved, each with a tensor of its graph: of
    several the one that was computed last."""
    # A view of which something was changed in place may refuse to say it.
    nodes = ((tensor, _ask(tensor, "grad_fn")) for tensor in tensors)
    roots = [(tensor, node) for tensor, node in nodes if node is not None]
    roots.sort(key=lambda each: -each[1]._sequence_nr())
    seen: set[Any] = {None}
    for root, last in roots:
        pending: list[Any] = [last]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
            for tensor in _saved_in(node):
                yield tensor, root


def _saved_in(node: Any) -> Iterator[Tensor]:
    """Yields what a node has saved, or what hooks have made of it, which are not called; of a
    Function what is on ``ctx``, too."""
    if _is(node, BackwardCFunction):
        try:
            attributes = plain_tensors(list(vars(node).values()))
        except Exception:  # of an object that cannot be asked
            attributes = []
        yield from attributes
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
            each = saved if isinstance(saved, (list, tuple)) else (saved,)
            values = [value.data for value in each if value is not None]
        except Exception:  # a backward has freed it
            continue
        yield from plain_tensors(values)


@dataclass
class _Step:
    """An object on the way from a tensor to a name.

    Attributes:
        tensor: the tensor.
        path: from the object to the tensor, as Python would write it behind the object's name.
        key: of a dict, what stands before ``path``, an attribute's name or a key, as is seen later,
            or ``_NO_KEY``; of a function's closure, the number of the variable.
    """

    object: Any
    tensor: Tensor
    path: str
    key: Any = None

    def below(self, owner: Any = None) -> str:
        if not _is(self.object, dict) or self.key is _NO_KEY:
            return self.path
        if _ask(owner, "__dict__") is self.object or _is(owner, type):
            return f".{self.key}{self.path}"
        key = repr(self.key) if _is(self.key, str, int, float) else f"a {type(self.key).__name__}"
        return f"[{key}]{self.path}"

    def above(self, holder: Any, path: str, key: Any = None) -> _Step:
        """Returns the step from what holds the object."""
        return _Step(holder, self.tensor, path, key)


def _is(value: Any, *kinds: type) -> bool:
    """As isinstance(), which asks proxies what they stand for."""
    return issubclass(type(value), kinds)


def _ask(value: Any, name: str) -> Any:
    """Returns an attribute of whatever object; None where it cannot be had."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _try_to_place(tensors: list[Tensor], ours: set[int]) -> tuple[str, Tensor, Any]:
    """As :func:`_place_of`; "" where the search fails, in objects of whatever class that other
    threads may change."""
    try:
        return _place_of(tensors, ours)
    except Exception:
        return "", tensors[0], None


def _place_of(tensors: list[Tensor], ours: set[int]) -> tuple[str, Tensor, Any]:
    """Returns where a program has one of some tensors: the nearest name, or the way as far as it is
    known, "" where nothing refers to them but ``ours``; which of them it is; and, where there is no
    name, the object at the end of the way."""
    level = [_Step(tensor, tensor, "") for tensor in tensors]
    ours = {*ours, id(tensors), *map(id, tensors)}
    farthest, of, last = "", tensors[0], None
    for _ in range(_FARTHEST):
        if (found := _name_of_variable(level)) is not None:
            return *found, None
        ours |= {id(level), *(id(step) for step in level), *(id(vars(step)) for step in level)}
        above: list[_Step] = []
        referrers = gc.get_referrers(*(step.object for step in level))
        while referrers:
            referrer = referrers.pop()
            if id(referrer) in ours or _is_frame_of_ours(referrer):
                continue
            ours.add(id(referrer))
            inside = {id(each) for each in gc.get_referents(referrer)}
            for step in level:
                if id(step.object) not in inside:
                    continue
                if (name := _name_at(referrer, step)) is not None:
                    return name, step.tensor, None
                if (next_step := _step_to(referrer, step)) is not None:
                    above.append(next_step)
                    break
        if not above:
            break
        level = above
        last, of = level[0].object, level[0].tensor
        kind = type(last).__name__
        farthest = f"{level[0].below()} of a {kind}" if level[0].below() else f"a {kind}"
    return farthest, of, last


def _is_frame_of_ours(referrer: Any) -> bool:
    if not _is(referrer, FrameType):
        return False
    return str(referrer.f_globals.get("__name__")).startswith(_OWN)


def _name_of_variable(level: list[_Step]) -> tuple[str, Tensor] | None:
    """Returns the name of a local variable of a function that runs now, on any thread."""
    frames: list[FrameType | None] = list(sys._current_frames().values())
    try:
        while frames:
            if (frame := frames.pop()) is None:
                continue
            frames.append(frame.f_back)
            if _is_frame_of_ours(frame):
                continue
            if (found := _name_in(frame, level)) is not None:
                return f"{found[0]} {_in(frame)}", found[1]
        return None
    finally:
        frames.clear()  # this function's is one of them


def _name_in(frame: FrameType, level: list[_Step]) -> tuple[str, Tensor] | None:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return None  # a module's variables are its attributes, too
    local = frame.f_locals
    try:
        for step in level:
            for name, value in list(local.items()):
                if value is step.object:
                    return f"{name}{step.below()}", step.tensor
        return None
    finally:
        # A copy, which the frame would keep. It is what locals() returned, and what a debugger
        # sets variables from, where they have it.
        if sys.version_info < (3, 13) and sys.getrefcount(local) <= _OF_NOBODY_ELSE:
            local.clear()


def _in(frame: FrameType) -> str:
    return f"in {frame.f_code.co_name}(), {frame.f_code.co_filename}:{frame.f_lineno}"


def _name_at(referrer: Any, step: _Step) -> str | None:
    """Returns the name that a referrer gives; None where it has none of its own."""
    if _is(referrer, FrameType):
        if (found := _name_in(referrer, [step])) is not None:
            return f"{found[0]} {_in(referrer)}, which a traceback or generator keeps"
    elif _is(referrer, FunctionType):
        if step.object is referrer.__closure__:
            name = referrer.__code__.co_freevars[step.key]
            return f"{name}{step.below()} in the closure of {referrer.__qualname__}()"
        return f"a default of {referrer.__qualname__}()"
    elif _is(referrer, dict) and type(name := dict.get(referrer, "__name__")) is str:
        module = sys.modules.get(name)
        if module is not None and _ask(module, "__dict__") is referrer:
            for name, value in dict.copy(referrer).items():
                if value is step.object:
                    return f"{name}{step.below()} of the module {module.__name__}"
    elif _is(referrer, type):
        return f"{referrer.__qualname__}{step.below(referrer)}"
    elif _is(referrer, nn.Module) and vars(referrer) is step.object:
        return f"{type(referrer).__name__}{step.below(referrer)}"
    return None


def _step_to(referrer: Any, step: _Step) -> _Step | None:
    """Returns the way by a referrer without a name of its own."""
    if _is(referrer, dict):
        # A copy, made at once, as other threads may write to it: a list of items makes tuples, so
        # the collector may run, and with it Python code.
        for key, value in dict.copy(referrer).items():
            if value is step.object:
                return step.above(referrer, step.below(), key)
            if key is step.object:
                return step.above(referrer, f" (a key){step.below()}", _NO_KEY)
        return None
    if _is(referrer, list, tuple, deque):
        index = next((i for i, value in enumerate(list(referrer)) if value is step.object), 0)
        if _is(step.object, CellType):  # a function's closure
            return step.above(referrer, step.below(), index)
        return step.above(referrer, f"[{index}]{step.below()}")
    if _is(referrer, CellType, FrameType):
        return step.above(referrer, step.below())
    if _ask(referrer, "__dict__") is step.object:
        return step.above(referrer, step.below(referrer))
    if _is(referrer, Tensor) and _ask(referrer, "grad_fn") is step.object:
        return step.above(referrer, f".grad_fn{step.below()}")
    for name in _attributes(referrer):
        if _ask(referrer, name) is step.object:
            return step.above(referrer, f".{name}{step.below()}")
    return step.above(referrer, step.below())


def _attributes(value: Any) -> Iterator[str]:
    own = _ask(value, "__dict__")
    yield from list(own) if _is(own, dict) else ()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
