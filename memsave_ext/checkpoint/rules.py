"""Rules that the native part and the pure-Python path both follow, each written here once.

They say which tensors from outside a region are looked at, what counts as a change of one, when a
recompute differs from its forward, and what is restored around it. csrc/checkpoint is handed them
at import: the numbers and names as a table, the functions to be called where something differs.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Sequence
from types import CodeType

from torch import Tensor

from .. import _native
from . import errors
from .errors import CheckpointError, Metadata, OnError, Read

# Containers of more elements, and what lies deeper, are not searched for tensors.
LARGEST = 1000
DEEPEST = 64
# Operators that read the shape of an argument alone.
SHAPE_ALONE_BEGINNINGS = ("aten::new_",)
SHAPE_ALONE_ENDINGS = ("_like",)
# Nodes of operations that save a tensor first and fill it afterwards, as rrelu in training does
# with its noise (pytorch#193671). Stopped at that save, a recompute would hand out what was in the
# memory before.
FILLS_AFTER_SAVING = ("RreluWithNoise",)
# The device types whose autocast state is restored.
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def reads_global(code: CodeType, name: str) -> bool:
    """Whether a function reads a global of this name, and not only an attribute."""
    return name in _globals_of(code)


@functools.lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> frozenset[str]:
    reads = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in reads)


def change(
    tensor: Tensor, name: str, before: int | None, now: int, by_forward: bool = False
) -> str | None:
    """What has happened to a tensor that is not as the forward found it; None if that is allowed.

    ``before`` and ``now`` are its versions. ``before`` is None where the forward found another
    tensor in its place. ``by_forward``: the forward itself has changed it.
    """
    if by_forward:
        return errors.describe_change_by_forward(tensor, name)
    # FSDP and offloading put other tensors in a parameter's place.
    if before is None and (tensor.is_meta or tensor.numel() == 0):
        return None
    return errors.describe_change(tensor, name, before, now)


def difference(
    changed: Sequence[tuple[int, Metadata, tuple[int, int] | None]],
    reads: Sequence[Read],
    different: Sequence[tuple[int, Metadata, Metadata]],
    forward: int,
    recompute: int,
    stopped: bool,
    forward_finished: bool,
    early_stop: bool,
    on_error: OnError,
) -> CheckpointError | None:
    """The error of a recompute that differs from its forward.

    ``changed`` and ``different`` are saved tensors, ``reads`` are reads of tensors from outside, as
    errors.py takes them. ``forward`` and ``recompute`` count what both saved.
    """
    if different or (recompute != forward and not stopped):
        # It did something else: that another tensor was saved says nothing of what lies where.
        changed = [one for one in changed if one[2] is not None]
    if changed or reads:
        return errors.outside_changed(changed, reads, on_error)
    if different:
        return errors.other_metadata(different, on_error)
    if not forward_finished:
        return None  # a backward inside the function asks; the forward saves more later
    # With early_stop the last tensor that is needed ends a recompute, also where running on was
    # cheaper; what is saved after it is not compared.
    if recompute > forward and not early_stop:
        return errors.more_saved(on_error)
    if not stopped and recompute < forward:
        return errors.fewer_saved(forward, recompute, on_error)
    return None


if _native.module:
    _native.module.register_functions({"checkpoint_rules": sys.modules[__name__]})
    _native.module.give_checkpoint_rules(sys.modules[__name__])
