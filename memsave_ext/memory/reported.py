"""What is done with figures: printed, drawn and written."""

from __future__ import annotations

import os
from typing import Any, TextIO

from ..shared.table import Text, as_text
from .account import Growth
from .figures import Figures, untracked
from .pictures.timeline import plot_track
from .report import as_json, print_report


class Reported(Figures):
    """Figures that can be printed, drawn and written."""

    def report(self, *, top: int = 10, file: TextIO | None = None) -> Text:
        """Returns a text: the peak, what it was made of, its ``top`` largest tensors, steps and
        regions, and :meth:`remedies`. It is also printed to ``file`` if given."""

        def write(text: TextIO) -> None:
            print_report(self, top=top, growth=self._growth, file=text)
            for sentence in self.remedies():
                print(f"\n{sentence}", file=text)

        with untracked():
            return as_text(write, file)

    def _growth(self, n: int) -> list[Growth]:
        """What several steps have left behind: nothing, of one that was predicted."""
        return []

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draws the timeline: live bytes by category, the phases, the peak.

        Args:
            path: the file to write, whose suffix names the format of the picture.
            title: printed above; None for one that names the device.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: ``path`` ends in ``.html`` or ``.htm``, or matplotlib cannot write that
                format.
        """
        with untracked():
            plot_track(self, path, title=title)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Returns all figures as plain numbers and strings; also written to ``path`` if given."""
        with untracked():
            return as_json(self, path)
