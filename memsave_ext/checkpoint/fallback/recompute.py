"""One run of a region's function for its saved tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import errors
from ..errors import CheckpointError, Metadata, OnError, Read
from .graph import fills_after_saving
from .saved import BackwardKey, Slot, metadata_of, storage_of


class Stop(BaseException):
    """Leaves a recompute early. Not an Exception: the function's handlers are not meant for it."""


class Recompute:
    """A run. ``forward_finished`` is False where a backward inside the function asks for it."""

    def __init__(
        self,
        slots: Sequence[Slot],
        key: BackwardKey,
        *,
        forward_finished: bool,
        may_stop: bool,
        check: bool,
    ) -> None:
        self.stopped = False
        self._slots, self._key, self._check = slots, key, check
        self._count, self._saved = 0, len(slots)
        self._forward_finished = forward_finished
        self._may_stop = may_stop
        if not forward_finished:  # it must not run further than the forward has
            node = torch._C._current_autograd_node()
            self._may_stop = node is not None and not fills_after_saving(node)
        live = [i for i, slot in enumerate(slots) if slot.holder() is not None]
        self._needed = live[-1] + 1 if live else 0
        self._different: list[tuple[int, Metadata, Metadata]] = []
        self._mutated: list[tuple[int, Metadata, int, int]] = []

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
        if self._check:
            self._compare(index, slot, tensor)
        holder = slot.holder()
        if holder is not None:
            holder.values[self._key] = tensor
        self._stop_if(self._may_stop and self._count == self._needed)
        return tensor

    def _stop_if(self, stop: bool) -> None:
        if stop:
            self.stopped = True
            raise Stop

    def _compare(self, index: int, slot: Slot, tensor: Tensor) -> None:
        metadata = metadata_of(tensor)
        if metadata != slot.metadata:
            self._different.append((index, slot.metadata, metadata))
        from_outside = slot.storage is not None and slot.storage == storage_of(tensor)
        if from_outside and tensor._version != slot.version:
            self._mutated.append((index, slot.metadata, slot.version, tensor._version))

    def difference(
        self, reads: list[Read], early_stop: bool, on_error: OnError
    ) -> CheckpointError | None:
        """The error for what this run did differently. ``reads``: of tensors that have changed."""
        saved = len(self._slots)
        if self._mutated or reads:
            return errors.outside_changed(self._mutated, reads, on_error)
        if self._different:
            return errors.other_metadata(self._different, on_error)
        if not self._forward_finished:
            return None  # a backward inside the function: it saves more later
        if self._count > saved and not early_stop:
            return errors.more_saved(on_error)
        if not self.stopped and self._count < saved:
            return errors.fewer_saved(saved, self._count, on_error)
        return None
