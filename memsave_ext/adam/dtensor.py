"""Access to a DTensor's local part, the shard in this process, which is what steps work on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    """Returns the local part of the gradient, redistributed to ``param``'s placement."""
    if is_dtensor(param) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


def as_placed(param: Any, local: Tensor) -> Tensor:
    """Returns ``local`` as a DTensor of ``param``'s shape and placement, where it is a DTensor."""
    if not is_dtensor(param):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
