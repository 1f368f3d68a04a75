"""Pinned memory of the host, which a CUDA device copies to and from while it goes on."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class CopyStreams(NamedTuple):
    """One for each direction of the bus, so that both are in use."""

    into: torch.cuda.Stream
    out: torch.cuda.Stream


@functools.cache
def copy_streams(device: torch.device) -> CopyStreams:
    return CopyStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def pinned_like(tensor: Tensor) -> Tensor:
    """Returns memory of the host without values, with the tensor's shape, strides and dtype."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
