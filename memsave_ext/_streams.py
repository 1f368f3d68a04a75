"""Streams of CUDA devices in pure Python, as csrc/streams.h has them for the native part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The device's current stream; None for a CPU."""
    in_use = device.type == "cuda" and torch.cuda.is_initialized()
    return torch.cuda.current_stream(device) if in_use else None


def use_here(tensor: Tensor, made_on: torch.cuda.Stream | None) -> None:
    """Makes the current stream wait for the one that made the tensor.

    Its memory is not used again until the current stream is done with it.
    """
    current = current_stream(tensor.device)
    if made_on is None or current is None or made_on == current:
        return
    current.wait_stream(made_on)
    tensor.record_stream(current)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs the block on the stream, after what is queued on the current one.

    That one waits for the block, also where it raises. With None the block runs as it is.
    """
    if stream is None:
        yield
        return
    outer = torch.cuda.current_stream(stream.device)
    if outer != stream:
        stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        if outer != stream:
            outer.wait_stream(stream)
