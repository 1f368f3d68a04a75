"""A head whose classes are sharded over processes, as tensor parallelism does it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..shared.dtensor import is_dtensor, is_placed_alike, local_tensor, put_local

_PRIME = 1_000_003  # checksums are below it


class Vocabulary(NamedTuple):
    """Which of all classes a weight has."""

    classes: int  # all
    first: int = 0
    group: Any = None  # of the processes that have the others; None: this weight has all

    def combine_(self, sums: Tensor, target: Tensor) -> None:
        """Replaces sums of ``linear_cross_entropy_reduce_`` over this process's classes by those
        over all, stably, with two collectives.

        Before them one of four numbers compares the targets, as others wait for ever where
        processes have different numbers of tokens.

        Raises ValueError where processes have different targets: their hidden states are not
        those of the same tokens.
        """
        before, total, _, *entropy = sums.unbind()
        places = torch.arange(1, len(target) + 1, device=target.device)
        checksum = (target * places).sum() % _PRIME
        mine = torch.stack([checksum, torch.full_like(checksum, len(target))])
        largest = torch.cat([mine, -mine])
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        _check_same((largest[:2] == -largest[2:]).all())
        maximum = before.clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, self.group)
        moved = before - torch.where(maximum == -torch.inf, 0.0, maximum)
        factor = moved.exp()
        for moment in entropy:  # the product is 0 where there is nothing to move
            moment.add_(total * torch.where(moved < -1000, -1000.0, moved)).mul_(factor)
        total.mul_(factor)
        before.copy_(maximum)
        dist.all_reduce(sums[1:], dist.ReduceOp.SUM, self.group)

    def choose_(self, value: Tensor, place: Tensor) -> None:
        """Replaces each token's largest logit in this process, and its class, by those of all, the
        first one of several, with two collectives."""
        mine = value.clone()
        dist.all_reduce(value, dist.ReduceOp.MAX, self.group)
        place.copy_(torch.where(mine == value, place, self.classes))
        dist.all_reduce(place, dist.ReduceOp.MIN, self.group)


def _check_same(same: Tensor) -> None:
    what = (
        "linear_weight is sharded over processes, which must all have the same tokens, but their "
        "targets differ. Where each has tokens of its own, as with FSDP2, the loss belongs into "
        "the forward of the module that gathers the weight"
    )
    if type(same) is Tensor and same.is_cpu:
        if not same:
            raise ValueError(what)
    elif not same.is_meta:
        torch._assert_async(same, what)


def is_sharded(weight: Any) -> bool:
    """Whether a weight's classes, its rows, are sharded over processes."""
    return is_dtensor(weight) and any(p.is_shard(0) for p in weight.placements)


def refuse_dtensors(**tensors: Any) -> None:
    """Raises ValueError where one that is not None is a DTensor."""
    for name, tensor in tensors.items():
        if tensor is not None and is_dtensor(tensor):
            raise ValueError(
                f"{name} must be a plain tensor, got a DTensor with {tuple(tensor.placements)}. "
                "linear_cross_entropy and linear_log_probs take DTensors where linear_weight is "
                "one with Shard(0), sharded over its classes"
            )


def replicated(tensor: Any) -> Any:
    """Returns a DTensor whose local part is the whole, gathered where it was sharded; a tensor that
    is no DTensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def replicated_like(tensor: Any, local: Tensor) -> Tensor:
    """Returns a tensor that is the same in all processes as a DTensor on the mesh of ``tensor``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def vocabulary_of(weight: Any) -> Vocabulary:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = weight.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            "a linear_weight that is sharded over its classes must be so by Shard(0) on a mesh of "
            f"one dimension, got {tuple(weight.placements)} on {mesh}"
        )
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    return Vocabulary(weight.shape[0], offset[0], mesh.get_group())


def local_rows(weight: Any, /, **others: Any) -> list[Any]:
    """Returns the rows of ``weight`` that this process has, and those of ``others``, sharded alike,
    that are not None. The gradient of each is that of these rows."""
    for name, tensor in others.items():
        if tensor is not None and not (is_dtensor(tensor) and is_placed_alike(weight, tensor)):
            got = "a tensor that is no DTensor"
            if is_dtensor(tensor):
                got = f"{tuple(tensor.placements)} on {tensor.device_mesh}"
            raise ValueError(
                f"{name} must be a DTensor that is sharded as linear_weight, by Shard(0) on "
                f"{weight.device_mesh}, got {got}"
            )
    return [None if t is None else t.to_local() for t in (weight, *others.values())]


def local_tokens(head: Any, /, **tensors: Any) -> list[Any]:
    """Returns all tokens of each that is not None, gathered where they were sharded.

    Every process finds a part of their gradient, which is summed over the processes that share the
    classes of the head's weight, in the tensor's dtype as in torch's column-parallel layers.
    """
    from torch.distributed.tensor import Partial

    mesh, found = head.device_mesh, []
    for name, tensor in tensors.items():
        if tensor is not None and is_dtensor(tensor) and tensor.device_mesh != mesh:
            raise ValueError(
                f"{name} must be a plain tensor or a DTensor on linear_weight's {mesh}, got one on "
                f"{tensor.device_mesh}"
            )
        if tensor is not None and (is_dtensor(tensor) or tensor.requires_grad):
            if not is_dtensor(tensor):
                tensor = replicated_like(head, tensor)
            tensor = replicated(tensor)
            put_local(tensor, local_tensor(tensor))  # a layer may have gathered without waiting
            tensor = tensor.to_local(grad_placements=[Partial()])
        found.append(tensor)
    return found
