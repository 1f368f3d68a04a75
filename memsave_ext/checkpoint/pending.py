"""Tells regions and blocks that wait for their recompute which parameters are stepped meanwhile."""

from __future__ import annotations

from .. import _parts
from .fallback import stepped

_waiting = _parts.native("checkpoint") or stepped
is_any_pending = _waiting.is_any_pending
note_step = _waiting.note_step
