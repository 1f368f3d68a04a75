"""``checkpoint``: saved-tensor hooks keep holders, which a recompute fills."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..._streams import on_stream
from .. import errors
from ..errors import OnError
from .forward_record import ForwardRecord, forward_record_scope
from .graph import any_fills_after_saving, sequence_number
from .outside import ChangedTensor, OutsideTensors, ReadObserver, observed_reads
from .recompute import Recompute, Stop
from .saved import Argument, BackwardKey, Holder, Slot
from .stepped import Pending
from .surroundings import Surroundings, uncached_autocast

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
            self._outside.note(self._roots())

    def save(self, tensor: Tensor) -> Holder:
        holder = Holder(self._open)
        self._slots.append(Slot.of(tensor, holder))
        return holder

    def finish_forward(self, outputs: Any) -> None:
        self._finished = True
        if self._slots:
            if self._check:
                self._outside.leave_out_own_changes(self._roots())
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
            return holder.values.pop(key)
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
            tensor = holder.values.pop(key)
            if key[0] == "outside":  # nobody will come for the others
                self._forget(key)
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

    def _find_changed(self) -> list[ChangedTensor]:
        look = self._check and self._pending is not None
        return self._outside.find_changed(self._roots()) if look else []

    def _recompute(self, key: BackwardKey) -> None:
        arguments = self._unpack_arguments()
        run = Recompute(
            self._slots,
            key,
            forward_finished=self._finished,
            may_stop=self._stop_at_last_save,
            check=self._check,
        )
        changed = self._find_changed()
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


def _current_backward() -> BackwardKey:
    group = torch._C._get_graph_exec_group()
    if group is not None:
        return ("group", id(group))
    task = torch._C._current_graph_task_id()
    return ("task", task) if task != -1 else ("outside", next(_opened_outside))
