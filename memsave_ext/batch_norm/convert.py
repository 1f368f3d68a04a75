"""Replaces torch's batch norms by this package's."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..shared.checks import check_bool
from .modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, CountOnce
from .sync import SyncBatchNorm

M = TypeVar("M", bound=nn.Module)

_COUNTERPARTS: dict[type[nn.Module], type[CountOnce]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}


@overload
def convert_batch_norm(
    model: M, sync: bool = ..., *, process_group: Any = ..., dry_run: Literal[False] = ...
) -> M: ...
@overload
def convert_batch_norm(
    model: M, sync: bool = ..., *, process_group: Any = ..., dry_run: Literal[True]
) -> list[tuple[str, str, str]]: ...
def convert_batch_norm(
    model: M, sync: bool = False, *, process_group: Any = None, dry_run: bool = False
) -> M | list[tuple[str, str, str]]:
    """Turn every batch norm of torch.nn in ``model`` into this package's, in place.

    The modules stay the same objects with the same Parameters, buffers and hooks, so that an
    optimizer, a shared layer and anything else that refers to them go on working. Modules that are
    already this package's stay as they are.

    Args:
        model: any module, a batch norm itself included.
        sync: turn them, and this package's own ones, too, into :class:`SyncBatchNorm`.
        process_group: the group of the SyncBatchNorms that have none, those that there were too.
        dry_run: change nothing; return what would change.

    Returns:
        ``model``, or for a dry run the list of changes: (name of the module, class, new class).

    Raises:
        ValueError: ``process_group`` is given without ``sync``.
        TypeError: an argument has a wrong type; or the model has subclasses of torch's batch norms
            that this function does not know, whose own behaviour would be lost. The message lists
            them by name and class, and nothing is changed.
    """
    _check(model, sync, process_group, dry_run)
    unknown = []
    changes: list[tuple[str, nn.Module, type[nn.Module]]] = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        kind = type(module)
        target: type[nn.Module] = _COUNTERPARTS.get(kind, kind)
        if target not in _COUNTERPARTS.values() or "forward" in vars(module):
            unknown.append(f"{name or 'the model'} ({kind.__module__}.{kind.__qualname__})")
            continue
        if sync:
            target = SyncBatchNorm
        lacks_group = process_group is not None and getattr(module, "process_group", None) is None
        if target is not kind or lacks_group:
            changes.append((name, module, target))
    if unknown:
        raise TypeError(
            "convert_batch_norm: these modules are of other classes, or have a forward of their "
            f"own, which the conversion would lose: {', '.join(unknown)}. Nothing was changed."
        )
    if dry_run:
        return [(name, _name(type(module)), _name(target)) for name, module, target in changes]
    for _, module, target in changes:
        if target is SyncBatchNorm and getattr(module, "process_group", None) is None:
            module.process_group = process_group
        module.__class__ = target
    return model


def _check(model: object, sync: object, process_group: object, dry_run: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"convert_batch_norm: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    for name, flag in (("sync", sync), ("dry_run", dry_run)):
        check_bool(f"convert_batch_norm: {name}", flag)
    if process_group is not None:
        if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
            raise TypeError(
                "convert_batch_norm: process_group must be a torch.distributed.ProcessGroup or "
                f"None, got {type(process_group).__name__}"
            )
        if not sync:
            raise ValueError(
                "convert_batch_norm: process_group needs sync=True: pass it too, or leave "
                "process_group out"
            )


def _name(kind: type[nn.Module]) -> str:
    package = "torch.nn" if kind.__module__.startswith("torch.nn.") else "memsave_ext"
    return f"{package}.{kind.__name__}"
