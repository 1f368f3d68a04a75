"""Collectives of the processes over which DTensors are split."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .dtensor import is_dtensor

_Numbers = dict[tuple[int, ...], int]
# The number of each sharding that was asked for: by mesh, and by the dimensions of it that split.
_numbers: weakref.WeakKeyDictionary[Any, _Numbers] = weakref.WeakKeyDictionary()
_last = 0


def sharding_of(param: Any) -> tuple[int, int]:
    """Returns the number of a DTensor's sharding, and over how many processes it is split.

    DTensors with the same number are split over the same processes. 0: each has all of it.
    """
    global _last
    mesh, dims = param.device_mesh, _splitting_dims(param)
    if not dims:
        return 0, 1
    numbers = _numbers.setdefault(mesh, {})
    if dims not in numbers:
        _last += 1
        numbers[dims] = _last
    shards = 1
    for dim in dims:
        shards *= mesh.size(dim)
    return numbers[dims], shards


@torch.no_grad()
def sum_over_shards(param: Any, values: Tensor) -> Tensor:
    """Returns ``values`` added up over the processes of a DTensor's shards."""
    mesh = param.device_mesh
    sums = values.to(mesh.device_type, copy=True)  # offloaded parameters are elsewhere
    for dim in _splitting_dims(param):
        dist.all_reduce(sums, group=mesh.get_group(dim))
    return sums.to(values.device)


@torch.no_grad()
def largest_of_processes(params: Iterable[Tensor], value: Tensor) -> Tensor:
    """Returns the largest ``value`` of all processes that have a part of one of ``params``.

    ``value`` is returned as it is where none is a DTensor.
    """
    for mesh in dict.fromkeys(param.device_mesh for param in params if is_dtensor(param)):  # type: ignore[attr-defined]
        on_mesh = value.to(mesh.device_type, copy=True)
        for dim in range(mesh.ndim):
            dist.all_reduce(on_mesh, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        value = on_mesh.to(value.device)
    return value


def _splitting_dims(param: Any) -> tuple[int, ...]:
    """Returns the dimensions of the mesh along which ``param`` is split."""
    mesh, placements = param.device_mesh, param.placements
    return tuple(
        dim
        for dim, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
