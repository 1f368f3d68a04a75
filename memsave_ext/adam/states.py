"""Makes the state of a parameter, and checks whether it can be stepped with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor

from ..shared.dtensor import is_dtensor, local_tensor
from . import errors, formats
from .blocks import made, scale_shape, takes_blocks
from .elements import real_type, zeros_like
from .elsewhere import put_state
from .formats import COMPUTED, Codes, StateFormat, made_state_format, param_format_of
from .place import Place
from .rules import MOMENTUM, is_adam, rule_of


@_disable_dynamo  # a hook calls it, inside of what is compiled where that calls backward()
def make_state(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a state of zeros in the format that the group's options and the dtype select.

    It is empty where the rule and the formats need none. Steps are counted by Adam, for random
    bits, and where dampening leaves out the first one.
    """
    place = group.get("states_on")
    if place is None or is_dtensor(param):
        return put_state(_state_of_zeros(param, group, takes_blocks(param)), group, param.device)
    on_meta = _state_on_meta(param, group)
    return {
        name: (Place() if place.stays(name, param.device) else place).zeros(like, param.device)
        if like.device.type == "meta"
        else like
        for name, like in on_meta.items()
    }


def _state_on_meta(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Takes no memory for zeros that lie elsewhere."""
    like = torch.empty_like(param, device="meta")  # which is dense
    return _state_of_zeros(like, group, takes_blocks(param))


def _state_of_zeros(param: Tensor, group: Mapping[str, Any], in_blocks: bool) -> dict[str, Tensor]:
    rule, row = rule_of(group), made_state_format(param, group, in_blocks)
    state = {}
    if needs_step(param, group, row) or (rule is MOMENTUM and group["dampening"] != 0):
        state["step"] = step_count(0, param, group)
    if row.codes and rule.moments:
        state |= made(param, row, rule.moments)
    else:
        for name in rule.moments:
            state[name] = zeros_like(param, row.dtype or param.dtype)
    if (low_part := param_format_of(param, group).low_part) is not None:
        state["param_rest"] = zeros_like(param, low_part)
    return state


def step_count(count: float, param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns a new count of steps, in the place where it belongs."""
    on_device = group.get("capturable") or group.get("fused") or not is_adam(rule_of(group))
    device = param.device if on_device else "cpu"
    return torch.full((), count, dtype=torch.float32, device=device)


def sizes_of_states(groups: Iterable[Mapping[str, Any]]) -> dict[Place, list[int]]:
    """Returns the bytes of each tensor in the states to be made, by where they are to lie."""
    sizes: dict[Place, list[int]] = {}
    for group in groups:
        if (place := group.get("states_on")) is None:
            continue
        for param in group["params"]:
            # A prediction's need no room.
            if param.requires_grad and not isinstance(local_tensor(param), FakeTensor):
                zeros = _state_on_meta(local_tensor(param), group).values()
                sizes.setdefault(place, []).extend(tensor.nbytes for tensor in zeros)
    return sizes


def publish_states(
    optimizer: torch.optim.Optimizer, made: Iterable[tuple[Tensor, dict[str, Tensor]]]
) -> None:
    """Puts new states into the optimizer's; each keeps the low part that there was."""
    for param, state in made:
        if (low_part := optimizer.state.get(param, {}).get("param_rest")) is not None:
            state["param_rest"] = low_part
        optimizer.state[param] = state


def needs_step(param: Tensor, group: Mapping[str, Any], states: StateFormat | None) -> bool:
    """Whether a step cannot be made without its number: Adam corrects by it, and random bits
    depend on it. ``states``: the format of the moments; None without them."""
    rule = rule_of(group)
    if is_adam(rule) or param_format_of(param, group).at_random:
        return True
    at_random = states is not None and (states.at_random or states.codes is not None)
    return at_random and bool(rule.moments)


def check(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> None:
    """Raises RuntimeError where a step cannot be made. Changes nothing.

    The native part calls it for a parameter that its kernels do not take.
    """
    if grad is not None:
        _check_grad(param, grad, group)
    if real_type(param) not in COMPUTED:
        raise errors.wrong_type(param.dtype)
    row = _check_moments(param, state, group) if rule_of(group).moments else None
    step = state.get("step")
    if (step is not None or needs_step(param, group, row)) and not _is_step(step, param):
        raise errors.wrong_step()
    if (low_part := param_format_of(param, group).low_part) is not None:
        _check_like("param_rest", param, state, low_part)


def _is_step(step: Any, param: Tensor) -> bool:
    if not isinstance(step, Tensor) or step.numel() != 1:
        return False
    if step.device.type == "cpu":
        return step.dtype in (torch.float32, torch.float64)
    return step.dtype == torch.float32 and step.device == param.device


def _check_moments(
    param: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> StateFormat:
    """Checks the moments and their scales, and returns their format."""
    moments = rule_of(group).moments
    if formats.first_of_state(state) is None:
        raise errors.no_state(moments[0])
    key, allowed = formats.key_of_state(state), formats.state_formats(param, group)
    if key not in allowed:
        types = dict.fromkeys(dtype for dtype, _ in allowed)
        raise errors.wrong_moments(moments[0], param.dtype, key[0], types)
    row = allowed[key]
    if "max_exp_avg_sq" in moments and not row.amsgrad:
        raise errors.no_amsgrad()
    elsewhere = group.get("states_on") is not None
    for name in ("moments",) if row.joint else moments:
        _check_like(name, param, state, key[0], elsewhere)
    if row.codes:
        _check_blocks(param, state, moments, row.codes, elsewhere)
    return row


def check_dense(grad: Tensor, group: Mapping[str, Any] | None = None) -> None:
    """Raises RuntimeError where the gradient is sparse. ``group``: the parameter's."""
    if grad.layout != torch.strided:
        raise errors.sparse(*([] if group is None else [rule_of(group).name]))


def _check_grad(param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
    check_dense(grad, group)
    if grad.shape != param.shape or grad.device != param.device or grad.dtype != param.dtype:
        raise errors.wrong_gradient(param, grad)


def _is_reachable(tensor: Tensor, param: Tensor, elsewhere: bool) -> bool:
    """Whether a step can have the state. ``elsewhere``: it can be fetched from the host."""
    return tensor.device == param.device or (elsewhere and tensor.device.type == "cpu")


def _check_like(
    name: str,
    param: Tensor,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    elsewhere: bool = False,
) -> None:
    if name not in state:
        raise errors.no_state(name)
    tensor = state[name]
    if not _is_reachable(tensor, param, elsewhere) or tensor.shape != param.shape:
        raise errors.wrong_place(name, tensor, param)
    if tensor.dtype != dtype:
        raise errors.wrong_state_type(name, tensor.dtype, dtype)


def _check_blocks(
    param: Tensor,
    state: Mapping[str, Tensor],
    moments: Sequence[str],
    spec: Codes,
    elsewhere: bool,
) -> None:
    blocks = scale_shape(param, spec).numel()
    for name in (f"{moment}_scale" for moment in moments):
        scale = state.get(name)
        if (
            scale is None
            or scale.numel() < blocks
            or (scale.numel() > blocks and scale.dim() < 2)  # not of a shard, which may have more
            or scale.dtype != torch.float32
            or not _is_reachable(scale, param, elsewhere)
            or not scale.is_contiguous()
        ):
            raise errors.wrong_scale(name, param, blocks)
    # Blocks are consecutive in memory, so the codes are valid only for the strides they had.
    for then in (state[name].stride() for name in ("moments", *moments) if name in state):
        now = param.stride()
        if any(size > 1 and a != b for size, a, b in zip(param.shape, then, now, strict=True)):
            raise errors.moved_blocks(then, now)
