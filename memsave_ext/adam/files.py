"""``states_on=FOLDER``: optimizer states lie in a file between steps."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .place import SMALLEST, Fetched, Place

_KEPT = 1 << 27  # bytes; a buffer that is larger is made anew for each step
_PAGE = mmap.PAGESIZE
_PRETENDS = "_memsave_ext_in_file"  # an attribute of fake tensors


@dataclass(eq=False)
class _Region:
    """A part of the file, at ``start`` of a mapping of it."""

    mapping: mmap.mmap
    start: int
    offset: int
    size: int  # whole pages
    is_zero: bool = True  # nothing has been written to it, nor read from it


class Files(Place):
    """``states_on=FOLDER``: states of parameters on the CPU, in a file in the folder.

    The file has no name from the moment on when it is opened, so that nothing is left of it when
    the process ends, however it does. Steps read from it and write to it, through the page cache:
    what is there and what is on the disk is the kernel's to decide. A page that was only mapped for
    a step would cost a page fault, which takes longer than to copy it.

    Raises:
        ValueError: ``folder`` is none, or the system is not Linux.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        if not os.path.isdir(folder):  # as "" is not
            raise ValueError(
                f"states_on must be None, 'cpu' or a folder that exists, got {os.fspath(folder)!r}"
            )
        if sys.platform != "linux":
            raise ValueError(f"states_on={self.folder!r}: a folder is for Linux alone")
        self._file: _Descriptor | None = None
        self._process = os.getpid()
        self._size = 0  # of the file
        self._room: list[_Region] = []  # what no tensor has had yet
        self._free: dict[int, list[_Region]] = {}  # what tensors have left, by size
        self._regions: dict[int, _Region] = {}  # what tensors have, by address
        self._spare: list[Tensor] = []  # a buffer, where no step has it
        # What was fetched after each region in the last step, by its offset.
        self._after: dict[int, list[_Region]] = {}
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
                f"states_on={self.folder!r}: a folder is for parameters on the CPU, got one on "
                f"{device}"
            )

    smallest = SMALLEST

    def takes(self, nbytes: int, device: torch.device) -> bool:
        return nbytes >= self.smallest

    def reserve(self, nbytes: Iterable[int]) -> None:
        sizes = Counter(_whole_pages(size) for size in nbytes if size >= self.smallest)
        for size, regions in list(self._free.items()):
            sizes[size] -= len(regions)
        needed = sum(size * count for size, count in sizes.items() if count > 0)
        if (more := needed - sum(region.size for region in self._room)) > 0:
            self._extend(more)

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not self._takes(tensor, device) or self.has(tensor):
            return tensor
        placed, region = self._make(tensor)
        with torch.no_grad():
            placed.copy_(tensor)
        region.is_zero = False
        _unmap(region)
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
            _unmap(region)
        return placed

    def _takes(self, tensor: Tensor, device: torch.device) -> bool:
        # A prediction's tensors have no memory that could lie elsewhere.
        if type(tensor) is not Tensor or device.type == "meta":
            return False
        self._check_device(device)
        return self.takes(tensor.nbytes, device)

    def _make(self, tensor: Tensor) -> tuple[Tensor, _Region]:
        """Returns a tensor like this one, without its values."""
        region = self._take(_whole_pages(tensor.nbytes))
        memory = memoryview(region.mapping)[region.start : region.start + tensor.nbytes]
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
        self._check_process()
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
        """Returns the file's, which is opened with the first use."""
        if self._file is None:
            try:
                number, name = tempfile.mkstemp(prefix="memsave_ext-states-", dir=self.folder)
                os.unlink(name)
            except OSError as error:
                raise self._failed(error, "cannot make a file") from None
            self._file = _Descriptor(number)
            weakref.finalize(self, self._file.close)
        if not self._file.is_open():
            raise RuntimeError(
                f"states_on={self.folder!r}: the file of optimizer states has been closed by the "
                "program, as os.closerange() does, and the states are lost"
            )
        return self._file.number

    def _failed(self, error: OSError, what: str) -> OSError:
        return OSError(error.errno, f"states_on={self.folder!r}: {what}: {error.strerror}")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"states_on={self.folder!r}: the optimizer was made before this process was "
                "forked, and both would write to one file. Make it in the process that trains."
            )

    def _extend(self, size: int) -> None:
        """Takes more of the disk, so that no step finds it full."""
        self._check_process()
        descriptor = self.descriptor()
        try:
            os.posix_fallocate(descriptor, self._size, size)
        except OSError as error:
            raise self._failed(error, f"no room for {size:,} bytes of optimizer states") from None
        mapping = mmap.mmap(descriptor, size, offset=self._size)
        self._room.append(_Region(mapping, 0, self._size, size))
        self._size += size

    def _take(self, size: int) -> _Region:
        with contextlib.suppress(LookupError):
            return self._free[size].pop()
        room = next((region for region in self._room if region.size >= size), None)
        if room is None:
            self._extend(size)
            room = self._room[-1]
        taken = _Region(room.mapping, room.start, room.offset, size)
        room.start, room.offset, room.size = room.start + size, room.offset + size, room.size - size
        if room.size == 0:
            self._room.remove(room)
        return taken

    def _give_back(self, address: int, region: _Region) -> None:
        del self._regions[address]
        region.is_zero = False
        self._free.setdefault(region.size, []).append(region)

    def has(self, tensor: Tensor) -> bool:
        return self._region_of(tensor) is not None

    def _region_of(self, tensor: Tensor) -> _Region | None:
        if type(tensor) is not Tensor or tensor.nbytes < self.smallest:
            return None
        return self._regions.get(tensor.data_ptr())

    def _read_ahead(self, regions: list[_Region]) -> None:
        """Has the kernel read what is fetched next, as far as it is not in memory."""
        if self._last is not None:
            self._after[self._last] = regions
        self._last = regions[0].offset
        for region in self._after.get(self._last, ()):
            os.posix_fadvise(self.descriptor(), region.offset, region.size, os.POSIX_FADV_WILLNEED)


class _Descriptor:
    """An open file, which the program may close unseen, and then open others by its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = self._there()

    def is_open(self) -> bool:
        return self._there() == self._file

    def close(self) -> None:
        if self.is_open():
            os.close(self.number)

    def _there(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self.number)
        except OSError:
            return None
        return found.st_dev, found.st_ino


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
        self, files: Files, state: Mapping[str, Tensor], regions: Mapping[str, _Region]
    ) -> None:
        super().__init__(dict(state))
        self._files, self._regions = files, regions
        self._buffer = files.buffer(sum(_room_of(state[name]) for name in regions))
        for name, region, part in self._parts():
            if region.is_zero:  # made for this step
                part.zero_()
                region.is_zero = False
            else:
                _transfer(os.preadv, files.descriptor(), part, region)
            flat, like = part.view(state[name].dtype), state[name]
            self.state[name] = flat.as_strided(like.shape, like.stride())

    def write_back(self) -> None:
        for _, region, part in self._parts():
            _transfer(os.pwritev, self._files.descriptor(), part, region)
            _unmap(region)  # where somebody has read the state meanwhile
        self._files.keep(self._buffer)

    def _parts(self) -> Iterator[tuple[str, _Region, Tensor]]:
        start = 0
        for name, region in self._regions.items():
            tensor = self.state[name]
            yield name, region, self._buffer[start : start + tensor.nbytes]
            start += _room_of(tensor)


def _room_of(tensor: Tensor) -> int:
    """Returns the bytes that it takes in a buffer, where each begins in a cache line of its own."""
    return -(-tensor.nbytes // 64) * 64


def _transfer(call: Any, descriptor: int, part: Tensor, region: _Region) -> None:
    memory = memoryview((ctypes.c_char * part.nbytes).from_address(part.data_ptr()))
    done = 0
    while done < len(memory):
        count = call(descriptor, [memory[done:]], region.offset + done)
        if count == 0:
            raise OSError("memsave_ext: the file of optimizer states has been cut")
        done += count


def _unmap(region: _Region) -> None:
    """Gives the memory of mapped pages back to the kernel, with what is in them."""
    region.mapping.madvise(mmap.MADV_DONTNEED, region.start, region.size)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
