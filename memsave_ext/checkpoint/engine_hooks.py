"""``use_engine_hooks``: the saved tensors of regions without a Python object each."""

from __future__ import annotations

from .. import _parts


def use_engine_hooks(enabled: bool = True) -> bool:
    """Let autograd's engine give regions of :func:`checkpoint` C++ hooks; opt-in, process-wide.

    torch calls saved-tensor hooks through Python, a Python object for every saved tensor, forward
    and recompute. With this the engine hands out hooks in C++ where the topmost hook is a region's;
    all other hooks, and everything else the engine does, stay torch's. It rests on an extension
    point of torch that is not documented (``set_default_engine_stub``), hence the opt-in. Results
    are the same. In pure Python it does nothing.

    Args:
        enabled: for regions from now on; those that have run keep the hooks they have.

    Returns:
        What was set before.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"use_engine_hooks: enabled must be a bool, got {type(enabled).__name__}")
    native = _parts.native("checkpoint")
    return native.use_engine_hooks(enabled) if native else False
