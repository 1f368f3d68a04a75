"""What is known of states from step to step beyond their tensors: csrc/adam/records.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..states import Phase


class Records:
    """By the tensors: parameters are swapped, and states are loaded."""

    def __init__(self) -> None:
        self._folded: dict[int, Tensor] = {}  # exp_avg_sq, by id
        # Of the parameter and the rest, when both were written last, by param_rest.
        self._versions = WeakTensorKeyDictionary()

    def is_folded(self, state: Mapping[str, Any]) -> bool:
        """Whether gradients are folded into its moments, which are packed then."""
        return id(state.get("exp_avg_sq")) in self._folded

    def phase(self, state: Mapping[str, Any], *, folds: bool) -> Phase:
        """Of a step, or of a fold, that is to be made."""
        if folds:
            return "fold" if self.is_folded(state) else "first_fold"
        return "close" if self.is_folded(state) else "whole"

    def folded(self) -> int:
        return len(self._folded)

    def forget_folded(self) -> None:
        self._folded.clear()

    def set_folded(self, state: Mapping[str, Tensor], folded: bool) -> None:
        exp_avg_sq = state["exp_avg_sq"]
        if folded:
            self._folded[id(exp_avg_sq)] = exp_avg_sq
        else:
            self._folded.pop(id(exp_avg_sq), None)

    def drop_stale_rest(self, param: Tensor, state: Mapping[str, Tensor]) -> None:
        """Where the parameter has been written to since its last step, and the rest has not been.

        Where that was loaded, nothing is known of it, and it belongs to the weights. A graph would
        drop it in every replay."""
        rest = state.get("param_rest")
        known = None if rest is None else self._versions.get(rest)
        if rest is None or known is None or _is_captured(param):
            return
        of_param, of_rest = known
        if of_param != _version(param) and of_rest == _version(rest):
            rest.detach().zero_()

    def note_versions(self, param: Tensor, state: Mapping[str, Tensor]) -> None:
        if (rest := state.get("param_rest")) is not None:
            self._versions[rest] = _version(param), _version(rest)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_captured(param: Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()
