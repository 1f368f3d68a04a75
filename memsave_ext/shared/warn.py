"""Warnings for the line of the user's that led to them."""

from __future__ import annotations

import sys
import warnings

_OTHERS = ("memsave_ext", "torch", "contextlib", "importlib")  # whose lines tell a user nothing


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is neither this package's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _OTHERS:
        if frame.f_back is None:
            break
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )
