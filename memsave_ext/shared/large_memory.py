"""Large memory of the CPU that is freed and asked for again, and which malloc does not find."""

from __future__ import annotations

import weakref

from .. import _parts


class LargeMemory:
    """While it lives, large memory of the CPU that was freed is found again: see
    csrc/memory/cpu_allocator.cpp. In pure Python it is not."""

    def __init__(self) -> None:
        native = _parts.native("memory")
        if native and native.hold_cpu_allocator():
            weakref.finalize(self, native.release_cpu_allocator).atexit = False
