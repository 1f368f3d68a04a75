"""How gradients are scaled whose norm is asked of all processes, and the collectives for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..shared.dtensor import is_dtensor

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


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor that clips to ``max_norm``, as torch.nn.utils.clip_grad_norm_ does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1)


@torch.no_grad()
def agree(
    param: Tensor,
    squares: Tensor,
    max_norm: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the factors of gradients of which each process has a shard, and which to skip.

    They are those that kernels compute where a gradient is whole. A collective.

    Args:
        param: one of the parameters; all are split as this one.
        squares: the sum of squares of each gradient's shard.
        max_norm: what each gradient is clipped to; 0: not.
        grad_scale, found_inf: of a GradScaler; None without one.
    """
    squares = sum_over_shards(param, squares)
    norms, inverse, skips = squares.sqrt(), torch.ones_like(squares), None
    if grad_scale is not None:
        assert found_inf is not None
        scale = grad_scale.double()
        norms, inverse = norms / scale, inverse / scale
        skips = squares.isfinite().logical_not().float()
        found_inf.copy_(torch.maximum(found_inf, skips.amax()))
    if max_norm == 0:
        return inverse, skips
    return inverse * clip_factor(norms, max_norm), skips


def clip_to_norm(
    squares: Mapping[int, Tensor],
    max_norm: float,
    grad_scale: Tensor | None,
    sharded: Iterable[Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the norm of all gradients, the factor that clips and unscales them, and a skip.

    Args:
        squares: the sum of squares of this process's gradients, by number of their sharding.
        max_norm: what the norm is clipped to.
        grad_scale: the loss scale of the gradients, with which the skip is 1 where the norm is not
            finite; None without one.
        sharded: a DTensor of each sharding among the optimizer's parameters. There is a collective
            for each, whether this process has gradients or not.
    """
    total = squares.get(0)
    for param in sharded:
        here = squares.get(sharding_of(param)[0], torch.zeros((), dtype=torch.double, device="cpu"))
        of_all = sum_over_shards(param, here)
        total = of_all if total is None else total + of_all.to(total.device)
    norm = torch.zeros((), dtype=torch.double, device="cpu") if total is None else total.sqrt()
    if grad_scale is None:
        return norm.float(), clip_factor(norm, max_norm), None
    scale = grad_scale.to(norm.device, torch.double)
    norm = norm / scale
    factor = clip_factor(norm, max_norm) / scale
    return norm.float(), factor, norm.isfinite().logical_not().float()


@torch.no_grad()
def clip_over_meshes(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clips the gradients in ``.grad`` by the norm of all, as torch's ``clip_grad_norm_``, and
    returns the norm.

    Torch's takes DTensors of one mesh, or none: here those of each mesh, and the others, have a
    norm, and the norm of these is that of all.
    """
    of_meshes: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            mesh = param.grad.device_mesh if is_dtensor(param.grad) else None  # type: ignore[attr-defined]
            of_meshes.setdefault(mesh, []).append(param)
    if len(of_meshes) <= 1:
        return whole_norm(torch.nn.utils.clip_grad_norm_([*params], max_norm))
    norms = [
        whole_norm(torch.nn.utils.get_total_norm([p.grad for p in of_mesh if p.grad is not None]))
        for of_mesh in of_meshes.values()
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    for of_mesh in of_meshes.values():
        torch.nn.utils.clip_grads_with_norm_(of_mesh, max_norm, norm)
    return norm


def whole_norm(norm: Any) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[no-any-return]


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
