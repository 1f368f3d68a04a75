"""Optimizers: a step is one native call, or runs in backward as the gradients arrive."""

from . import operators, other_steps  # noqa: F401  # importing operators defines them
from .any_optimizer import in_backward
from .lion import Lion
from .optimizer import Adam, AdamW
from .owners import remove_hooks
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion", "in_backward", "remove_hooks"]
