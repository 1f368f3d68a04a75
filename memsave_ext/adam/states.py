"""Makes the state of a parameter, and checks whether it can be stepped with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from . import errors
from .blocks import SCALES, made, scale_shape, takes_blocks
from .elements import real_type, zeros_like
from .formats import (
    COMPUTED,
    Codes,
    key_of_state,
    made_state_format,
    param_format_of,
    state_formats,
)

# A step is made as a whole, or in parts: gradients are folded into the moments ("first_fold", then
# "fold"), and "close" adds the last one and updates the parameter.
StepPhase = Literal["whole", "first_fold", "fold", "close"]


def make_state(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a state of zeros in the format that the group's options and the dtype select."""
    device = param.device if group["capturable"] or group["fused"] else "cpu"
    row = made_state_format(param, group, takes_blocks(param))
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    if row.codes:
        state |= made(param, row)
    else:
        for name in _moments(group):
            state[name] = zeros_like(param, row.dtype or param.dtype)
    if (low_part := param_format_of(param, group).low_part) is not None:
        state["param_rest"] = zeros_like(param, low_part)
    return state


def check(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    phase: StepPhase = "whole",
) -> None:
    """Raises RuntimeError where a step cannot be made. Changes nothing."""
    if grad is not None:
        _check_grad(param, grad)
    if real_type(param) not in COMPUTED:
        raise errors.wrong_type(param.dtype)
    step = state.get("step")
    if not isinstance(step, Tensor) or step.numel() != 1 or not step.is_floating_point():
        raise errors.wrong_step()
    if "exp_avg" not in state and "moments" not in state:
        raise errors.no_state("exp_avg")
    key, allowed = key_of_state(state), state_formats(param, group)
    dtype = key[0]
    if key not in allowed:
        raise errors.wrong_moments(param.dtype, dtype, dict.fromkeys(of for of, _ in allowed))
    row = allowed[key]
    for name in ["moments"] if row.joint else _moments(group):
        if name == "max_exp_avg_sq" and not row.amsgrad:
            raise errors.no_amsgrad()
        _check_like(name, param, state, dtype)
    if row.joint and group["amsgrad"]:
        raise errors.no_amsgrad()
    if row.codes:
        _check_blocks(param, state, row.codes)
    if (low_part := param_format_of(param, group).low_part) is not None:
        _check_like("param_rest", param, state, low_part)
    folds = (torch.float32, torch.float64)
    if phase != "whole" and (row.joint or real_type(state["exp_avg"]) not in folds):
        raise errors.cannot_fold(dtype)


def check_dense(grad: Tensor, *, own_step: bool = False) -> None:
    if grad.layout != torch.strided:
        raise errors.sparse_for_own_step() if own_step else errors.sparse()


def _moments(group: Mapping[str, Any]) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _check_grad(param: Tensor, grad: Tensor) -> None:
    check_dense(grad)
    if grad.shape != param.shape or grad.device != param.device or grad.dtype != param.dtype:
        raise errors.wrong_gradient(param, grad)


def _check_like(name: str, param: Tensor, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    if name not in state:
        raise errors.no_state(name)
    tensor = state[name]
    if tensor.device != param.device or tensor.shape != param.shape:
        raise errors.wrong_place(name, tensor, param)
    if tensor.dtype != dtype:
        raise errors.wrong_state_type(name, tensor.dtype, dtype)


def _check_blocks(param: Tensor, state: Mapping[str, Tensor], of: Codes) -> None:
    blocks = scale_shape(param, of).numel()
    for name in SCALES:
        scale = state.get(name)
        if (
            scale is None
            or scale.numel() < blocks
            or (scale.numel() > blocks and scale.dim() < 2)  # not of a shard, which may have more
            or scale.dtype != torch.float32
            or scale.device != param.device
            or not scale.is_contiguous()
        ):
            raise errors.wrong_scale(name, param, blocks)
    # Blocks are consecutive in memory, so the codes are valid only for the strides they had.
    then, now = state["moments" if "moments" in state else "exp_avg"].stride(), param.stride()
    if any(size > 1 and a != b for size, a, b in zip(param.shape, then, now, strict=True)):
        raise errors.moved_blocks(then, now)
