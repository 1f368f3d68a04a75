"""``offload="cpu"``: a region's CUDA inputs wait for their recompute in pinned host memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class _OnCpu:
    copy: Tensor  # pinned
    device: torch.device
    copied: torch.cuda.Event


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _to_cpu(tensor: Tensor) -> Tensor | _OnCpu:
    if not tensor.is_cuda:
        return tensor
    stream = _copy_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
    # Its memory must not be handed out again before the copy has been made.
    tensor.record_stream(stream)
    return _OnCpu(copy, tensor.device, copied)


def _to_device(kept: Tensor | _OnCpu) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    torch.cuda.current_stream(kept.device).wait_event(kept.copied)
    return kept.copy.to(kept.device, non_blocking=True)


def keep_inputs_on_cpu() -> saved_tensors_hooks:
    """Saved-tensor hooks around a region. They see its inputs only: what the region saves goes to
    the region's own hooks."""
    return saved_tensors_hooks(_to_cpu, _to_device)
