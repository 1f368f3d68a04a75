"""Memory that backward is still to compute something from, and which must not change before."""

from __future__ import annotations

import threading
import weakref

from torch import Tensor, UntypedStorage

from .outside import storage_address

_lock = threading.RLock()


class Pin:
    """While there is one, the storage is needed as it is."""


_pins: weakref.WeakValueDictionary[int, Pin] = weakref.WeakValueDictionary()


def pin(storage: UntypedStorage) -> Pin:
    """To be held together with the storage."""
    with _lock:
        found = _pins.get(storage._cdata)
        if found is None:
            found = _pins[storage._cdata] = Pin()
        return found


def is_pinned(tensor: Tensor) -> bool:
    return bool(_pins) and storage_address(tensor) in _pins
