"""Keeping operators out of what remat records."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .. import _parts


def unrecorded() -> AbstractContextManager[None]:
    """In it the blocks that are open on this thread record no operators: what it computes is not
    in every step, or not in a run on fake tensors, and nothing of it is saved for backward."""
    native: Any = _parts.native("remat")
    return nullcontext() if native is None else native.RematPause()
