"""Tensors on managed memory of CUDA: the host's, which a device uses as its own."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Container, Iterable
from types import ModuleType

import torch
from torch import Tensor

from .host import copy_streams
from .mapped import add, is_plain, laid_on


class ManagedMemory:
    """Tensors on a CUDA device that lie in the host's memory, and on the device around their use.

    They are tensors as any other: kernels use them wherever they are, also while they are moved,
    and only time depends on that (CUDA C++ Programming Guide, "Unified Memory Programming").

    Args:
        native: the compiled module, where there is one with CUDA.
    """

    def __init__(self, native: ModuleType | None) -> None:
        self._native = native
        self._number = next(_numbers)
        self._largest = 0  # bytes that are used at once
        self._there: dict[torch.device, _There] = {}
        self._lock = threading.Lock()
        add(self)

    @property
    def room(self) -> int:
        """Bytes that stay on the device: of what is used, what was used before, and what comes."""
        return 3 * self._largest

    def reserve(self, _: Iterable[int]) -> None:
        """There is no room to be taken: the driver has pages as they are used."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Returns a tensor like this one, without its values.

        Raises:
            ValueError: the native part is not there, or the system has no such memory.
            RuntimeError: there is no room for it.
        """
        if self._native is None:
            raise ValueError("weights on CUDA can lie elsewhere with the native part only")
        memory = self._native.managed_memory(tensor.nbytes, tensor.device, self._number)
        return laid_on(memory.untyped_storage(), tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether it is one of these."""
        if self._native is None or not is_plain(tensor) or not tensor.is_cuda:
            return False
        owner: int = self._native.managed_owner(tensor)
        return owner == self._number

    def note(self, tensors: Iterable[Tensor]) -> None:
        """These are used at once."""
        self._largest = max(self._largest, sum(tensor.nbytes for tensor in tensors))

    def use(self, now: list[Tensor], later: list[Tensor]) -> None:
        """Has some of these tensors on the device for what is queued next on its current stream,
        and those that are used after them on their way. What was used long ago goes back."""
        if not (now or later) or torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            for device in dict.fromkeys(tensor.device for tensor in (*now, *later)):
                if device not in self._there:
                    self._there[device] = _There(device, self)
                self._there[device].use(_of(device, now), _of(device, later), self.room)

    def move(self, tensors: list[Tensor], stream: torch.cuda.Stream, *, to_device: bool) -> None:
        """Moves them, in the order of a stream."""
        assert self._native is not None
        with torch.cuda.stream(stream):
            self._native.move_managed(tensors, to_device)

    def let_go(self) -> None:
        """Has all of them in the host's memory again, once what is queued is done."""
        with self._lock:
            for there in self._there.values():
                there.send_back(0, ())


class _There:
    """What of one device's is on it."""

    def __init__(self, device: torch.device, memory: ManagedMemory) -> None:
        self._device, self._streams = device, copy_streams(device)
        self._memory = weakref.proxy(memory)
        # By address, the one used last at the end, with its size and the event after which it is
        # there.
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int, torch.cuda.Event]] = {}

    def use(self, now: list[Tensor], later: list[Tensor], room: int) -> None:
        into, current = self._streams.into, torch.cuda.current_stream(self._device)
        used = {tensor.data_ptr(): tensor for tensor in (*now, *later)}
        coming = [tensor for tensor in used.values() if not self._has(tensor)]
        if coming:
            # What went back before has left room; what goes now may go while this comes.
            into.wait_stream(self._streams.out)
            into.wait_stream(current)
            self.send_back(room - sum(tensor.nbytes for tensor in coming), used)
        for tensor in coming:
            self._memory.move([tensor], into, to_device=True)
            entry = weakref.ref(tensor), tensor.nbytes, into.record_event()
            self._tensors[tensor.data_ptr()] = entry
        for address in used:
            self._tensors[address] = self._tensors.pop(address)
        for tensor in now:
            current.wait_event(self._tensors[tensor.data_ptr()][2])

    def _has(self, tensor: Tensor) -> bool:
        entry = self._tensors.get(tensor.data_ptr())
        return entry is not None and entry[0]() is tensor

    def send_back(self, room: int, kept: Container[int]) -> None:
        """Has what was used long ago go back, until no more than so many bytes are left.

        ``kept``: addresses of what stays.
        """
        left = sum(size for _, size, _ in self._tensors.values())
        going = []
        for address, (reference, size, _) in list(self._tensors.items()):
            if left <= room:
                break
            if address in kept:
                continue
            left -= size
            del self._tensors[address]
            tensor = reference()
            if tensor is not None and self._memory.has(tensor) and tensor.data_ptr() == address:
                going.append(tensor)
        if going:
            self._streams.out.wait_stream(torch.cuda.current_stream(self._device))
            self._memory.move(going, self._streams.out, to_device=False)


_numbers = itertools.count(1)


def _of(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.device == device]
