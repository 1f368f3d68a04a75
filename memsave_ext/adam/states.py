"""What is kept of each parameter between steps, and whether it can be stepped with that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .blocks import SCALES, blocks_of, takes_blocks
from .elements import real_type, zeros_like
from .formats import COMPUTED, made_state_format, param_format_of, state_formats

# A step is made whole, or in parts: micro-gradients are folded into the moments, the last of them
# with an update of the parameter.
Phase = Literal["whole", "first_fold", "fold", "close"]


def make_state(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Zeros, in the format that the group's options and the parameter's type make."""
    device = param.device if group["capturable"] or group["fused"] else "cpu"
    row = made_state_format(param, group, takes_blocks(param))
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    for name in _moments(group):
        state[name] = zeros_like(param, row.dtype or param.dtype)
    if row.block:
        for name in SCALES:
            state[name] = torch.zeros(blocks_of(param), dtype=torch.float32, device=param.device)
    if (rest := param_format_of(param, group).rest) is not None:
        state["param_rest"] = zeros_like(param, rest)
    return state


def check(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    phase: Phase = "whole",
) -> None:
    """Raises where a step cannot be made; nothing is changed then."""
    if grad is not None:
        _check_grad(param, grad)
    if real_type(param) not in COMPUTED:
        raise RuntimeError(f"Adam: parameters must be floating-point or complex, got {param.dtype}")
    step = state.get("step")
    if not isinstance(step, Tensor) or step.numel() != 1 or not step.is_floating_point():
        raise RuntimeError(
            "Adam: the state step of a parameter must be a floating-point scalar tensor"
        )
    if "exp_avg" not in state:
        raise RuntimeError("Adam: the state of a parameter has no exp_avg")
    dtype = state["exp_avg"].dtype
    allowed = state_formats(param, group)
    if dtype not in allowed:
        raise RuntimeError(
            f"Adam: the state exp_avg of a {param.dtype} parameter must be "
            f"{' or '.join(map(str, allowed))}, got {dtype}. Convert the model before making the "
            "optimizer, or load the optimizer's state_dict() into it again."
        )
    row = allowed[dtype]
    for name in _moments(group):
        if name == "max_exp_avg_sq" and not row.amsgrad:
            raise RuntimeError("Adam: 8-bit states cannot have amsgrad")
        _check_like(name, param, state, dtype)
    if row.block:
        _check_blocks(param, state)
    if (rest := param_format_of(param, group).rest) is not None:
        _check_like("param_rest", param, state, rest)
    if phase != "whole" and real_type(state["exp_avg"]) not in (torch.float32, torch.float64):
        raise RuntimeError(
            "Adam: accumulate(fold=True) needs states of float32 or float64, got "
            f"{dtype}. Use accumulate() or state_dtype=None."
        )


def check_dense(grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise RuntimeError(
            "Adam does not support sparse gradients, please consider SparseAdam instead"
        )


def _moments(group: Mapping[str, Any]) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _check_grad(param: Tensor, grad: Tensor) -> None:
    check_dense(grad)
    if grad.shape != param.shape or grad.device != param.device or grad.dtype != param.dtype:
        raise RuntimeError(
            "Adam: a gradient must have the shape, dtype and device of its parameter, "
            f"{list(param.shape)} {param.dtype} {param.device}, got {list(grad.shape)} "
            f"{grad.dtype} {grad.device}"
        )


def _check_like(name: str, param: Tensor, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    if name not in state:
        raise RuntimeError(f"Adam: the state of a parameter has no {name}")
    tensor = state[name]
    if tensor.device != param.device or tensor.shape != param.shape:
        raise RuntimeError(
            f"Adam: the state {name} of a parameter is a tensor of shape {list(tensor.shape)} "
            f"on {tensor.device}, the parameter one of shape {list(param.shape)} on "
            f"{param.device}. Move the model before making the optimizer, or load the "
            "optimizer's state_dict() into it again."
        )
    if tensor.dtype != dtype:
        raise RuntimeError(
            f"Adam: the state {name} of a parameter is {tensor.dtype}, expected {dtype}"
        )


def _check_blocks(param: Tensor, state: Mapping[str, Tensor]) -> None:
    for name in SCALES:
        scale = state.get(name)
        if (
            scale is None
            or scale.numel() != blocks_of(param)
            or scale.dtype != torch.float32
            or scale.device != param.device
            or not scale.is_contiguous()
        ):
            raise RuntimeError(
                f"Adam: the state {name} of a parameter of shape {list(param.shape)} must be a "
                f"contiguous float32 tensor of {blocks_of(param)} elements on its device"
            )
    # Blocks follow memory.
    if any(
        size > 1 and then != now
        for size, then, now in zip(
            param.shape, state["exp_avg"].stride(), param.stride(), strict=True
        )
    ):
        raise RuntimeError(
            "Adam: 8-bit states need a parameter in the memory format it had when they were made: "
            f"strides {state['exp_avg'].stride()} then, {param.stride()} now. Load "
            "to_fp32_state_dict() into a new optimizer."
        )
