"""Where Adam in pure Python finds this until it moves, too."""

from ..checkpointing.fallback.stepped import note_step

__all__ = ["note_step"]
