"""Pinned memory of the host, which a CUDA device copies to and from while it goes on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
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


class Staging:
    """Two buffers of pinned memory, through which a CUDA device's memory goes to a file and back.

    While one is copied to or from the device, the other one is written to the disk or read from it.
    The host waits for the disk. A device has one of these (:func:`staging`), which threads take in
    turn, so that what is pinned does not grow with what is moved.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = copy_streams(device)
        self._buffers = [
            pinned_like(torch.empty(_PIECE, dtype=torch.uint8, device="cpu")) for _ in range(2)
        ]
        # By which the device has read the buffers.
        self._read: list[torch.cuda.Event | None] = [None, None]
        self._lock = threading.Lock()

    def write(self, values: Tensor, put: Callable[[Tensor, int], None]) -> None:
        """Copies a tensor of bytes out. Nothing of it is in use afterwards, also if ``put`` raises.

        Args:
            values: on the device, contiguous.
            put: called with bytes on the host, and where they are in ``values``.
        """
        out = self._streams.out
        with self._lock:
            out.wait_stream(torch.cuda.current_stream(values.device))
            copied: tuple[Tensor, int, torch.cuda.Event] | None = None
            try:
                for i, (piece, start) in enumerate(_pieces(values)):
                    buffer = self._free(i % 2, piece)
                    with torch.cuda.stream(out):
                        buffer.copy_(piece, non_blocking=True)
                        now = buffer, start, out.record_event()
                    if copied is not None:
                        _put(*copied, put)
                    copied = now
                if copied is not None:
                    _put(*copied, put)
            except BaseException:
                out.synchronize()  # with the copy of the piece after the one that was put
                raise

    def read(self, into: Tensor, get: Callable[[Tensor, int], None]) -> None:
        """Copies a tensor of bytes back, for use on the current stream.

        Args:
            into: on the device, contiguous.
            get: called with bytes on the host that it fills, and where these are in ``into``.
        """
        stream = torch.cuda.current_stream(into.device)
        with self._lock:
            for i, (piece, start) in enumerate(_pieces(into)):
                buffer = self._free(i % 2, piece)
                get(buffer, start)
                piece.copy_(buffer, non_blocking=True)
                self._read[i % 2] = stream.record_event()

    def _free(self, number: int, piece: Tensor) -> Tensor:
        if (read := self._read[number]) is not None:
            read.synchronize()
        return self._buffers[number][: piece.nbytes]


_PIECE = 1 << 24  # bytes of a buffer


@functools.cache
def staging(device: torch.device) -> Staging:
    return Staging(device)


def _pieces(tensor: Tensor) -> list[tuple[Tensor, int]]:
    return [(piece, i * _PIECE) for i, piece in enumerate(tensor.split(_PIECE))]


def _put(
    buffer: Tensor, start: int, copied: torch.cuda.Event, put: Callable[[Tensor, int], None]
) -> None:
    copied.synchronize()
    put(buffer, start)


def refuse_capture(name: str) -> None:
    """
    Raises:
        RuntimeError: a CUDA graph is being captured. ``name``: an option and its value.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: copies to and from the host cannot be captured in a CUDA graph: leave "
            f"{name.partition('=')[0]} out"
        )
