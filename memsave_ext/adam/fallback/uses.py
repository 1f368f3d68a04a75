"""The parameters whose gradients the open step has used, or queued."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor


class Uses:
    def __init__(self) -> None:
        self._stepped: set[int] = set()  # ids: stepped, or queued
        self._folded: set[int] = set()  # with gradients folded into the moments
        self._threads: dict[int, int] = {}  # the thread whose backward uses the gradient

    def add_stepped(self, params: Iterable[Tensor]) -> None:
        self._stepped.update(id(param) for param in params)

    def add_folded(self, params: Iterable[Tensor]) -> None:
        self._folded.update(id(param) for param in params)

    def note_thread(self, param: Tensor) -> None:
        self._threads[id(param)] = threading.get_ident()

    def is_of_another_thread(self, param: Tensor) -> bool:
        here = threading.get_ident()
        return self._threads.get(id(param), here) != here

    def is_stepped(self, param: Tensor) -> bool:
        return id(param) in self._stepped

    def stepped(self) -> int:
        return len(self._stepped)

    def count(self, params: Iterable[Tensor]) -> int:
        """Returns how many of these parameters were stepped, or folded into."""
        used = self._stepped | self._folded
        return sum(id(param) in used for param in params)

    def forget(self, params: Iterable[Tensor]) -> None:
        """Forgets uses that were not made after all."""
        for param in params:
            self._stepped.discard(id(param))
            self._threads.pop(id(param), None)

    def forget_threads(self) -> None:
        self._threads.clear()

    def clear(self) -> None:
        self._stepped.clear()
        self._folded.clear()
        self._threads.clear()
