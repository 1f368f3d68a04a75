"""Checks of arguments that several functions of this package use."""

from __future__ import annotations


def check_count(name: str, value: object, least: int) -> None:
    """Raises unless ``value`` is an int of at least ``least``; ``name`` is for the message."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
