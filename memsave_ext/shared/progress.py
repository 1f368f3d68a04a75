"""Says on stderr how far long work is: with tqdm where it is installed, else on one line."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any

from .checks import check_bool


class Progress:
    """What a ``with`` block has done of its work; gone from the terminal when the block is left.

    Args:
        name: of the work.
        total: how many parts it has.
        shown: None shows it where stderr is a terminal; True always, False never.
    """

    def __init__(self, name: str, total: int, shown: bool | None = None) -> None:
        check_bool(f"{name}: progress", shown, none=True)
        file = sys.stderr
        if shown is None:
            shown = file is not None and file.isatty()
        self._name, self._total, self._begun = name, total, 0
        self._file = file if shown else None
        self._bar: Any = None
        self._width = 0  # of the line that is written over

    def __enter__(self) -> Progress:
        if self._file is not None:
            try:
                tqdm = importlib.import_module("tqdm").tqdm
            except ImportError:
                return self
            options = {"desc": self._name, "leave": False, "file": self._file}
            self._bar = tqdm(total=self._total, dynamic_ncols=True, **options)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._width:
            self._write("")

    def next(self, part: str) -> None:
        """Names the part that begins now; the one before it, if there was one, is done."""
        self._begun += 1
        if self._bar is not None:
            if self._begun > 1:
                self._bar.update()
            self._bar.set_postfix_str(part)
        elif self._file is not None:
            self._write(f"{self._name} {self._begun}/{self._total}: {part}"[:79])

    def _write(self, line: str) -> None:
        assert self._file is not None
        print(f"\r{line:<{self._width}}", end="" if line else "\r", file=self._file, flush=True)
        self._width = len(line)
