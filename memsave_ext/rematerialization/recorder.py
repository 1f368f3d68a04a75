"""Chooses what records the operators of a block: the native part, or the fallback."""

from __future__ import annotations

from typing import Any, Protocol

from .. import _native
from .fallback.block import Block


class Recorder(Protocol):
    """Records one block. It is opened once, by the thread whose operators it records."""

    def open(self) -> None: ...

    def close(self) -> None:
        """Stops recording. RuntimeError in another thread, or while an inner block is open."""

    def enter_module(self, number: int) -> None:
        """Notes that the module's forward begins.

        Ignored in other threads, where replicas of a module run its hooks.
        """

    def leave_module(self) -> None: ...

    def figures(self) -> dict[str, Any]:
        """Returns a dict of

        - ``operators``: how many operators were recorded,
        - ``saved``: tuples of a module's number (-1: none), an operator's name ("": none was
          seen), a position in ``figures.VERDICTS``, how many storage contents, their bytes, and the
          seconds to recompute those that were dropped, as measured in the forward,
        - ``again``: tuples of a module's number, an operator's name, how often it ran again, the
          bytes it made, and the seconds it took.
        """


def make_recorder(everything: bool | None) -> Recorder:
    """Returns a recorder for one block.

    ``everything``: True drops all that can be recomputed, cheap or not, for tests. None drops
    nothing, to measure what recording costs.
    """
    recorder: Recorder = (
        _native.module.RematRecorder(everything) if _native.module else Block(everything)
    )
    return recorder
