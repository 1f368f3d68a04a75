"""What follows the operators of a block: the native part, or the fallback."""

from __future__ import annotations

from typing import Any, Protocol

from .. import _native
from .fallback.block import Block


class Recorder(Protocol):
    """Of one block. Opened once, by the thread whose operators it follows."""

    def open(self) -> None: ...

    def close(self) -> None:
        """By the same thread, after those inside it. RuntimeError otherwise."""

    def enter_module(self, number: int) -> None:
        """Ignored in other threads, where replicas of a module run its hooks."""

    def leave_module(self) -> None: ...

    def figures(self) -> dict[str, Any]:
        """
        - ``operators``: how many were recorded,
        - ``saved``: tuples of a module's number (-1: none), an operator's name ("": none was
          seen), a position in ``figures.VERDICTS``, a count of memories, their bytes, and the
          seconds it takes to compute them again, as measured in the forward,
        - ``again``: tuples of a module's number, an operator's name, how often it ran again, the
          bytes it made, its seconds.
        """


def make_recorder(everything: bool | None) -> Recorder:
    """``everything``: what can be computed again is dropped, cheap or not; for tests. None: nothing
    is, to measure what recording costs."""
    recorder: Recorder = (
        _native.module.RematRecorder(everything) if _native.module else Block(everything)
    )
    return recorder
