"""Tells a listener when fake memory is made and freed, as an allocator would."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from . import formulas, grouped, sparse
from .conversions import with_all_elements
from .costs import SECONDS_PER_CALL, operator_seconds
from .lstm import with_workspace
from .repeats import Costs, Repeats
from .values import Values

# Returns the bytes that the kernel of an operator makes for itself, given the operator, its
# arguments and its result.
Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
MOST_KNOWN = 64  # elements of a tensor whose values are known
_WORKSPACE = 1  # the number of memory that has no storage, whose addresses are even
_ALIKE = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
_aten = torch.ops.aten
_ADD, _ADD_IN_PLACE = _aten.add.Tensor, _aten.add_.Tensor
# Where formulas of gradients change what they have just made, and copy it for subclasses of tensors
# such as fakes.
_IN_PLACE = {
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar,
    _aten.put.default: _aten.put_.default,
    _aten.logical_and.default: _aten.logical_and_.default,
}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_ARANGE = torch.ops.aten.arange
_COUNTS = (_ARANGE.default, _ARANGE.start, _ARANGE.start_step, torch.ops.aten.linspace.default)


class Storages(TorchDispatchMode):
    """Sees the results of all operators. It is entered after a FakeTensorMode, and so above it.

    What fake kernels make on the way to a result is not seen, which is right: other operators may
    stand for the real kernel there.

    Args:
        allocated: called with the number and the size of new memory.
        freed: called with its number.
        ran: called with about how long an operator would run.
        workspace: tells what kernels make and free themselves, None where that is not known.
        rounding: sizes are rounded up to a multiple of this.
    """

    def __init__(
        self,
        allocated: Callable[[int, int], None],
        freed: Callable[[int], None],
        ran: Callable[[float], None],
        workspace: Workspace | None,
        rounding: int,
    ) -> None:
        super().__init__()
        self._allocated, self._freed, self._ran = allocated, freed, ran
        self._workspace = workspace
        self._rounding = rounding
        self.recomputes = 0  # that run, of operators of a forward
        self._repeats = Repeats()
        self._values = Values()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._makers: dict[int, int] = {}  # by storage, the number of the node that made it
        # Of a formula that a step computes otherwise: its node, and what it has made.
        self._otherwise: tuple[int, dict[int, weakref.ref[torch.UntypedStorage]]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would cost a wrapper around every call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # most calls are this one
            return args[0].fake_device
        kwargs = kwargs or {}
        self._tell_result()
        if func is _aten._local_scalar_dense.default and _is_unknown(args[0]):
            return _python_type(args[0].dtype)(self._values.of(args[0]))
        if func in _ALIKE and any(map(_is_unknown, args[:2])):
            return bool(args[0].shape == args[1].shape)
        if (view := self._repeats.view(func, args, kwargs)) is not None:
            for tensor in (view,) if isinstance(view, FakeTensor) else view:
                self.memory(tensor)
            self._ran(SECONDS_PER_CALL)
            return view
        if func is _ADD and self._is_accumulated(args):
            func = _ADD_IN_PLACE
        elif func in _IN_PLACE and self._is_of_formula(args[0]) and not _is_expanded(func, args):
            func = _IN_PLACE[func]
        call = self._repeats.call(func, args, kwargs)
        repeated = call and call.repeated(args)
        if repeated:
            result, made, costs = repeated
        else:
            result = _run(func, args, kwargs)
            if self._workspace:
                result = with_workspace(func, args, result)
                result = with_all_elements(func, args, result)
            if func in _COUNTS and isinstance(result, FakeTensor) and result.numel() <= MOST_KNOWN:
                result = _with_values(result, func, args, kwargs)
            made = [leaf for leaf in tree_iter(result) if isinstance(leaf, FakeTensor)]
            made.extend(sparse.parts_of(result))
            costs = Costs(
                self._workspace(func, args, kwargs, result) if self._workspace else 0,
                operator_seconds(func, args, kwargs, result),
            )
            if call:
                call.remember(args, result, costs)
        for tensor in made:
            self.memory(tensor)
        if costs.bytes:
            self._allocated(_WORKSPACE, self._rounded(costs.bytes))
            self._freed(_WORKSPACE)
        self._ran(costs.seconds)
        self._values.follow(func, args, kwargs, result)
        return result

    def memory(self, tensor: Tensor) -> tuple[int, int] | None:
        """Returns the number and size of a tensor's memory, which is told if it is new.

        None if it has none.
        """
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if tensor.fake_device.type == "meta" or not storage.nbytes():
            return None
        self._tell_result()
        number = storage._cdata
        if number not in self._known:
            node = torch._C._current_autograd_node()
            if node is not None and self._is_made_otherwise(node, storage):
                return None
            self._tell(storage, node)
        return number, self._known[number][1]

    def _tell(self, storage: torch.UntypedStorage, node: Any) -> None:
        number, size = storage._cdata, self._rounded(storage.nbytes())
        self._known[number] = weakref.ref(storage, lambda _: self._forget(number)), size
        if node is not None:
            self._makers[number] = node._sequence_nr()
        self._allocated(number, size)

    def _is_made_otherwise(self, node: Any, storage: torch.UntypedStorage) -> bool:
        """Whether a step makes other memory in its place, which is told with the first of it."""
        made = formulas.made_by(node, self._workspace is not None)
        if made is None:
            return False
        if self._otherwise is None:
            self._allocated(_WORKSPACE, self._rounded(made))
            self._freed(_WORKSPACE)
            self._otherwise = node._sequence_nr(), {}
        self._otherwise[1].setdefault(storage._cdata, weakref.ref(storage))
        return True

    def _tell_result(self) -> None:
        """Tells what is left of a formula that a step computes otherwise, once it is done."""
        if self._otherwise is None or self._otherwise[0] == _node():
            return
        (_, made), self._otherwise = self._otherwise, None
        for reference in made.values():
            if (storage := reference()) is not None:
                self._tell(storage, torch._C._current_autograd_node())

    def _is_accumulated(self, args: tuple[Any, ...]) -> bool:
        """Whether the engine adds a gradient to one that it alone holds, which it does in place,
        but never for subclasses of tensors such as fakes."""
        if self.recomputes or not _is_called_by_engine():
            return False
        a, b = args
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return False
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not _is_alone(a):
            return False
        # A formula's own sums are of what it made.
        return self._makers.get(a.untyped_storage()._cdata, _node()) != _node()

    def _is_of_formula(self, tensor: Tensor) -> bool:
        """Whether a gradient's formula has made the tensor and will not read it again."""
        if self.recomputes or not _is_called_by_engine() or not _is_alone(tensor):
            return False
        return self._makers.get(tensor.untyped_storage()._cdata) == _node()

    def has_known_values(self, tensor: Tensor) -> bool:
        """Whether what Python reads from it is what a step would read."""
        return self._values.is_known(tensor)

    def living(self) -> Iterator[tuple[int, int]]:
        """Yields the number and size of all memory that lives."""
        self._tell_result()
        for number, (_, size) in self._known.items():
            yield number, size

    def _forget(self, number: int) -> None:
        del self._known[number]
        self._values.forget(number)
        self._makers.pop(number, None)
        self._freed(number)

    def _rounded(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if grouped.is_refused(func, args):
        return grouped.product(*args, **kwargs)
    return sparse.run(func, args, kwargs)


def _is_expanded(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a mask is smaller than the result that it is part of."""
    return func is _aten.logical_and.default and bool(args[0].shape != args[1].shape)


def _is_called_by_engine() -> bool:
    """Whether the caller's caller's caller is the engine, and so neither a hook nor a function's
    backward in Python."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return sys._getframe(3).f_code is _ENGINE


def _is_alone(tensor: Tensor) -> bool:
    """Whether the tensor is all of its memory, and no other has it."""
    storage = tensor.untyped_storage()
    # One reference is the tensor's and one that of the object here.
    return tensor.nbytes == storage.nbytes() and torch._C._storage_Use_Count(storage._cdata) == 2


def _with_values(
    result: FakeTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FakeTensor:
    """Returns the result with its values, as models are built with those of such tensors."""
    with unset_fake_temporarily():
        real = func(*args, **kwargs)
    mode = result.fake_mode
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def _node() -> int | None:
    """Returns the number of the node that the engine evaluates, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _is_unknown(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _python_type(dtype: torch.dtype) -> type[bool] | type[int] | type[float] | type[complex]:
    if dtype is torch.bool:
        return bool
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else int
