"""Records about states between steps that their tensors do not contain: csrc/adam/records.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..dtensor import local_tensor
from ..states import StepPhase
from .operator import Prepared


class Records:
    """Keyed by state tensors, because parameters can be swapped and states loaded."""

    def __init__(self) -> None:
        self._folded: dict[int, Tensor] = {}  # each exp_avg_sq that holds packed moments, by id
        # By param_rest: the versions of the parameter and of the low part at their last step.
        self._versions = WeakTensorKeyDictionary()

    def is_folded(self, state: Mapping[str, Any]) -> bool:
        """Whether gradients are folded into the state's moments, which are then packed."""
        return id(local_tensor(state.get("exp_avg_sq"))) in self._folded

    def phase(self, state: Mapping[str, Any], *, folds: bool) -> StepPhase:
        """Returns the phase of the next fold (``folds``) or step."""
        if folds:
            return "fold" if self.is_folded(state) else "first_fold"
        return "close" if self.is_folded(state) else "whole"

    def folded(self) -> int:
        return len(self._folded)

    def forget_folded(self) -> None:
        self._folded.clear()

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

    def note(self, prepared: Prepared, folds: bool) -> None:
        """Remembers what a step or fold has left."""
        exp_avg_sq = prepared.state.get("exp_avg_sq")
        if not folds:
            self._folded.pop(id(exp_avg_sq), None)
            if (low_part := prepared.state.get("param_rest")) is not None:
                self._versions[low_part] = _version(prepared.param), _version(low_part)
        elif exp_avg_sq is not None:
            self._folded[id(exp_avg_sq)] = exp_avg_sq


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_captured(param: Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()
