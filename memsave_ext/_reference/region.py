"""``checkpoint`` in Python: saved-tensor hooks that keep holders; a recompute fills them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .outside import (
    OutsideTensors,
    ReadObserver,
    describe_versions,
    mutation_message,
    version_of,
)
from .stepped import PendingRegion
from .surroundings import Surroundings, uncached_autocast
from .tail import fills_after_saving
from .tape import Tape, tape_scope
from .unlisted import sequence_number

_opened_outside = itertools.count()


def checkpoint_region(
    function: Callable[..., Any],
    recompute_function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    preserve_rng_state: bool,
    early_stop: bool,
    check_determinism: bool,
    on_error: Callable[[str], str] | None,
) -> Any:
    kwargs = kwargs or {}
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "checkpoint does not work inside torch.func transforms (grad, vjp, jvp, vmap): torch "
            "allows no saved-tensor hooks there. Call the function directly."
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = _Region(recompute_function, kwargs, early_stop, check_determinism, on_error)
    # Before the hooks: arguments belong to what surrounds the region.
    region.arguments = [_Argument(a) for a in args]
    region.surroundings = Surroundings.capture(preserve_rng_state)
    if check_determinism:
        region.outside.note(region.roots())
    with (
        uncached_autocast(region.surroundings.autocast),
        saved_tensors_hooks(region.save, _unpack),
        tape_scope(region.tape, replaying=False),
    ):
        result = function(*args, **kwargs)
    region.finish_forward(result)
    return result


class _Stop(BaseException):
    """Leaves a recompute early. Not an Exception: the function's handlers are not meant for it."""


class _Argument:
    """A positional argument; tensors as autograd keeps them: seen by hooks, checked for changes."""

    def __init__(self, value: Any) -> None:
        self.value = None if isinstance(value, Tensor) else value
        self.keeper: Any = None
        if isinstance(value, Tensor):
            # Autograd does not look at versions where hooks are called with what it saves.
            self.storage, self.version = _storage(value), version_of(value)
            # A node of its own is how Python can make autograd save a tensor. In torch 2.11 the
            # node's tensors go with its output.
            with torch.enable_grad():
                self.keeper = _Keep.apply(torch.empty(0, requires_grad=True), [value])

    def get(self) -> Any:
        if self.keeper is None:
            return self.value
        (tensor,) = self.keeper.grad_fn.saved_tensors
        return tensor

    def mutation(self, tensor: Any) -> str:
        """What was done in place to the argument, which ``tensor`` is now; empty for nothing."""
        if self.keeper is None or self.storage is None or self.storage != _storage(tensor):
            return ""
        now = version_of(tensor)
        return describe_versions(self.version, now) if now != self.version else ""


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*kept)  # in a list: not an input to be differentiated
        return anchor.detach()


@dataclass(eq=False)
class _Slot:
    """What the forward saved at one position."""

    holder: weakref.ref[_Holder]
    metadata: dict[str, Any]
    storage: StorageWeakRef | None
    version: int


class _Holder:
    """What autograd keeps in place of a saved tensor."""

    def __init__(self, region: _Region, index: int) -> None:
        self.region, self.index = region, index
        self.values: dict[tuple[str, int], Tensor] = {}  # by backward


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Holder):
        return saved  # type: ignore[no-any-return]  # saved by a recompute, as it is
    return saved.region.open(saved)


def _metadata(tensor: Tensor) -> dict[str, Any]:
    shape = None if tensor.is_nested else tensor.shape
    return {"shape": shape, "dtype": tensor.dtype, "device": tensor.device}


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
        return None


class _Region:
    def __init__(
        self,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
        early_stop: bool,
        check: bool,
        on_error: Callable[[str], str] | None,
    ) -> None:
        self.function, self.kwargs, self.check, self.on_error = function, kwargs, check, on_error
        self.early_stop = self.stop_at_last_save = early_stop
        self.outside = OutsideTensors()
        self.pending: PendingRegion | None = None  # once the forward has ended
        self.tape: Tape = {}
        self.arguments: list[_Argument] = []
        self.surroundings: Surroundings | None = None
        self.slots: list[_Slot] = []
        self.finished = False
        self.mark = sequence_number()
        self.lock = threading.Lock()
        self.recomputing_thread: int | None = None

    def save(self, tensor: Tensor) -> _Holder:
        holder = _Holder(self, len(self.slots))
        self.slots.append(
            _Slot(weakref.ref(holder), _metadata(tensor), _storage(tensor), tensor._version)
        )
        return holder

    def finish_forward(self, outputs: Any) -> None:
        self.finished = True
        if self.slots:
            if self.check:
                self.outside.leave_out_own_changes(self.roots())
            self.pending = PendingRegion()
        if self.stop_at_last_save:
            self.stop_at_last_save = not fills_after_saving(outputs, self.mark)

    def roots(self) -> list[Any]:
        """What leads to tensors from outside of the function."""
        others = [a.value for a in self.arguments if a.keeper is None]
        return [*others, self.kwargs, self.function]

    def open(self, holder: _Holder) -> Tensor:
        key = _backward_key()
        if key in holder.values:
            return holder.values.pop(key)
        if self.recomputing_thread == threading.get_ident():
            raise RuntimeError(
                "memsave_ext.checkpoint: the recompute of a region needs a tensor of the same "
                "region. The function runs a backward through a graph of an earlier call of itself."
            )
        with self.lock:
            if key not in holder.values:  # else another thread was first
                self.recomputing_thread = threading.get_ident()
                try:
                    self.recompute(key)
                finally:
                    self.recomputing_thread = None
            tensor = holder.values.pop(key)
            if key[0] == "outside":  # nobody will come for the others
                self.forget(key)
            return tensor

    def fail(self, message: str) -> None:
        from ..checkpointing.errors import CheckpointError  # imports this module

        message += "\nTip: pass `debug=True` to see the operators of both runs."
        raise CheckpointError(self.on_error(message) if self.on_error else message)

    def forget(self, key: tuple[str, int]) -> None:
        for slot in self.slots:
            holder = slot.holder()
            if holder is not None:
                holder.values.pop(key, None)

    def recompute(self, key: tuple[str, int]) -> None:
        args = [a.get() for a in self.arguments]
        mutated = [a.mutation(value) for a, value in zip(self.arguments, args, strict=True)]
        if self.check and any(mutated):
            lines = "".join(f"argument {i}: {what}\n" for i, what in enumerate(mutated) if what)
            self.fail(mutation_message(lines))
        run = _Recompute(self, key)
        assert self.surroundings is not None
        observer: ReadObserver | None = None
        if self.check and self.pending is not None:
            changed = self.outside.find_changed(self.roots())
            if changed or self.pending.any_stepped():
                observer = ReadObserver(changed, self.pending)
        try:
            with (
                self.surroundings.restored(),
                saved_tensors_hooks(run.save, _unpack),
                tape_scope(self.tape, replaying=True),
                observer or contextlib.nullcontext(),
            ):
                self.function(*args, **self.kwargs)
        except _Stop:
            if not run.stopped:
                raise
        try:
            run.raise_differences(observer.reads if observer else "")
        except BaseException:
            self.forget(key)
            raise


class _Recompute:
    """One run of the function for its saved tensors."""

    def __init__(self, region: _Region, key: tuple[str, int]) -> None:
        self.region, self.key = region, key
        self.count, self.saved = 0, len(region.slots)
        self.stopped = False
        self.different: list[str] = []
        self.mutated: list[str] = []
        # In a backward inside the function it must not run further than the forward has.
        self.finished = region.finished
        self.may_stop = region.stop_at_last_save
        if not self.finished:
            node = torch._C._current_autograd_node()
            self.may_stop = node is not None and not node.name().startswith("RreluWithNoise")
        live = [i for i, slot in enumerate(region.slots) if slot.holder() is not None]
        self.needed = live[-1] + 1 if live else 0

    def save(self, tensor: Tensor) -> Tensor:
        # Never with a graph: the value would keep the recompute's graph alive.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        region, index = self.region, self.count
        if self.stopped:
            return tensor  # the function caught the exception that stops it
        self.count += 1
        if index >= self.saved:
            self._stop_if(not self.finished)
            return tensor
        slot = region.slots[index]
        if region.check:
            self._compare(index, slot, tensor)
        holder = slot.holder()
        if holder is not None:
            holder.values[self.key] = tensor
        self._stop_if(self.may_stop and self.count == self.needed)
        return tensor

    def _stop_if(self, stop: bool) -> None:
        if stop:
            self.stopped = True
            raise _Stop

    def _compare(self, index: int, slot: _Slot, tensor: Tensor) -> None:
        metadata = _metadata(tensor)
        if metadata != slot.metadata:
            self.different.append(
                f"tensor at position {index}:\nsaved metadata: {slot.metadata}\n"
                f"recomputed metadata: {metadata}\n"
            )
        outside = slot.storage is not None and slot.storage == _storage(tensor)
        if outside and tensor._version != slot.version:
            self.mutated.append(
                f"tensor at position {index}: {slot.metadata}, "
                f"{describe_versions(slot.version, tensor._version)}\n"
            )

    def raise_differences(self, reads: str) -> None:
        saved = len(self.region.slots)
        if self.mutated or reads:
            self.region.fail(
                mutation_message("".join(self.mutated) + reads)
                + ' determinism_check="none" turns this check off.'
            )
        if self.different:
            self.region.fail(
                "torch.utils.checkpoint: Recomputed values for the following tensors have "
                "different metadata than during the forward pass.\n" + "".join(self.different) + "."
            )
        if not self.finished:
            return  # a backward inside the function: it saves more later
        if self.count > saved and not self.region.early_stop:
            self.region.fail(
                "torch.utils.checkpoint: trying to save more tensors during recomputation than "
                "during the original forward pass."
            )
        if not self.stopped and self.count < saved:
            self.region.fail(
                "torch.utils.checkpoint: A different number of tensors was saved during the "
                "original forward and recomputation.\n"
                f"Number of tensors saved during forward: {saved}\n"
                f"Number of tensors saved during recomputation: {self.count}."
            )


def _backward_key() -> tuple[str, int]:
    group = torch._C._get_graph_exec_group()
    if group is not None:
        return ("group", id(group))
    task = torch._C._current_graph_task_id()
    return ("task", task) if task != -1 else ("outside", next(_opened_outside))
