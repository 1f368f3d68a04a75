"""What a batch norm did in the forward of a region, found again in its recompute."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..checkpointing import tapes

# On a tape: all calls in their order, beside those of each module under a reference to it. In the
# positions of a recompute: how many calls it made, and which records they took, for which module.
_CALLS = "batch norm calls"
_TAKEN = "batch norm calls taken"
_PARAMETERS = "weight", "bias"


class Tensors(NamedTuple):
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


class Settings(NamedTuple):
    """What a call depends on beside them. The recompute's are those of the forward."""

    training: bool  # statistics of the batch
    eps: float
    activation: str
    negative_slope: float
    group: str | None  # of processes that share statistics


@dataclass(slots=True, eq=False)
class Record:
    """One call in a forward."""

    kind: type[_BatchNorm]
    statistics: Tensor
    settings: Settings
    shape: torch.Size
    dtype: torch.dtype
    parameters: tuple[_Parameter, ...]

    @staticmethod
    def of(module: _BatchNorm, tensors: Tensors, statistics: Tensor, settings: Settings) -> Record:
        parameters = tuple(_Parameter.of(module, n, getattr(tensors, n)) for n in _PARAMETERS)
        input = tensors.input
        return Record(type(module), statistics, settings, input.shape, input.dtype, parameters)

    def fits(self, module: _BatchNorm, input: Tensor) -> bool:
        return self.kind is type(module) and self.shape == input.shape and self.dtype == input.dtype


def find(module: _BatchNorm, tensors: Tensors, replay: tapes.Replay | None) -> Record | None:
    """What the forward recorded for this call of its recompute, where this is one.

    Calls of a module that the forward called, too, are matched in their order. One that it did not
    was made inside the function, as another was in the forward: its call is that of the same place
    among the calls of all modules.
    """
    if replay is None:
        return None
    tape, positions, is_complete = replay
    reference = weakref.ref(module)
    own = tape.get(reference)
    if own is None and not module.training and not is_complete:
        return None  # in eval mode its forward was not recorded
    place = positions.get(_CALLS, 0)
    positions[_CALLS] = place + 1
    taken: dict[Record, object] = positions.setdefault(_TAKEN, {})
    calls = tape.get(_CALLS, ())[place : place + 1] if own is None else own
    free = (r for r in calls if r not in taken and r.fits(module, tensors.input))
    record: Record | None = next(free, None)
    if record is None:
        if any(taken.get(r, reference) is not reference for r in calls):
            raise RuntimeError(
                f"{type(module).__name__}: the recompute of a checkpointed region calls its batch "
                "norms in another order than the forward did, so that their statistics cannot be "
                "told apart. The function must do the same each time it is called."
            )
        return None
    taken[record] = reference
    if own is not None:
        for name, parameter in zip(_PARAMETERS, record.parameters, strict=True):
            parameter.check(module, name, getattr(tensors, name))
    return record


def keep(module: _BatchNorm, record: Record, recording: list[tapes.Tape]) -> None:
    for tape in recording:
        tape.setdefault(weakref.ref(module), []).append(record)
        tape.setdefault(_CALLS, []).append(record)


class _Parameter(NamedTuple):
    """The weight or bias that a forward used."""

    reference: weakref.ref[Tensor] | None
    version: int
    storage: int
    is_own: bool

    @staticmethod
    def of(module: _BatchNorm, name: str, tensor: Tensor | None) -> _Parameter:
        reference = None if tensor is None else weakref.ref(tensor)
        return _Parameter(
            reference, _version(tensor), _storage(tensor), _is_own(module, name, tensor)
        )

    def check(self, module: _BatchNorm, name: str, tensor: Tensor | None) -> None:
        if tensor is None or self.reference is None:
            same = tensor is None and self.reference is None
        else:
            same = tensor is self.reference()
        if same and self.version != _version(tensor):
            raise RuntimeError(
                f"{type(module).__name__}: {name} has been modified by an inplace operation "
                "between the forward of a checkpointed region and its recompute: it is at version "
                f"{_version(tensor)}, the forward used version {self.version}. The recompute would "
                "differentiate another function. An optimizer that steps in backward does this to "
                "a layer that is used in several regions."
            )
        # One that is computed anew (parametrizations), or gathered anew (FSDP), is another tensor
        # each time, and the recompute goes through the one it finds.
        if same:
            replaced = self.storage != _storage(tensor)
        else:
            replaced = self.is_own and _is_own(module, name, tensor)
        if replaced:
            raise RuntimeError(
                f"{type(module).__name__}: {name} has been replaced between the forward of a "
                "checkpointed region and its recompute, which would differentiate another "
                "function. Replace it after backward."
            )


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _storage(tensor: Tensor | None) -> int:
    """Identity of the storage, which stays when FSDP frees and fills it. `.data =` changes it."""
    if tensor is None:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a subclass without one
        return 0


def _is_own(module: _BatchNorm, name: str, tensor: Tensor | None) -> bool:
    """A parameter, or none, as against a tensor that stands in for one."""
    own = module._parameters
    return name in own and own[name] is tensor and (tensor is None or tensor.is_leaf)
