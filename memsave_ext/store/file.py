"""A file that nobody else sees, and which of its parts are taken.

csrc/store/file.cpp is the same for memory that the native part moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .host import staging

_PAGE = mmap.PAGESIZE
_MOST_AHEAD = 1 << 30  # bytes


@dataclass(eq=False)
class Region:
    """A part of a file, at ``start`` of a mapping of it."""

    mapping: mmap.mmap
    start: int
    offset: int
    size: int  # whole pages
    is_zero: bool = True  # nothing has been written to it, nor read from it

    def memory(self, nbytes: int) -> memoryview:
        """Returns its first bytes, mapped."""
        return memoryview(self.mapping)[self.start : self.start + nbytes]

    def read_ahead(self) -> None:
        """Has the kernel read what is not in memory, for who uses the mapping."""
        self.mapping.madvise(mmap.MADV_WILLNEED, self.start, self.size)

    def unmap(self) -> None:
        """Gives the memory of mapped pages back to the kernel, with what is in them."""
        self.mapping.madvise(mmap.MADV_DONTNEED, self.start, self.size)


class File:
    """A file in a folder, which is opened when it is first used.

    It has no name from the moment on when it is opened, so that nothing is left of it when the
    process ends, however it does. It is read and written through the page cache: what is there and
    what is on the disk is the kernel's to decide.

    Args:
        folder: where it is.
        name: what errors begin with.
        content: what is in it, for errors.
    """

    def __init__(self, folder: str, name: str, content: str) -> None:
        self._folder, self._name, self._content = folder, name, content
        self._opened: _Descriptor | None = None
        self._process = os.getpid()
        self._size = 0
        self._room: list[Region] = []  # what was taken of the disk ahead
        self._free: dict[int, list[Region]] = {}  # what was reserved or given back, by size

    def reserve(self, nbytes: Iterable[int]) -> None:
        """Takes room on the disk for so many bytes each, beyond what is taken now.

        Raises:
            OSError: the disk is full.
        """
        free = {size: len(regions) for size, regions in list(self._free.items())}
        missing = []
        for size in map(_whole_pages, nbytes):
            if free.get(size, 0) > 0:
                free[size] -= 1
            else:
                missing.append(size)
        if not missing:
            return
        room = self._extend(sum(missing))
        # Cut at once: cut when they are taken, large ones would find what small ones have left.
        cut = [_cut(room, size) for size in missing]
        for region in reversed(cut):  # the first one is taken first
            self._free.setdefault(region.size, []).append(region)

    def take(self, nbytes: int) -> Region:
        """Returns a region of at least so many bytes.

        Raises:
            OSError: the disk is full.
        """
        size = _whole_pages(nbytes)
        with contextlib.suppress(LookupError):
            return self._free[size].pop()
        room = next((region for region in self._room if region.size >= size), None)
        if room is None:
            room = self._extend_ahead(size)
            self._room.append(room)
        taken = _cut(room, size)
        if room.size == 0:
            self._room.remove(room)
        return taken

    def free(self, region: Region) -> None:
        """Gives a region back, to be taken again."""
        region.is_zero = False
        self._free.setdefault(region.size, []).append(region)

    def get(self, region: Region, into: Tensor) -> None:
        """Reads a region into a contiguous tensor of bytes, on the CPU or a CUDA device."""
        if into.is_cuda:
            staging(into.device).read(into, partial(self._transfer, os.preadv, region))
        else:
            self._transfer(os.preadv, region, into)

    def put(self, region: Region, values: Tensor) -> None:
        """Writes a contiguous tensor of bytes to a region, from the CPU or a CUDA device."""
        if values.is_cuda:
            staging(values.device).write(values, partial(self._transfer, os.pwritev, region))
        else:
            self._transfer(os.pwritev, region, values)

    def read_ahead(self, region: Region) -> None:
        """Has the kernel read what is not in memory of a region."""
        os.posix_fadvise(self.descriptor(), region.offset, region.size, os.POSIX_FADV_WILLNEED)

    def descriptor(self) -> int:
        """Returns the open file's.

        Raises:
            OSError: no file can be made in the folder.
            RuntimeError: the program has closed it.
        """
        if self._opened is None:
            try:
                number, path = tempfile.mkstemp(prefix="memsave_ext-", dir=self._folder)
                os.unlink(path)
            except OSError as error:
                raise self._failed(error, "cannot make a file") from None
            self._opened = _Descriptor(number)
            weakref.finalize(self, self._opened.close)
        if not self._opened.is_open():
            raise RuntimeError(
                f"{self._name}: the file of {self._content} has been closed by the program, as "
                "os.closerange() does, and its contents are lost"
            )
        return self._opened.number

    def check_process(self) -> None:
        """
        Raises:
            RuntimeError: this process was forked since it was made.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self._name}: the file of {self._content} was made before this process was "
                "forked, and both processes would write to it. Make the object that owns it in the "
                "process that trains."
            )

    def _extend_ahead(self, size: int) -> Region:
        """Takes so much more, and where there is room as much again as there is, for parts of this
        size: each mapping has a descriptor of its own, of which a process has some thousand."""
        ahead = min(self._size, _MOST_AHEAD) // size * size
        if ahead > size:
            with contextlib.suppress(OSError):
                return self._extend(ahead)
        return self._extend(size)

    def _extend(self, size: int) -> Region:
        """Takes more of the disk, so that no later write finds it full."""
        self.check_process()
        descriptor = self.descriptor()
        fails = f"no room for {size:,} bytes of {self._content}"
        try:
            os.posix_fallocate(descriptor, self._size, size)
            fails = f"cannot map {self._content}"
            mapping = mmap.mmap(descriptor, size, offset=self._size)
        except OSError as error:
            with contextlib.suppress(OSError):  # ext4 keeps what it has found until it was full
                os.ftruncate(descriptor, self._size)
            raise self._failed(error, fails) from None
        made = Region(mapping, 0, self._size, size)
        self._size += size
        return made

    def _failed(self, error: OSError, what: str) -> OSError:
        return OSError(error.errno, f"{self._name}: {what}: {error.strerror}")

    def _transfer(
        self, call: Callable[..., int], region: Region, tensor: Tensor, start: int = 0
    ) -> None:
        descriptor = self.descriptor()
        memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        done = 0
        while done < len(memory):
            try:
                count = call(descriptor, [memory[done:]], region.offset + start + done)
            except OSError as error:
                raise self._failed(error, f"cannot read or write {self._content}") from None
            if count == 0:
                raise OSError(
                    f"{self._name}: the file of {self._content} has been cut short by another "
                    "program, and its contents are lost"
                )
            done += count


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


def _cut(room: Region, size: int) -> Region:
    """Returns the first part of ``room``, which begins behind it then."""
    taken = Region(room.mapping, room.start, room.offset, size)
    room.start, room.offset, room.size = room.start + size, room.offset + size, room.size - size
    return taken


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
