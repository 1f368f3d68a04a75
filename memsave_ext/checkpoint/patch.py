"""``patch_torch_checkpoint``: models that call torch's checkpoint use this one."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.utils.checkpoint as _torch

from .models import checkpoint_sequential
from .region import checkpoint


def _stand_in(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """An object of its own: undoing the patch must not touch who imported ``ours`` himself."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


_REPLACEMENTS = {
    theirs: _stand_in(ours, theirs)
    for theirs, ours in (
        (_torch.checkpoint, checkpoint),
        (_torch.checkpoint_sequential, checkpoint_sequential),
    )
}


def _swap(replacements: dict[Any, Any]) -> None:
    """Replace functions in every loaded module that holds them under any name."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "memsave_ext" or not hasattr(module, "__dict__"):
            continue
        for attribute, value in list(vars(module).items()):
            # By identity, and only functions: others may not be hashable, or compare strangely.
            if callable(value) and type(value).__hash__ is not None:
                for old, new in replacements.items():
                    if value is old:
                        setattr(module, attribute, new)


class _Patch:
    """What :func:`patch_torch_checkpoint` returns: ``remove()``, or leaving ``with``, undoes it."""

    _count = 0  # of patches that hold: the last one that is removed puts torch's functions back
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._holds = True
        with _Patch._lock:
            _Patch._count += 1
            _swap(_REPLACEMENTS)

    def remove(self) -> None:
        """Put torch's functions back, also where they were imported since, unless another patch
        holds. A second call does nothing."""
        with _Patch._lock:
            if not self._holds:
                return
            self._holds = False
            _Patch._count -= 1
            if _Patch._count == 0:
                _swap({new: old for old, new in _REPLACEMENTS.items()})

    def __enter__(self) -> _Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def patch_torch_checkpoint() -> _Patch:
    """Replace torch.utils.checkpoint.checkpoint (and _sequential) by this package's, for all.

    Also in loaded modules that imported the name. As a statement it holds for good; as a context
    manager, or until ``remove()`` of what it returns, for a while::

        with memsave_ext.patch_torch_checkpoint():
            model.gradient_checkpointing_enable()
            train(model)

    Undo it after backward, not between: a checkpoint inside of a checkpointed function is called
    again in the recompute, where torch's would do something else.

    Patches nest: torch's functions are back when all of them are undone. References kept elsewhere
    (in an object, a closure, a functools.partial) are not found: patch before they are made.
    """
    return _Patch()
