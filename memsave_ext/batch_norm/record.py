"""The statistics a batch norm computed in the forward of a region, found again in its recompute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..checkpointing import tapes


@dataclass(slots=True)
class Record:
    """One call in a forward. On the tapes, calls are kept by module, in their order."""

    statistics: Tensor
    shape: torch.Size
    dtype: torch.dtype
    versions: tuple[tuple[int, int], ...]

    @staticmethod
    def of(module: _BatchNorm, input: Tensor, statistics: Tensor) -> Record:
        return Record(statistics, input.shape, input.dtype, _versions(module))


def find(module: _BatchNorm, input: Tensor, replay: tapes.Replay | None) -> Record | None:
    """What the forward recorded for this call of its recompute, where this is one."""
    if replay is None:
        return None
    records = replay.tape.get(id(module), ())
    position = replay.positions.get(id(module), 0)
    if position >= len(records):
        return None
    record: Record = records[position]
    if record.shape != input.shape or record.dtype != input.dtype:
        return None
    replay.positions[id(module)] = position + 1
    _check_versions(module, record)
    return record


def keep(module: _BatchNorm, record: Record, recording: list[tapes.Tape]) -> None:
    for tape in recording:
        tape.setdefault(id(module), []).append(record)


def _versions(module: _BatchNorm) -> tuple[tuple[int, int], ...]:
    """Identity and version of weight and bias. A sharded module may show others each time."""
    tensors = (module.weight, module.bias)
    return tuple((id(t), -1 if t is None or t.is_inference() else t._version) for t in tensors)


def _check_versions(module: _BatchNorm, record: Record) -> None:
    names = ("weight", "bias")
    for name, before, now in zip(names, record.versions, _versions(module), strict=True):
        if before[0] == now[0] and before[1] != now[1]:
            raise RuntimeError(
                f"{type(module).__name__}: {name} has been modified by an inplace operation "
                "between the forward of a checkpointed region and its recompute: it is at version "
                f"{now[1]}, the forward used version {before[1]}. The recompute would "
                "differentiate another function. An optimizer that steps in backward does this to "
                "a layer that is used in several regions."
            )
