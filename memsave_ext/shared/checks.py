"""Checks of arguments that several functions of this package use."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def check_count(name: str, value: object, least: int) -> None:
    """Raises unless ``value`` is an int of at least ``least``; ``name`` is for the message."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_bool(name: str, value: object, *, none: bool = False) -> None:
    """Raises TypeError unless ``value`` is True or False, or None where ``none`` allows it."""
    if not isinstance(value, bool) and not (none and value is None):
        choices = "True, False or None" if none else "True or False"
        raise TypeError(f"{name} must be {choices}, got {value!r}")


def check_shapes(who: str, model: nn.Module) -> None:
    """Raises ValueError where parameters of a lazy module have not been made yet."""
    if any(is_lazy(param) for param in model.parameters()):
        raise ValueError(
            f"{who}: parameters of this {type(model).__name__} have no shape yet: call it once, "
            "then make its optimizer"
        )


def checked_device(who: str, device: torch.device | str) -> torch.device:
    """Returns a device of a kind that this package knows; raises an error of ``who`` for others."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None  # torch does not know its name
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"{who}: device must be the CPU or a CUDA device, got {device!r}")
    return chosen


def check_allocator(what: str, device: torch.device) -> None:
    """Raises where the allocator of a CUDA device reports nothing of what it allocates.

    ``what`` needs its reports, and is for the message.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise RuntimeError(
            f"{what} follows what torch's caching allocator reports, but on CUDA the allocator is "
            f"{backend!r} here, which reports nothing: leave backend:{backend} out of "
            "PYTORCH_CUDA_ALLOC_CONF, or do not make another allocator the current one"
        )
