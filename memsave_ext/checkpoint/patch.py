"""``patch_torch_checkpoint``: models that call torch's checkpoint use this one."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.utils.checkpoint as _torch

from .models import run_in_segments
from .region import run

# With torch's parameters: others are the function's, whatever options ours has besides.


@functools.wraps(_torch.checkpoint)
def _checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Any = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    return run(
        function,
        args,
        kwargs,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        early_stop=early_stop,
        debug=debug,
    )


@functools.wraps(_torch.checkpoint_sequential)
def _sequential(
    functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, **options: Any
) -> Any:
    given = {**options, "use_reentrant": use_reentrant}
    return run_in_segments(functions, segments, (input,), given, spreads=False)


_REPLACEMENTS: dict[Any, Any] = {
    _torch.checkpoint: _checkpoint,
    _torch.checkpoint_sequential: _sequential,
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
