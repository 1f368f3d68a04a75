"""``offload="cpu"``: a region's CUDA inputs wait for their recompute in pinned host memory.

Copies both ways run on a stream of their own. What comes after a region waits for those of its
inputs, as it may write them. When a region asks for its inputs, those of the
region before it, which backward comes to next, begin to be copied back as well. No other region has
inputs on the device then, whatever order backward takes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..store.host import pinned_like
from . import errors


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _OnCpu:
    def __init__(self, tensor: Tensor, inputs: _Inputs) -> None:
        self._back: tuple[Tensor, torch.cuda.Event] | None = None  # and when it has arrived
        self.device, self.shape, self.inputs = tensor.device, list(tensor.shape), inputs
        self.is_changed = False  # by the region, while it was copied
        # That of the region, on which it is recomputed.
        self._stream = torch.cuda.current_stream(self.device)
        self._copies = _copy_stream(self.device)
        self._copies.wait_stream(self._stream)
        with torch.cuda.stream(self._copies):
            # torch keeps pinned memory that is freed, for the next ones.
            self._copy = pinned_like(tensor)
            self._copy.copy_(tensor, non_blocking=True)

    @property
    def is_on_device(self) -> bool:
        return self._back is not None

    def copy_back(self) -> None:
        # Memory of the region's stream, which is handed out in the order of its work: however far
        # the host is ahead of the device, it gets there what earlier regions have freed.
        with torch.cuda.stream(self._stream):
            tensor = torch.empty_like(self._copy, device=self.device)
        self._copies.wait_stream(self._stream)
        with torch.cuda.stream(self._copies):
            tensor.copy_(self._copy, non_blocking=True)
            self._back = tensor, self._copies.record_event()

    def take(self) -> Tensor:
        assert self._back is not None
        (tensor, arrived), self._back = self._back, None
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        if current != self._stream:
            tensor.record_stream(current)
        return tensor

    def drop(self) -> None:
        if self._back is not None:
            # The region's stream has not waited for the copy.
            self._back[0].record_stream(self._copies)
            self._back = None

    def __del__(self) -> None:
        self.drop()


class _Inputs:
    """A region's inputs on one device, as long as autograd keeps them."""

    def __init__(self, before: weakref.ref[_Inputs] | None) -> None:
        self.before = before  # the region whose forward was before this one's
        self._kept: list[weakref.ref[_OnCpu]] = []

    def add(self, kept: _OnCpu) -> None:
        self._kept.append(weakref.ref(kept))

    def copy_back(self) -> None:
        for reference in self._kept:
            kept = reference()
            if kept is not None and not kept.is_on_device:
                kept.copy_back()

    def drop(self) -> None:
        for reference in self._kept:
            kept = reference()
            if kept is not None:
                kept.drop()


class _Regions:
    """Of a device: the one that backward is expected to come to next, and which have inputs there.

    A region that is run in the recompute of another comes after the one before that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: weakref.ref[_Inputs] | None = None
        self._on_device: list[weakref.ref[_Inputs]] = []

    def begin(self) -> _Inputs:
        with self._lock:
            self._leave([])
            inputs = _Inputs(self._next)
            self._next = weakref.ref(inputs)
            return inputs

    def open(self, kept: _OnCpu) -> Tensor:
        inputs = kept.inputs
        with self._lock:
            self._next = inputs.before
            before = inputs.before() if inputs.before is not None else None
            if torch.cuda.is_current_stream_capturing():
                before = None  # a capture must not end with a copy for which nobody waits
            self._leave([inputs] if before is None else [inputs, before])
            if not kept.is_on_device:  # all of them, before those of the other region
                inputs.copy_back()
            if before is not None:
                before.copy_back()
            return kept.take()

    def _leave(self, these: list[_Inputs]) -> None:
        for reference in self._on_device:
            inputs = reference()
            if inputs is not None and inputs not in these:
                inputs.drop()
        self._on_device = [weakref.ref(inputs) for inputs in these]


@functools.cache
def _regions(device: torch.device) -> _Regions:
    return _Regions()


@contextlib.contextmanager
def keep_inputs_on_cpu() -> Iterator[None]:
    """Saved-tensor hooks around a region. They see its inputs only: what the region saves goes to
    the region's own hooks."""
    of_region: dict[torch.device, _Inputs] = {}
    versions: list[tuple[_OnCpu, Tensor, int]] = []  # no input is freed before it is copied

    def to_cpu(tensor: Tensor) -> Tensor | _OnCpu:
        if not tensor.is_cuda:
            return tensor
        if tensor.device not in of_region:
            of_region[tensor.device] = _regions(tensor.device).begin()
        inputs = of_region[tensor.device]
        kept = _OnCpu(tensor, inputs)
        inputs.add(kept)
        versions.append((kept, tensor, tensor._version))
        return kept

    try:
        with saved_tensors_hooks(to_cpu, _to_device):
            yield
    finally:  # what comes next there may write an input, or be given its memory
        for device in of_region:
            torch.cuda.current_stream(device).wait_stream(_copy_stream(device))
        for kept, tensor, version in versions:
            kept.is_changed = tensor._version != version
        versions.clear()  # the graph keeps both hooks


def _to_device(kept: Tensor | _OnCpu) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.is_changed:
        raise errors.offloaded_changed(kept.shape)
    return _regions(kept.device).open(kept)
