"""``states_on="cpu"``: states of parameters on CUDA lie in pinned memory of the host between steps.

Copies each way have a stream of their own, so that both directions of the bus are in use. When a
parameter's states are fetched, those that were fetched next in the step before begin to be copied,
too. Memory on the device is of the stream that copies in, which waits for those that use it before
it is freed: two parameters have states there at a time, however far the host is ahead of the
device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import TensorWeakRef

from ..fakes.mode import is_cuda, predicts
from ..shared.dtensor import local_tensor
from ..store.host import copy_streams, pinned_like, refuse_capture
from ..store.kept import SMALLEST
from ..store.mapped import pretend, pretends
from .place import Fetched, Place


def _order(device: torch.device) -> None:
    """What is freed from now on is done with: stepped, and copied out."""
    into, out = copy_streams(device)
    into.wait_stream(torch.cuda.current_stream(device))
    into.wait_stream(out)


class _Copies:
    """A parameter's states on the device, and when they have arrived."""

    def __init__(self, there: Mapping[str, Tensor], device: torch.device) -> None:
        self.there = dict(there)
        self._versions = [tensor._version for tensor in there.values()]
        into = copy_streams(device).into
        with torch.cuda.stream(into):
            self.here = {
                name: torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
                for name, tensor in there.items()
            }
            self.arrived = into.record_event()

    def are_of(self, there: Mapping[str, Tensor]) -> bool:
        """Whether these are the states, and have not been written to since."""
        return self.there.keys() == there.keys() and all(
            tensor is there[name] and tensor._version == version
            for (name, tensor), version in zip(self.there.items(), self._versions, strict=True)
        )


class OnCpu(Place):
    """``states_on="cpu"``: states of parameters on a CPU are where they are."""

    def __init__(self) -> None:
        # By device: what is copied in ahead; what was fetched last; and what was after what.
        self._ahead: dict[torch.device, _Copies] = {}
        self._last: dict[torch.device, int] = {}
        self._after: dict[int, dict[str, TensorWeakRef]] = {}
        self._kept: dict[torch.device, list[_Copies]] = {}  # the last two
        self._fakes: list[dict[str, Tensor]] = []  # in a prediction, as many
        weakref.finalize(self, _free, self._kept).atexit = False

    @property
    def smallest(self) -> int:  # type: ignore[override]
        # A prediction's states are all on one device.
        return SMALLEST if predicts() else Place.smallest

    def __repr__(self) -> str:
        return "'cpu'"

    def __reduce__(self) -> tuple[type[OnCpu], tuple[()]]:  # streams and events are not copied
        return OnCpu, ()

    def check(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if (device := local_tensor(param).device).type not in ("cpu", "cuda", "meta"):
                raise ValueError(
                    "states_on='cpu' is only for parameters on CUDA devices and on the CPU, got a "
                    f"parameter on {device}: leave states_on out"
                )

    def takes(self, nbytes: int, device: torch.device) -> bool:
        return is_cuda(device) and nbytes >= SMALLEST

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        if type(tensor) is not Tensor or not self.takes(tensor.nbytes, device):
            return tensor
        if tensor.device.type == "cpu" and tensor.is_pinned():
            return tensor
        return pinned_like(tensor).copy_(tensor.detach())

    def zeros(self, like: Tensor, device: torch.device) -> Tensor:
        takes = self.takes(like.nbytes, device)
        if type(like) is Tensor and takes and not predicts():
            return pinned_like(like).zero_()
        zeros = torch.zeros_like(like, device=device)
        if takes and isinstance(zeros, FakeTensor):
            pretend(zeros)
        return zeros

    def fetch(self, state: Mapping[str, Tensor], device: torch.device) -> Fetched:
        if pretending := {name: tensor for name, tensor in state.items() if pretends(tensor)}:
            del self._fakes[:-1]
            self._fakes.append({name: torch.empty_like(t) for name, t in pretending.items()})
            return Fetched({**state, **self._fakes[-1]})
        there = {
            name: tensor
            for name, tensor in state.items()
            if tensor.device != device and self.takes(tensor.nbytes, device)
        }
        if not there:
            return Fetched(dict(state))
        refuse_capture("states_on='cpu'")
        copies = self._ahead.pop(device, None)
        if copies is None or not copies.are_of(there):
            copies = self._copy(there, device)
        torch.cuda.current_stream(device).wait_event(copies.arrived)
        fetched = _FetchedOnDevice(state, copies, device)
        self._copy_ahead(there, device)
        return fetched

    def _copy_ahead(self, there: dict[str, Tensor], device: torch.device) -> None:
        key = next(iter(there.values())).data_ptr()
        if (last := self._last.get(device)) is not None:
            self._after[last] = {name: TensorWeakRef(tensor) for name, tensor in there.items()}
        self._last[device] = key
        living = {name: after() for name, after in self._after.get(key, {}).items()}
        ahead = {name: tensor for name, tensor in living.items() if tensor is not None}
        if ahead and key != next(iter(ahead.values())).data_ptr():  # others than these
            self._ahead[device] = self._copy(ahead, device)

    def _copy(self, there: Mapping[str, Tensor], device: torch.device) -> _Copies:
        _order(device)
        kept = self._kept.setdefault(device, [])
        del kept[:-1]  # the last one may be in use
        kept.append(_Copies(there, device))
        return kept[-1]

    def wait(self) -> None:
        for device in self._last:
            copy_streams(device).out.synchronize()


def _free(kept: dict[torch.device, list[_Copies]]) -> None:
    for device, copies in kept.items():
        _order(device)
        copies.clear()


class _FetchedOnDevice(Fetched):
    def __init__(self, state: Mapping[str, Tensor], copies: _Copies, device: torch.device) -> None:
        super().__init__({**state, **copies.here})
        self._copies, self._device = copies, device

    def write_back(self) -> None:
        out = copy_streams(self._device).out
        out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(out), torch.no_grad():
            for name, tensor in self._copies.there.items():
                tensor.data.copy_(self._copies.here[name], non_blocking=True)
