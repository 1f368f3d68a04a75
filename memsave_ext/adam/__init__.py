"""Adam and AdamW as one native call, or stepped in backward as the gradients arrive."""

from .optimizer import Adam, AdamW
from .owners import remove_hooks

__all__ = ["Adam", "AdamW", "remove_hooks"]
