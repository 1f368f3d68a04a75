"""Adam and AdamW: a step is one native call, or runs in backward as the gradients arrive."""

from .any_optimizer import in_backward
from .optimizer import Adam, AdamW
from .owners import remove_hooks

__all__ = ["Adam", "AdamW", "in_backward", "remove_hooks"]
