"""Records about states between steps that their tensors do not contain: csrc/adam/records.cpp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .operator import Prepared


class Records:
    """Keyed by state tensors, because parameters can be swapped and states loaded."""

    def __init__(self) -> None:
        # By param_rest: the versions of the parameter and of the low part at their last step.
        self._versions = WeakTensorKeyDictionary()

    def drop_stale_low_part(self, param: Tensor, low_part: Tensor | None) -> None:
        """Zeroes the low part where only the parameter was written to since its last step.

        One that was loaded has no record and is kept: it belongs to the loaded weights. Nothing is
        done while a CUDA graph is captured, which would zero the low part in every replay.
        """
        known = None if low_part is None else self._versions.get(low_part)
        if low_part is None or known is None or _is_captured(param):
            return
        of_param, of_low_part = known
        if of_param != _version(param) and of_low_part == _version(low_part):
            low_part.detach().zero_()

    def note(self, prepared: Prepared) -> None:
        """Remembers the versions that a step has left."""
        if (low_part := prepared.state.get("param_rest")) is not None:
            self._versions[low_part] = _version(prepared.param), _version(low_part)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_captured(param: Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()
