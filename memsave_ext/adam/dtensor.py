"""What the steps need of DTensors: the part of one that is in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def local_tensor(tensor: Any) -> Tensor:
    """The tensor itself, where it is none. Shares memory, and is no part of a graph."""
    local = getattr(tensor, "_local_tensor", tensor)
    if hasattr(local, "trigger_wait"):  # a collective is still to fill it
        local = local.wait()
    return local  # type: ignore[no-any-return]


@torch.no_grad()
def local_gradient(param: Any, grad: Any) -> Tensor:
    """Of a parameter's gradient, placed as the parameter is."""
    if is_dtensor(param) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


def as_placed(param: Any, local: Tensor) -> Tensor:
    """The tensor of ``param``'s shape and placement with this local part."""
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
