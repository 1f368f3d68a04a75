"""Caches of keys and values among a block's arguments, which a recompute would fill once more."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

from torch import nn


def without_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments as transformers' own checkpointing hands them to it.

    None stands in the place of each of transformers' caches, and ``use_cache`` is False beside one.
    Layers that only read a cache (``_can_checkpoint_with_cache``) keep it. Warns once for a class.

    Raises:
        RuntimeError: a cache holds positions of an earlier call, which the block would not see.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    kind = library.Cache
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
    if not found or getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs
    name = type(module).__name__
    held = max(_positions(module, cache) for cache in found)
    if held:
        raise RuntimeError(
            f"checkpoint_modules: {name} is called with a cache that holds {held} positions, which "
            "a checkpointed block cannot use: its recompute would fill the cache once more. Call "
            "the model without the cache, or without gradients, or remove() the handle first."
        )
    _warn_once(name)
    args = tuple(None if isinstance(value, kind) else value for value in args)
    kwargs = {key: None if isinstance(value, kind) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _positions(module: nn.Module, cache: Any) -> int:
    """How many positions of an earlier call ``cache`` holds for the block."""
    for part in module.modules():
        index = getattr(part, "layer_idx", None)
        if isinstance(index, int):
            try:
                return int(cache.get_seq_length(index))
            except ValueError:  # a layer with a state of constant size, such as Mamba's
                return int(cache.has_previous_state(index))
    return 0


@functools.cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"checkpoint_modules: {name} is called without its cache, as in transformers' own gradient "
        "checkpointing, since a recompute would fill it once more. use_cache=False says so.",
        UserWarning,
        stacklevel=2,
    )
