"""What a batch norm did in the forward of a region, for its recompute to find."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..checkpoint.forward_records import ForwardRecord, Replay

# Keys of a forward record and of the positions of a recompute. A record has the list of all calls
# under _CALLS, and the list of each module's calls under a weak reference to the module. Positions
# have the number of calls that the recompute made so far under _CALLS, and under _TAKEN a dict from
# each recorded call that one of them took to the reference of its module.
_CALLS = "batch norm calls"
_TAKEN = "batch norm calls taken"
_PARAMETERS = "weight", "bias"


class Tensors(NamedTuple):
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


class Settings(NamedTuple):
    """What a call depends on beside its tensors. A recompute uses the settings of its forward."""

    training: bool  # whether statistics are those of the batch
    eps: float
    activation: str
    negative_slope: float
    group: str | None  # the processes that share statistics; None: this one alone


@dataclass(slots=True, eq=False)
class Call:
    """One recorded call of a batch norm in a forward."""

    kind: type[_BatchNorm]
    statistics: Tensor
    settings: Settings
    shape: torch.Size
    dtype: torch.dtype
    parameters: tuple[_Parameter, ...]

    @staticmethod
    def of(module: _BatchNorm, tensors: Tensors, statistics: Tensor, settings: Settings) -> Call:
        parameters = tuple(_Parameter.of(module, n, getattr(tensors, n)) for n in _PARAMETERS)
        input = tensors.input
        return Call(type(module), statistics, settings, input.shape, input.dtype, parameters)

    def fits(self, module: _BatchNorm, input: Tensor) -> bool:
        return self.kind is type(module) and self.shape == input.shape and self.dtype == input.dtype


def find(module: _BatchNorm, tensors: Tensors, replay: Replay | None) -> Call | None:
    """Return the recorded forward call that belongs to this call of a recompute.

    Returns None outside of a recompute, and where the forward recorded no call for this one.

    The calls of a module that the forward called are matched in their order. A module that the
    forward did not call was created inside the function, in place of another one in the forward: it
    gets the call at the same position among the calls of all modules.
    """
    if replay is None:
        return None
    record, positions, is_complete = replay
    reference = weakref.ref(module)
    own = record.get(reference)
    if own is None and not module.training and not is_complete:
        return None  # its forward ran in eval mode and was not recorded
    place = positions.get(_CALLS, 0)
    positions[_CALLS] = place + 1
    taken: dict[Call, object] = positions.setdefault(_TAKEN, {})
    calls = record.get(_CALLS, ())[place : place + 1] if own is None else own
    free = (c for c in calls if c not in taken and c.fits(module, tensors.input))
    call: Call | None = next(free, None)
    if call is None:
        if any(taken.get(c, reference) is not reference for c in calls):
            raise RuntimeError(
                f"{type(module).__name__}: the recompute of a checkpointed region calls its batch "
                "norms in another order than the forward did, so that their statistics cannot be "
                "told apart. The function must do the same each time it is called."
            )
        return None
    taken[call] = reference
    if own is not None:
        for name, parameter in zip(_PARAMETERS, call.parameters, strict=True):
            parameter.check(module, name, getattr(tensors, name))
    return call


def keep(module: _BatchNorm, call: Call, recording: list[ForwardRecord]) -> None:
    for record in recording:
        record.setdefault(weakref.ref(module), []).append(call)
        record.setdefault(_CALLS, []).append(call)


class _Parameter(NamedTuple):
    """The weight or bias that a forward used, or None."""

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
                "give wrong gradients. An optimizer that steps in backward does this to a layer "
                "that is used in several regions: let it step after backward."
            )
        # A parameter that is computed (parametrizations) or gathered (FSDP) is another tensor each
        # time. That is no error: the recompute differentiates through the one it finds.
        if same:
            replaced = self.storage != _storage(tensor)
        else:
            replaced = self.is_own and _is_own(module, name, tensor)
        if replaced:
            raise RuntimeError(
                f"{type(module).__name__}: {name} has been replaced between the forward of a "
                "checkpointed region and its recompute, which would give wrong gradients. Replace "
                "it after backward."
            )


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _storage(tensor: Tensor | None) -> int:
    """Return an id of the storage. It stays when FSDP frees and refills; `.data =` changes it."""
    if tensor is None:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a subclass without a storage
        return 0


def _is_own(module: _BatchNorm, name: str, tensor: Tensor | None) -> bool:
    """Whether it is the module's own parameter (or its None), not a tensor in place of one."""
    own = module._parameters
    return name in own and own[name] is tensor and (tensor is None or tensor.is_leaf)
