"""Adam and AdamW as one native call, or stepped in backward as the gradients arrive."""

from .optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW"]
