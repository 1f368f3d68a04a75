"""How much memory a device holds now."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..shared.checks import checked_device
from .tracking import running


@dataclass(frozen=True)
class Usage:
    """How many bytes a device holds.

    Attributes:
        allocated: bytes held by tensors now.
        peak: the most bytes that tensors have held at once.
        reserved: bytes held by CUDA's caching allocator; None on the CPU, which has none.
    """

    allocated: int
    peak: int
    reserved: int | None


def usage(device: torch.device | str | int | None = None) -> Usage:
    """Returns how many bytes a device holds now, and the most it has held.

    On CUDA these are the caching allocator's own figures; the peak counts from the last
    :func:`torch.cuda.reset_peak_memory_stats`. For the CPU torch keeps no figures: they are those
    of the outermost :func:`track` that runs in this process, counted from where it began.

    Args:
        device: a CUDA device or the CPU. None: the current CUDA device if CUDA has been used in
            this process, else the CPU.

    Raises:
        ValueError: ``device`` is of another kind.
        RuntimeError: the device is the CPU and no :func:`track` of it runs.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    where = torch.device("cuda", device) if isinstance(device, int) else device
    chosen = checked_device("usage", where)
    if chosen.type == "cuda":
        return Usage(
            allocated=torch.cuda.memory_allocated(chosen),
            peak=torch.cuda.max_memory_allocated(chosen),
            reserved=torch.cuda.memory_reserved(chosen),
        )
    track = next((t for t in running() if t.device.type == "cpu"), None)
    if track is None:
        raise RuntimeError(
            "usage('cpu'): torch keeps no figures of the CPU's memory. Call it inside `with "
            "memsave_ext.memory.track():`, which counts from its beginning"
        )
    return Usage(allocated=track.live, peak=track.peak, reserved=None)
