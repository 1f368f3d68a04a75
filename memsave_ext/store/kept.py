"""Tensors whose values lie elsewhere, in a file or in pinned memory of the host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .file import File, Region
from .host import copy_streams, refuse_capture

SMALLEST = 1 << 16  # bytes; smaller tensors stay in memory, of which they are little


class Kept:
    """The values of one tensor. Their room is given back when this object goes.

    Both methods take a contiguous tensor of bytes, on the device of the one that is kept.
    """

    def write(self, values: Tensor) -> None:
        """Keeps these."""

    def read(self, into: Tensor) -> None:
        """Copies them into memory here."""

    def read_ahead(self) -> None:
        """Says that they are read soon."""


class Keeper:
    """A place for values of tensors.

    Args:
        name: what errors begin with, an option and its value: ``grads_on='cpu'``.
        devices: types of those whose tensors it takes.
    """

    copies_later = False  # whether keep() may return before the values have been read

    def __init__(self, name: str, *devices: str) -> None:
        self.name, self._devices = name, devices

    def check(self, params: Iterable[Tensor]) -> None:
        """Raises ValueError where the tensors of such parameters cannot lie there."""
        for param in params:
            if param.device.type not in (*self._devices, "meta"):
                option, _, value = self.name.partition("=")
                raise ValueError(
                    f"{option} must be 'cpu' or a folder for parameters on a CUDA device and a "
                    f"folder for those on the CPU, got {value} and a parameter on {param.device}"
                )

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Makes room for as many bytes as these tensors have, or raises OSError."""

    def keep(self, values: Tensor) -> Kept:
        """Keeps the values of a contiguous tensor of bytes."""
        if isinstance(values, FakeTensor):  # a prediction's has none
            return Kept()
        kept = self._room(values)
        kept.write(values)
        return kept

    def _room(self, values: Tensor) -> Kept:
        raise NotImplementedError


class FileKeeper(Keeper):
    """Keeps values of tensors on the CPU and on CUDA devices in a file without a name."""

    def __init__(self, folder: str, name: str, content: str) -> None:
        super().__init__(name, "cpu", "cuda")
        self._file = File(folder, name, content)
        self._lock = threading.RLock()  # taken again by what the garbage collector frees

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        sizes = [tensor.nbytes for tensor in tensors if tensor.nbytes >= SMALLEST]
        with self._lock:
            self._file.reserve(sizes)

    def _room(self, values: Tensor) -> Kept:
        self._file.check_process()
        with self._lock:
            region = self._file.take(values.nbytes)
        return _InFile(self, region)

    def give_back(self, region: Region) -> None:
        with self._lock:
            self._file.free(region)


class _InFile(Kept):
    def __init__(self, keeper: FileKeeper, region: Region) -> None:
        self._file, self._region, self._name = keeper._file, region, keeper.name
        weakref.finalize(self, keeper.give_back, region).atexit = False

    def write(self, values: Tensor) -> None:
        self._check(values)
        self._file.put(self._region, values)

    def read(self, into: Tensor) -> None:
        self._check(into)
        self._file.get(self._region, into)

    def read_ahead(self) -> None:
        self._file.read_ahead(self._region)

    def _check(self, tensor: Tensor) -> None:
        self._file.check_process()
        if tensor.is_cuda:
            refuse_capture(self._name)


class HostKeeper(Keeper):
    """Keeps values of tensors on CUDA devices in pinned memory of the host."""

    copies_later = True

    def __init__(self, name: str) -> None:
        super().__init__(name, "cuda")

    def _room(self, values: Tensor) -> Kept:
        refuse_capture(self.name)
        return _InHostMemory(self.name, values)


class _InHostMemory(Kept):
    def __init__(self, name: str, like: Tensor) -> None:
        self._name = name
        self._there = torch.empty(like.nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._streams = copy_streams(like.device)
        self._written = torch.cuda.Event()

    def write(self, values: Tensor) -> None:
        refuse_capture(self._name)
        out = self._streams.out
        out.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(out):
            self._there.copy_(values, non_blocking=True)
            self._written.record(out)
        values.record_stream(out)

    def read(self, into: Tensor) -> None:
        refuse_capture(self._name)
        torch.cuda.current_stream(into.device).wait_event(self._written)
        into.copy_(self._there, non_blocking=True)
