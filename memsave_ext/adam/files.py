"""``states_on=FOLDER``: optimizer states lie in a file between steps."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..store.file import File, Region
from ..store.folder import absolute_folder
from ..store.kept import SMALLEST
from .place import Fetched, Place

_KEPT = 1 << 27  # bytes; a buffer that is larger is made anew for each step
_PRETENDS = "_memsave_ext_in_file"  # an attribute of fake tensors


class Files(Place):
    """``states_on=FOLDER``: states of parameters on the CPU, in a file in the folder.

    A state is a tensor on mapped memory of the file. Steps read from the file and write to it: a
    page that was only mapped for a step would cost a page fault, which takes longer than to copy
    it.

    Raises:
        ValueError: ``folder`` is none, or the system is not Linux.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        must = "states_on must be None, 'cpu' or a folder that exists"
        self.folder = absolute_folder(folder, must)
        if sys.platform != "linux":
            raise ValueError(
                f"states_on={self.folder!r}: states can be kept in a folder on Linux only: leave "
                "states_on out"
            )
        self.file = File(self.folder, f"states_on={self.folder!r}", "optimizer states")
        self._regions: dict[int, Region] = {}  # what tensors have, by address
        self._spare: list[Tensor] = []  # a buffer, where no step has it
        # What was fetched after each region in the last step, by its offset.
        self._after: dict[int, list[Region]] = {}
        self._last: int | None = None
        _all_files.add(self)

    def __repr__(self) -> str:
        return repr(self.folder)

    def __reduce__(self) -> Any:  # a copy has a file of its own
        return Files, (self.folder,)

    def check(self, params: Iterable[Tensor]) -> None:
        for param in params:
            self._check_device(param.device)

    def _check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "meta"):
            raise ValueError(
                f"states_on={self.folder!r}: states can be kept in a folder only for parameters on "
                f"the CPU, got a parameter on {device}"
            )

    smallest = SMALLEST

    def takes(self, nbytes: int, device: torch.device) -> bool:
        return nbytes >= self.smallest

    def reserve(self, nbytes: Iterable[int]) -> None:
        self.file.reserve(size for size in nbytes if size >= self.smallest)

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not self._takes(tensor, device) or self.has(tensor):
            return tensor
        placed, region = self._make(tensor)
        with torch.no_grad():
            placed.copy_(tensor)
        region.is_zero = False
        region.unmap()
        return placed

    def zeros(self, like: Tensor, device: torch.device) -> Tensor:
        if not self._takes(like, device):
            zeros = torch.zeros_like(like, device=device)
            if isinstance(zeros, FakeTensor) and self.takes(zeros.nbytes, device):
                setattr(zeros, _PRETENDS, True)
            return zeros
        placed, region = self._make(like)
        if not region.is_zero:
            placed.zero_()
            region.unmap()
        return placed

    def _takes(self, tensor: Tensor, device: torch.device) -> bool:
        # A prediction's tensors have no memory that could lie elsewhere.
        if type(tensor) is not Tensor or device.type == "meta":
            return False
        self._check_device(device)
        return self.takes(tensor.nbytes, device)

    def _make(self, tensor: Tensor) -> tuple[Tensor, Region]:
        """Returns a tensor like this one, without its values."""
        region = self.file.take(tensor.nbytes)
        memory = region.memory(tensor.nbytes)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        weakref.finalize(memory, self._give_back, storage.data_ptr(), region).atexit = False
        strides = torch.empty_like(tensor, device="meta").stride()
        placed = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, strides)
        self._regions[storage.data_ptr()] = region
        return placed, region

    def fetch(self, state: Mapping[str, Tensor], device: torch.device) -> Fetched:
        if fakes := {n: torch.empty_like(t) for n, t in state.items() if hasattr(t, _PRETENDS)}:
            return Fetched({**state, **fakes})
        found = {name: self._region_of(tensor) for name, tensor in state.items()}
        regions = {name: region for name, region in found.items() if region is not None}
        if not regions:
            return Fetched(dict(state))
        self.file.check_process()
        self._read_ahead(list(regions.values()))
        return _FetchedFromFile(self, state, regions)

    def buffer(self, nbytes: int) -> Tensor:
        with contextlib.suppress(IndexError):
            if (spare := self._spare.pop()).nbytes >= nbytes:
                return spare
        return torch.empty(nbytes, dtype=torch.uint8)

    def buffers(self) -> list[Tensor]:
        return list(self._spare)

    def keep(self, buffer: Tensor) -> None:
        if buffer.nbytes <= _KEPT and not self._spare:
            self._spare.append(buffer)

    def descriptor(self) -> int:
        return self.file.descriptor()

    def _give_back(self, address: int, region: Region) -> None:
        del self._regions[address]
        self.file.free(region)

    def has(self, tensor: Tensor) -> bool:
        return self._region_of(tensor) is not None

    def _region_of(self, tensor: Tensor) -> Region | None:
        if type(tensor) is not Tensor or tensor.nbytes < self.smallest:
            return None
        return self._regions.get(tensor.data_ptr())

    def _read_ahead(self, regions: list[Region]) -> None:
        """Has the kernel read what is fetched next, as far as it is not in memory."""
        if self._last is not None:
            self._after[self._last] = regions
        self._last = regions[0].offset
        for region in self._after.get(self._last, ()):
            self.file.read_ahead(region)


_all_files: weakref.WeakSet[Files] = weakref.WeakSet()


def is_in_file(tensor: Tensor) -> bool:
    """Whether the memory of a state is a file's; of a prediction's, whether it would be."""
    return hasattr(tensor, _PRETENDS) or any(files.has(tensor) for files in _all_files)


def in_memory(states: Iterable[Tensor]) -> list[Tensor]:
    """Returns those of optimizers' states that take memory; of a prediction's, would take it."""
    if not _all_files:  # as most often: this is asked of all states in every step
        return list(states)
    return [tensor for tensor in states if not is_in_file(tensor)]


class _FetchedFromFile(Fetched):
    def __init__(
        self, files: Files, state: Mapping[str, Tensor], regions: Mapping[str, Region]
    ) -> None:
        super().__init__(dict(state))
        self.files, self._regions = files, regions
        self._buffer = files.buffer(sum(_room_of(state[name]) for name in regions))
        for name, region, part in self._parts():
            if region.is_zero:  # made for this step
                part.zero_()
                region.is_zero = False
            else:
                files.file.get(region, part)
            flat, like = part.view(state[name].dtype), state[name]
            self.state[name] = flat.as_strided(like.shape, like.stride())

    def write_back(self) -> None:
        for _, region, part in self._parts():
            self.files.file.put(region, part)
            region.unmap()  # where somebody has read the state meanwhile
        self.files.keep(self._buffer)

    def _parts(self) -> Iterator[tuple[str, Region, Tensor]]:
        start = 0
        for name, region in self._regions.items():
            tensor = self.state[name]
            yield name, region, self._buffer[start : start + tensor.nbytes]
            start += _room_of(tensor)


def _room_of(tensor: Tensor) -> int:
    """Returns the bytes that it takes in a buffer, where each begins in a cache line of its own."""
    return -(-tensor.nbytes // 64) * 64
