"""Adam and AdamW as one native call, or stepped in backward as the gradients arrive."""

from .in_backward import remove_hooks
from .optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW", "remove_hooks"]
