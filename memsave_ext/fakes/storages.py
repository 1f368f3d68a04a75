"""Tells a listener when fake memory is made and freed, as an allocator would."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..shared.tensors import rounded
from . import formulas, kernels, workspaces
from .costs import SECONDS_PER_CALL, operator_seconds, seconds_on_card
from .repeats import Costs, Repeats
from .values import Values, with_values

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
_DEFAULT_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
Collective = Callable[[Any, tuple[Any, ...]], Any]
WORKSPACE = 1  # the number of memory that has no storage, whose addresses are even


@functools.cache
def _run_others(types: tuple[type, ...]) -> bool:
    """Whether one of the classes of arguments runs operators by itself, as DTensor does."""
    return any(
        not issubclass(kind, FakeTensor)
        and getattr(kind, "__torch_dispatch__", None) not in (None, _DEFAULT_DISPATCH)
        for kind in types
    )


class Storages(TorchDispatchMode):
    """Sees the results of all operators. It is entered after a FakeTensorMode, and so above it.

    What fake kernels make on the way to a result is not seen, which is right: other operators may
    stand for the real kernel there.

    Args:
        allocated: called with the number and the size of new memory.
        freed: called with its number.
        ran: called with about how long an operator would run, for plans, and on the device.
        device: the device that is predicted. What kernels make and free themselves is known on the
            CPU alone; on CUDA sizes are rounded up as its caching allocator does.

    Attributes:
        collective: runs an operator of ``c10d``; None where other processes are not predicted.
    """

    def __init__(
        self,
        allocated: Callable[[int, int], None],
        freed: Callable[[int], None],
        ran: Callable[[float, float], None],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._allocated, self._freed, self._ran = allocated, freed, ran
        self._device, self._on_cpu = device, device.type == "cpu"
        self.makers = formulas.Makers()
        self.repeats = Repeats(device)
        self._values = Values()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._before: set[int] = set()  # numbers of those that nobody was told of
        self._outside: dict[int, Tensor] = {}  # by id: the tensors that these are of
        self.reached: dict[int, Tensor] = {}  # by id: those of them that operators have read
        self.failed: Exception | None = None  # what an operator raised last
        self.collective: Collective | None = None
        # While a formula runs that a step computes otherwise: its node, and what it has made.
        self._otherwise: tuple[int, dict[int, weakref.ref[torch.UntypedStorage]]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would cost a wrapper around every call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # most calls are this one
            return args[0].fake_device
        if _run_others(types):
            return NotImplemented  # it calls operators on what it wraps, which come here
        kwargs = kwargs or {}
        self._reach(args)
        self._tell_result()
        if (read := self._values.read(func, args)) is not None:
            return read
        if (view := self.repeats.view(func, args, kwargs)) is not None:
            for tensor in (view,) if isinstance(view, FakeTensor) else view:
                self.memory(tensor)
            self._ran(SECONDS_PER_CALL, SECONDS_PER_CALL if self._on_cpu else 0.0)
            return view
        if (namespace := getattr(func, "namespace", None)) in _COLLECTIVES:
            if self.collective is None:
                raise RuntimeError(
                    f"{func} communicates with other processes, which run nothing in a prediction "
                    "without devices=, their number"
                )
            if namespace == "c10d":
                return self.collective(func, args)
        func = self.makers.operator(func, args)
        call = self.repeats.call(func, args, kwargs)
        repeated = call and call.repeated(args)
        if repeated:
            result, made, costs = repeated
        else:
            try:
                result = kernels.run(func, args, kwargs, plain=call is not None)
            except Exception as error:
                self.failed = error
                raise
            if self._on_cpu:
                result = workspaces.as_left_by_kernel(func, args, result)
            result = with_values(func, args, kwargs, result)
            made = [leaf for leaf in tree_iter(result) if isinstance(leaf, FakeTensor)]
            made.extend(kernels.parts_of(result))
            call_of = func, args, kwargs, result
            seconds = operator_seconds(*call_of)
            costs = Costs(
                workspaces.workspace_bytes(*call_of) if self._on_cpu else 0,
                seconds,
                seconds if self._on_cpu else seconds_on_card(*call_of),
            )
            if call:
                call.remember(args, result, costs)
        for tensor in made:
            self.memory(tensor)
        if costs.bytes:
            self._allocated(WORKSPACE, rounded(costs.bytes, self._device))
            self._freed(WORKSPACE)
        self._ran(costs.seconds, costs.on_device)
        self._values.follow(func, args, kwargs, result)
        return result

    def memory(self, tensor: Tensor) -> tuple[int, int] | None:
        """Returns the number and size of a tensor's memory, and reports it if it is new.

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

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Reports that memory was freed, or made, by the size of its storage, which FSDP2 sets."""
        number = storage._cdata
        if number in self._known:
            self._forget(number)
        if storage.nbytes():
            self._tell(storage, torch._C._current_autograd_node())

    def leave(self, tensor: Tensor) -> None:
        """Reports that memory is freed, as it lies elsewhere from here on."""
        number = tensor.untyped_storage()._cdata
        if number in self._known and number not in self._before:
            self._before.add(number)
            self._freed(number)

    def note_before(self, tensor: Tensor, *, counts: bool) -> None:
        """Knows the memory of a tensor that there was before, and tells of it where it counts."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known and storage.nbytes():
            number, size = self._note(storage)
            if counts:
                self._allocated(number, size)
            else:
                self._before.add(number)
        if storage._cdata in self._before:
            self._outside[id(tensor)] = tensor

    def _reach(self, args: Iterable[Any]) -> None:
        for value in args:
            if id(value) in self._outside:
                self.reached[id(value)] = self._outside.pop(id(value))
            elif isinstance(value, (list, tuple)):
                self._reach(value)

    def _note(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        number, size = storage._cdata, rounded(storage.nbytes(), self._device)
        self._known[number] = weakref.ref(storage, lambda _: self._forget(number)), size
        return number, size

    def _tell(self, storage: torch.UntypedStorage, node: Any) -> None:
        number, size = self._note(storage)
        self.makers.made(number, node)
        self._allocated(number, size)

    def _is_made_otherwise(self, node: Any, storage: torch.UntypedStorage) -> bool:
        """Whether a step makes other memory in its place; that is reported once, with the first."""
        made = formulas.bytes_in_step(node, self._on_cpu)
        if made is None:
            return False
        if self._otherwise is None:
            self._allocated(WORKSPACE, rounded(made, self._device))
            self._freed(WORKSPACE)
            self._otherwise = node._sequence_nr(), {}
        self._otherwise[1].setdefault(storage._cdata, weakref.ref(storage))
        return True

    def _tell_result(self) -> None:
        """Reports what is left of a formula that a step computes otherwise, once it is done."""
        if self._otherwise is None or self._otherwise[0] == formulas.node_number():
            return
        (_, made), self._otherwise = self._otherwise, None
        for reference in made.values():
            if (storage := reference()) is not None:
                self._tell(storage, torch._C._current_autograd_node())

    def note_value(self, tensor: Tensor, value: float) -> None:
        """Notes the value of all elements of a tensor that was made before."""
        self._values.note(tensor.untyped_storage()._cdata, tensor._version, value)

    def has_known_values(self, tensor: Tensor) -> bool:
        """Whether what Python reads from it is what a step would read."""
        return self._values.is_known(tensor)

    def living(self, counted: Container[int] = ()) -> Iterator[tuple[int, int]]:
        """Yields the number and size of all memory that lives and was told of, and of those of
        these numbers that were there before."""
        self._tell_result()
        for number, (_, size) in self._known.items():
            if number not in self._before or number in counted:
                yield number, size

    def _forget(self, number: int) -> None:
        del self._known[number]
        self._before.discard(number)
        self._values.forget(number)
        self.makers.forget(number)
        self._freed(number)
