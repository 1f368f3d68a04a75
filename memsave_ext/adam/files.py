"""``states_on=FOLDER``: optimizer states lie in a file between steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor

from ..elsewhere.gradient import is_dense
from ..store.file import Region
from ..store.folder import absolute_folder
from ..store.host import refuse_capture
from ..store.kept import SMALLEST
from ..store.mapped import MappedFile, pretend, pretends
from .place import Fetched, Place

_KEPT = 1 << 27  # bytes; a buffer that is larger is made anew for each step


class Files(Place):
    """``states_on=FOLDER``: states lie in a file in the folder.

    A state is a tensor on mapped memory of the file. Steps read from the file and write to it: a
    page that was only mapped for a step would cost a page fault, which takes longer than to copy
    it. Of a parameter on CUDA a step has the state on the device.

    Raises:
        ValueError: ``folder`` is none, or the system is not Linux.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        must = "states_on must be None, 'cpu' or a folder that exists"
        self.folder = absolute_folder(folder, must)
        name = f"states_on={self.folder!r}"
        self._mapped = MappedFile(self.folder, name, "optimizer states")
        self.file = self._mapped.file
        self._spare: list[Tensor] = []  # a buffer, where no step has it
        # What was fetched after each region in the last step, by its offset.
        self._after: dict[int, list[Region]] = {}
        self._last: int | None = None

    def __repr__(self) -> str:
        return repr(self.folder)

    def __reduce__(self) -> Any:  # a copy has a file of its own
        return Files, (self.folder,)

    def check(self, params: Iterable[Tensor]) -> None:
        for param in params:
            self._check_device(param.device)

    def _check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(
                f"states_on={self.folder!r}: states can be kept in a folder only for parameters on "
                f"the CPU and on CUDA devices, got a parameter on {device}"
            )

    smallest = SMALLEST

    def takes(self, nbytes: int, device: torch.device) -> bool:
        return nbytes >= self.smallest

    def reserve(self, nbytes: Iterable[int]) -> None:
        self.file.reserve(size for size in nbytes if size >= self.smallest)

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not self._takes(tensor, device) or self.has(tensor):
            return tensor
        placed, region = self._made_like(tensor)
        with torch.no_grad():
            placed.copy_(tensor)
        region.is_zero = False
        region.unmap()
        return placed

    def zeros(self, like: Tensor, device: torch.device) -> Tensor:
        if not self._takes(like, device):
            zeros = torch.zeros_like(like, device=device)
            if isinstance(zeros, FakeTensor) and self.takes(zeros.nbytes, device):
                pretend(zeros)
            return zeros
        placed, region = self._made_like(like)
        if not region.is_zero:
            placed.zero_()
            region.unmap()
        return placed

    def _made_like(self, tensor: Tensor) -> tuple[Tensor, Region]:
        placed = self._mapped.empty_like(tensor)
        region = self._mapped.region_of(placed)
        assert region is not None
        return placed, region

    def _takes(self, tensor: Tensor, device: torch.device) -> bool:
        # A prediction's tensors have no memory that could lie elsewhere.
        if type(tensor) is not Tensor or device.type == "meta":
            return False
        self._check_device(device)
        return self.takes(tensor.nbytes, device)

    @_disable_dynamo  # a hook calls it, as make_state()
    def fetch(self, state: Mapping[str, Tensor], device: torch.device) -> Fetched:
        if pretended := [name for name, tensor in state.items() if pretends(tensor)]:
            return _InBuffer(self, state, pretended, device)
        found = {name: self._region_of(tensor) for name, tensor in state.items()}
        regions = {name: region for name, region in found.items() if region is not None}
        if not regions:
            return Fetched(dict(state))
        self.file.check_process()
        if device.type == "cuda":
            refuse_capture(f"states_on={self.folder!r}")
        self._read_ahead(list(regions.values()))
        return _FetchedFromFile(self, state, regions, device)

    def buffer(self, nbytes: int, device: torch.device) -> Tensor:
        if device.type == "cuda":  # whose allocator has what was freed
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        with contextlib.suppress(IndexError):
            if (spare := self._spare.pop()).nbytes >= nbytes:
                return spare
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def buffers(self) -> list[Tensor]:
        return list(self._spare)

    def keep(self, buffer: Tensor) -> None:
        if not buffer.is_cuda and buffer.nbytes <= _KEPT and not self._spare:
            self._spare.append(buffer)

    def has(self, tensor: Tensor) -> bool:
        return tensor.nbytes >= self.smallest and self._mapped.has(tensor)

    def _region_of(self, tensor: Tensor) -> Region | None:
        """Returns where the bytes of a state are; None for one that is not all of a piece of
        memory, which is used where it is mapped."""
        is_piece = tensor.is_contiguous() or is_dense(tensor)
        return self._mapped.region_of(tensor) if is_piece and self.has(tensor) else None

    def _read_ahead(self, regions: list[Region]) -> None:
        """Has the kernel read what is fetched next, as far as it is not in memory."""
        if self._last is not None:
            self._after[self._last] = regions
        self._last = regions[0].offset
        for region in self._after.get(self._last, ()):
            self.file.read_ahead(region)


class _InBuffer(Fetched):
    """States of these names lie in a buffer for a step; of a prediction's there is no more."""

    def __init__(
        self,
        files: Files,
        state: Mapping[str, Tensor],
        names: Iterable[str],
        device: torch.device,
    ) -> None:
        super().__init__(dict(state))
        self.files = files
        like = {name: state[name] for name in names}
        self._buffer = files.buffer(sum(map(_room_of, like.values())), device)
        self._parts: dict[str, Tensor] = {}
        start = 0
        for name, tensor in like.items():
            part = self._parts[name] = self._buffer[start : start + tensor.nbytes]
            flat = part.view(tensor.dtype)
            self.state[name] = flat.as_strided(tensor.shape, tensor.stride())
            start += _room_of(tensor)

    @_disable_dynamo  # a hook calls it, as make_state()
    def write_back(self) -> None:
        self.files.keep(self._buffer)


class _FetchedFromFile(_InBuffer):
    def __init__(
        self,
        files: Files,
        state: Mapping[str, Tensor],
        regions: Mapping[str, Region],
        device: torch.device,
    ) -> None:
        super().__init__(files, state, regions, device)
        self._regions = regions
        for name, region in regions.items():
            if region.is_zero:  # made for this step
                self._parts[name].zero_()
                region.is_zero = False
            else:
                files.file.get(region, self._parts[name])

    @_disable_dynamo  # a hook calls it, as make_state()
    def write_back(self) -> None:
        for name, region in self._regions.items():
            self.files.file.put(region, self._parts[name])
            region.unmap()  # where somebody has read the state meanwhile
        super().write_back()


def _room_of(tensor: Tensor) -> int:
    """Returns the bytes that it takes in a buffer, where each begins in a cache line of its own."""
    return -(-tensor.nbytes // 64) * 64
