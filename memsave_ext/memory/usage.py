"""How much memory a device holds now."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .tracking import running


@dataclass(frozen=True)
class Usage:
    """Bytes of tensors on a device.

    Attributes:
        allocated: held by tensors now.
        peak: the most there has been.
        reserved: held by CUDA's caching allocator, None on the CPU, which has none.
    """

    allocated: int
    peak: int
    reserved: int | None


def usage(device: torch.device | str | int | None = None) -> Usage:
    """Bytes that a device holds now and held at most.

    On CUDA these are the caching allocator's own figures, the peak since
    :func:`torch.cuda.reset_peak_memory_stats`. On the CPU torch keeps none: they are those of the
    outermost :func:`track` that runs in this process, since it began.

    Args:
        device: a CUDA device or the CPU. None: the current CUDA device where there is one and CUDA
            has been used, else the CPU.

    Raises:
        ValueError: another kind of device.
        RuntimeError: the CPU, and nothing tracks its memory.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type == "cuda":
        return Usage(
            allocated=torch.cuda.memory_allocated(chosen),
            peak=torch.cuda.max_memory_allocated(chosen),
            reserved=torch.cuda.memory_reserved(chosen),
        )
    if chosen.type != "cpu":
        raise ValueError(f"device must be a CUDA device or the CPU, got {chosen}")
    track = next((t for t in running() if t.device.type == "cpu"), None)
    if track is None:
        raise RuntimeError(
            "usage('cpu') knows no figures: torch keeps none for the CPU. Call it inside "
            "`with memsave_ext.memory.track():`, which counts from where it begins"
        )
    return Usage(allocated=track.live, peak=track.peak, reserved=None)
