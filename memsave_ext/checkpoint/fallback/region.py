"""``checkpoint``: saved-tensor hooks keep holders, which a recompute fills."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..._leaves import hold_accumulators
from ..._streams import on_stream
from .. import errors, rules
from ..errors import CheckpointError, Metadata, OnError, Read
from .graph import any_fills_after_saving, fills_after_saving, sequence_number
from .outside import (
    ChangedTensor,
    OutsideTensors,
    ReadObserver,
    cuda_devices,
    observed_reads,
    version_of,
)
from .stepped import Pending
from .surroundings import (
    ForwardRecord,
    Surroundings,
    any_has_drawn,
    forward_record_scope,
    uncached_autocast,
)

BackwardKey = tuple[str, int]
_queue = torch.autograd.Variable._execution_engine.queue_callback


class Holder:
    """What autograd keeps in place of a saved tensor."""

    def __init__(self, open_: Callable[[Holder], Tensor]) -> None:
        # Computed again, by the backward that asked: the tensor, and its version when it was saved.
        self.values: dict[BackwardKey, tuple[Tensor, int]] = {}
        self._open = open_

    def open(self) -> Tensor:
        return self._open(self)


@dataclass(eq=False)
class Slot:
    """What the forward saved at one position."""

    holder: weakref.ref[Holder]  # dead once autograd has dropped it
    metadata: Metadata
    storage: StorageWeakRef | None
    version: int

    @staticmethod
    def of(tensor: Tensor, holder: Holder) -> Slot:
        weak, version = weakref.ref(holder), tensor._version
        return Slot(weak, metadata_of(tensor), storage_of(tensor), version)


def metadata_of(tensor: Tensor) -> Metadata:
    shape = torch.Size() if tensor.is_nested else tensor.shape  # it has none in one piece
    return shape, tensor.dtype, tensor.device


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
        return None


class Argument:
    """A positional argument. Tensors are kept as autograd keeps them: hooks see them, and a change
    in place is noticed."""

    def __init__(self, value: Any) -> None:
        self.is_tensor = isinstance(value, Tensor)
        self.value = None if self.is_tensor else value
        if self.is_tensor:
            # Autograd does not look at versions where hooks are called with what it saves.
            self._storage, self._version = storage_of(value), version_of(value)
            self._requires_grad = value.requires_grad
            # A node of its own is how Python can make autograd save a tensor. In torch 2.11 the
            # node's tensors go with its output.
            with torch.enable_grad():
                nodes = hold_accumulators([value])
                self._keeper: Any = _Keep.apply(
                    torch.empty(0, requires_grad=True, device="cpu"), [value]
                )
                del nodes

    def get(self) -> Any:
        if not self.is_tensor:
            return self.value
        (tensor,) = self._keeper.grad_fn.saved_tensors
        # A leaf's may have been changed. What autograd saves depends on what needs a gradient.
        if tensor.requires_grad != self._requires_grad:
            tensor = tensor.detach().requires_grad_(self._requires_grad)
        return tensor

    def change(self, now: Any) -> tuple[int, int] | None:
        """The versions in the forward and now, where the argument was changed in place."""
        if not self.is_tensor or self._storage is None or self._storage != storage_of(now):
            return None
        versions = self._version, version_of(now)
        return versions if versions[0] != versions[1] else None


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*kept)  # in a list: not an input to be differentiated
        return anchor.detach()


class Stop(BaseException):
    """Leaves a recompute early. Not an Exception: the function's handlers are not meant for it."""


class Recompute:
    """A run. ``forward_finished`` is False where a backward inside the function asks for it."""

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        forward_finished: bool,
        may_stop: bool,
        outside: OutsideTensors | None,
    ) -> None:
        """``outside``: what the forward noted; None: nothing is checked."""
        self.stopped = False
        self._slots, self._outside = slots, outside
        self._values: list[tuple[Slot, Tensor, int]] = []
        self._count, self._saved = 0, len(slots)
        self._forward_finished = forward_finished
        self._may_stop = may_stop
        if not forward_finished:  # it must not run further than the forward has
            node = torch._C._current_autograd_node()
            self._may_stop = node is not None and not fills_after_saving(node)
        live = [i for i, slot in enumerate(slots) if slot.holder() is not None]
        self._needed = live[-1] + 1 if live else 0
        self._different: list[tuple[int, Metadata, Metadata]] = []
        self._changed: list[tuple[int, Metadata, tuple[int, int] | None]] = []

    def save(self, tensor: Tensor) -> Tensor:
        # Never with a graph: the value would keep the recompute's graph alive.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        index = self._count
        if self.stopped:
            return tensor  # the function caught the exception that stops it
        self._count += 1
        if index >= self._saved:
            self._stop_if(not self._forward_finished)
            return tensor
        slot = self._slots[index]
        if self._outside is not None:
            self._compare(index, slot, tensor, self._outside)
        if slot.holder() is not None:
            self._values.append((slot, tensor, version_of(tensor)))
        self._stop_if(self._may_stop and self._count == self._needed)
        return tensor

    def give(self, key: BackwardKey) -> None:
        """Puts what was computed where this backward finds it, once nothing is wrong with it."""
        for slot, tensor, version in self._values:
            holder = slot.holder()
            if holder is not None:
                holder.values[key] = tensor, version

    def _stop_if(self, stop: bool) -> None:
        if stop:
            self.stopped = True
            raise Stop

    def _compare(self, index: int, slot: Slot, tensor: Tensor, outside: OutsideTensors) -> None:
        metadata = metadata_of(tensor)
        if metadata != slot.metadata:
            self._different.append((index, slot.metadata, metadata))
        if slot.storage is None:
            return
        if slot.storage == storage_of(tensor):
            if tensor._version != slot.version:
                self._changed.append((index, slot.metadata, (slot.version, tensor._version)))
        elif not slot.storage.expired() and outside.has(tensor):
            self._changed.append((index, slot.metadata, None))

    def difference(
        self, reads: list[Read], early_stop: bool, on_error: OnError
    ) -> CheckpointError | None:
        """The error for what this run did differently. ``reads``: of tensors that have changed."""
        return rules.difference(
            self._changed,
            reads,
            self._different,
            self._saved,
            self._count,
            self.stopped,
            self._forward_finished,
            early_stop,
            on_error,
        )


_opened_outside = itertools.count()


def checkpoint_region(
    function: Callable[..., Any],
    recompute_function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    preserve_rng_state: bool,
    early_stop: bool,
    check_determinism: bool,
    on_error: OnError,
) -> Any:
    kwargs = kwargs or {}
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Before the hooks: arguments belong to what surrounds the region.
    arguments = [Argument(a) for a in args]
    surroundings = Surroundings.capture(preserve_rng_state)
    region = _Region(
        recompute_function, arguments, kwargs, surroundings, early_stop, check_determinism, on_error
    )
    with (
        uncached_autocast(surroundings.autocast),
        saved_tensors_hooks(region.save, _unpack),
        forward_record_scope(region.forward_record, replaying=False),
    ):
        result = function(*args, **kwargs)
    region.finish_forward(result)
    if surroundings.rng is not None:
        surroundings.rng.keep(region.devices() | cuda_devices(args))
    return result


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Holder):
        return saved.open()
    return saved  # type: ignore[no-any-return]  # saved by a recompute, as it is


class _Region:
    def __init__(
        self,
        function: Callable[..., Any],
        arguments: list[Argument],
        kwargs: dict[str, Any],
        surroundings: Surroundings,
        early_stop: bool,
        check: bool,
        on_error: OnError,
    ) -> None:
        self.forward_record: ForwardRecord = {}
        self._function, self._arguments, self._kwargs = function, arguments, kwargs
        self._surroundings = surroundings
        self._check, self._on_error = check, on_error
        self._early_stop = self._stop_at_last_save = early_stop
        self._slots: list[Slot] = []
        self._finished = False  # the forward
        self._pending: Pending | None = None  # from then on
        self._mark = sequence_number()
        self._lock = threading.Lock()
        self._recomputing_thread: int | None = None
        self._outside = OutsideTensors()
        if check:
            generators = self._outside.note(self._roots())
            if surroundings.rng is not None:
                surroundings.rng.add(generators)

    def devices(self) -> set[int]:
        """Returns CUDA's that the tensors are on which the function may read, and has saved."""
        saved = (slot.metadata[2] for slot in self._slots)
        return self._outside.devices | {d.index for d in saved if d.type == "cuda"}

    def save(self, tensor: Tensor) -> Holder:
        holder = Holder(self._open)
        self._slots.append(Slot.of(tensor, holder))
        return holder

    def finish_forward(self, outputs: Any) -> None:
        self._finished = True
        if self._slots:
            if self._check:
                self._outside.leave_out_changes_of_forward(self._roots())
            self._pending = Pending()
        if self._stop_at_last_save:
            self._stop_at_last_save = not any_fills_after_saving(outputs, self._mark)

    def _roots(self) -> list[Any]:
        """Objects from which the function can reach tensors beside its positional arguments."""
        others = [a.value for a in self._arguments if not a.is_tensor]
        return [*others, self._kwargs, self._function]

    def _open(self, holder: Holder) -> Tensor:
        key = _current_backward()
        if key in holder.values:
            return self._take(holder, key)
        if self._recomputing_thread == threading.get_ident():
            raise errors.needs_itself()
        with self._lock:
            if key not in holder.values:  # else another thread was first
                self._recomputing_thread = threading.get_ident()
                try:
                    # Already here: what hooks around the region give back is made on the stream
                    # that reads it.
                    with on_stream(self._surroundings.stream):
                        self._recompute(key)
                except BaseException:
                    self._forget(key)
                    raise
                finally:
                    self._recomputing_thread = None
                if key[0] == "task":
                    # What this backward does not ask for is of no use to a later one.
                    forget = weakref.WeakMethod(self._forget)
                    _queue(lambda: (method := forget()) and method(key))
            tensor = self._take(holder, key)
            if key[0] == "outside":  # nobody will come for the others
                self._forget(key)
            return tensor

    def _take(self, holder: Holder, key: BackwardKey) -> Tensor:
        tensor, version = holder.values.pop(key)
        now = version_of(tensor)
        if self._check and now != version:  # autograd looks at versions where no hooks are
            index = next(i for i, slot in enumerate(self._slots) if slot.holder() is holder)
            raise errors.value_changed(index, version, now, self._on_error)
        return tensor

    def _forget(self, key: BackwardKey) -> None:
        for slot in self._slots:
            holder = slot.holder()
            if holder is not None:
                holder.values.pop(key, None)

    def _unpack_arguments(self) -> list[Any]:
        arguments = [a.get() for a in self._arguments]
        found = [a.change(now) for a, now in zip(self._arguments, arguments, strict=True)]
        changes = [(i, *versions) for i, versions in enumerate(found) if versions]
        if self._check and changes:
            raise errors.arguments_changed(changes, self._on_error)
        return arguments

    def _find_changed(self) -> tuple[list[ChangedTensor], list[torch.Generator]]:
        look = self._check and self._pending is not None
        return self._outside.find_changed(self._roots()) if look else ([], [])

    def _recompute(self, key: BackwardKey) -> None:
        arguments = self._unpack_arguments()
        run = Recompute(
            self._slots,
            forward_finished=self._finished,
            may_stop=self._stop_at_last_save,
            outside=self._outside if self._check else None,
        )
        changed, generators = self._find_changed()
        rng = self._surroundings.rng
        others = {} if rng is None else rng.others(generators)
        observer: ReadObserver | None = None

        def save(tensor: Tensor) -> Tensor:
            # An operator saves before it is dispatched to observers, and may be the last.
            if changed and observer is not None:
                observer.look("autograd.save", tensor)
            return run.save(tensor)

        try:
            with (
                self._surroundings.restored(),
                observed_reads(changed, self._pending if self._check else None) as observer,
                saved_tensors_hooks(save, _unpack),
                forward_record_scope(self.forward_record, replaying=True),
            ):
                self._function(*arguments, **self._kwargs)
        except Stop:
            if not run.stopped:
                raise
        reads = observer.reads if observer is not None else []
        error = run.difference(reads, self._early_stop, self._on_error)
        if error is not None:
            raise error
        if any_has_drawn(others):
            raise errors.other_generator(self._on_error)
        run.give(key)


def _current_backward() -> BackwardKey:
    group = torch._C._get_graph_exec_group()
    if group is not None:
        return ("group", id(group))
    task = torch._C._current_graph_task_id()
    return ("task", task) if task != -1 else ("outside", next(_opened_outside))
