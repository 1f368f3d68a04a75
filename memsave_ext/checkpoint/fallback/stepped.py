"""Parameters that optimizers step while regions wait for their recompute."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class ByteRange:
    """The bytes of a storage that a tensor's elements lie in."""

    begin: int
    end: int

    @staticmethod
    def of(tensor: Tensor) -> ByteRange:
        size = tensor.element_size()
        begin = int(tensor.storage_offset()) * size
        if tensor.numel() == 0:
            return ByteRange(begin, begin)
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return ByteRange(begin, begin + (last + 1) * size)

    def overlaps(self, other: ByteRange) -> bool:
        return self.begin < other.end and other.begin < self.end


@dataclass
class _StepsOfStorage:
    storage: StorageWeakRef  # a weak reference: the number is not given to another storage
    # Number of the latest step and position, of each parameter in this storage.
    steps: dict[ByteRange, tuple[int, int]] = field(default_factory=dict)


_lock = threading.RLock()  # a region may be freed while it is held
_pending = 0
_steps_noted = 0
_steps: dict[int, _StepsOfStorage] = {}


class Pending:
    """A region that can still be recomputed. Steps are noted while there is any."""

    def __init__(self) -> None:
        global _pending
        with _lock:
            _pending += 1
            self._since = _steps_noted

    def __del__(self) -> None:
        global _pending
        with _lock:
            _pending -= 1
            if _pending == 0:
                _steps.clear()

    def any_stepped(self) -> bool:
        return _steps_noted > self._since

    def stepped(self, tensor: Tensor) -> int | None:
        """The position of a parameter that shares memory with ``tensor`` and was stepped since."""
        with _lock:
            noted = _steps.get(tensor.untyped_storage()._cdata)
            if noted is None:
                return None
            range_ = ByteRange.of(tensor)
            for other, (number, position) in noted.steps.items():
                if number > self._since and other.overlaps(range_):
                    return position
        return None


def is_any_pending() -> bool:
    return _pending > 0


def note_step(param: Tensor, position: int) -> None:
    """An optimizer has changed ``param``, the ``position``-th of its parameters."""
    global _steps_noted
    if _pending == 0:
        return
    with _lock:
        _steps_noted += 1
        storage = StorageWeakRef(param.untyped_storage())
        noted = _steps.setdefault(storage.cdata, _StepsOfStorage(storage))
        noted.steps[ByteRange.of(param)] = (_steps_noted, position)
