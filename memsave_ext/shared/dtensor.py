"""Access to a DTensor's local part, the shard in this process, which is what steps work on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Before torch 2.13 hooks run while FSDP2's CPUOffloadPolicy is still copying the gradient from the
# device, on the present stream (pytorch#180666).
_COPIES_GO_ON = torch.__version__ < (2, 13)  # type: ignore[operator]


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def local_tensor(tensor: Any) -> Tensor:
    """Returns a DTensor's local part, which shares its memory and has no autograd history.

    A tensor that is no DTensor is returned as it is.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    if hasattr(local, "trigger_wait"):  # a pending collective still has to fill it
        local = local.wait()
    return local  # type: ignore[no-any-return]


@torch.no_grad()
def local_gradient(param: Any, grad: Any) -> Tensor:
    """Returns the local part of the gradient, redistributed to ``param``'s placement.

    Raises:
        RuntimeError: ``param`` is a DTensor, and the gradient none, or one of another mesh.
    """
    if not is_dtensor(param):
        return local_tensor(grad)
    if not is_dtensor(grad) or not _same_mesh(param, grad):
        raise _another_mesh(param, grad)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_of_hook(grad)


def local_of_hook(grad: Any) -> Tensor:
    """Returns the local part of the gradient that a hook is called with, once it is there."""
    local = local_tensor(grad)
    if _COPIES_GO_ON and grad.device_mesh.device_type == "cuda" and not local.is_cuda:
        torch.cuda.current_stream().synchronize()
    return local


def _another_mesh(param: Any, grad: Any) -> RuntimeError:
    mesh = getattr(grad, "device_mesh", None)
    got = "a plain tensor" if mesh is None else f"one on {mesh}"
    return RuntimeError(
        f"memsave_ext: the gradient of a DTensor must be a DTensor on {param.device_mesh}, got "
        f"{got}. Wrap it with torch.distributed.tensor.DTensor.from_local() or distribute_tensor()"
    )


def is_placed_alike(param: Any, tensor: Any) -> bool:
    """Whether two DTensors are split over the same processes in the same way."""
    return _same_mesh(param, tensor) and bool(tensor.placements == param.placements)


def _same_mesh(param: Any, tensor: Any) -> bool:
    """Whether two DTensors are on the same processes, whatever the names and ages of their meshes.

    Two meshes are equal for torch only if one thread of one process has made them.
    """
    one, other = param.device_mesh, tensor.device_mesh
    return one is other or (
        one.device_type == other.device_type and torch.equal(one.mesh, other.mesh)
    )


@torch.no_grad()
def leave_buffer(grad: Any, local: Tensor) -> Tensor:
    """Gives a gradient memory of its own where its ``local`` part is a part of more.

    FSDP2's gradients are views of all that was reduced together. Returns the local part.
    """
    if local.untyped_storage().nbytes() <= local.nbytes or local_tensor(grad) is not local:
        return local
    put_local(grad, local.clone())
    return local_tensor(grad)


def put_local(tensor: Any, local: Tensor) -> None:
    """Puts another tensor in the place of a DTensor's local part."""
    tensor._local_tensor = local


def as_placed(param: Any, local: Tensor) -> Tensor:
    """Returns ``local`` as a DTensor of ``param``'s shape and placement, where it is a DTensor."""
    if not is_dtensor(param):
        return local
    return _placed(param, local, param.shape, param.stride())


def _placed(param: Any, local: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    )


# States in blocks: every process has blocks of its own shard.


def largest_shard(param: Any) -> int:
    """Returns how many elements the largest shard has, the same number in every process."""
    shards = _shards_along_dims(param)
    return math.prod(-(-size // n) for size, n in zip(param.shape, shards, strict=True))


def scale_shape(param: Any, block: int) -> torch.Size:
    """Returns the shape of the scales of all shards together, for blocks of ``block`` elements.

    Where all shards end with whole blocks, the blocks are those of the whole parameter: there is a
    scale for each, and any sharding that is as even can load them. Otherwise there is a row of
    scales for each shard, of which a smaller shard leaves some unused, and the shape says how the
    parameter is sharded.
    """
    largest, shards = largest_shard(param), _shards_along_dims(param)
    even = all(size % n == 0 for size, n in zip(param.shape, shards, strict=True))
    if even and largest % block == 0 and all(n == 1 for n in shards[1:]) and is_ordered(param):
        return torch.Size([param.numel() // block])
    return torch.Size([*shards, -(-largest // block)])


def is_ordered(param: Any) -> bool:
    """Whether the elements lie in memory in the order of their indices."""
    return local_tensor(param).is_contiguous()


def local_scale_shape(param: Any, block: int) -> torch.Size:
    """Returns the part of :func:`scale_shape` in each process."""
    shape = scale_shape(param, block)
    if len(shape) == 1:
        return torch.Size([largest_shard(param) // block])
    return torch.Size([1] * param.dim() + [shape[-1]])


def scale_as_placed(param: Any, local: Tensor) -> Tensor:
    """Returns this process's scales as a DTensor that is sharded as ``param``, where it is one."""
    if not is_dtensor(param):
        return local
    shards = _shards_along_dims(param)
    if local.dim() == 1:
        shape = torch.Size([math.prod(shards) * local.numel()])
    else:
        shape = torch.Size([*shards, local.size(-1)])
    return _placed(param, local, shape, torch.empty(shape, device="meta").stride())


def _shards_along_dims(param: Any) -> list[int]:
    """Returns the number of shards along each dimension of ``param``."""
    shards = [1] * param.dim()
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        dim = getattr(placement, "dim", None)  # a replica has none, nor a part of a sum
        if dim is not None:
            shards[dim] *= size
    return shards
