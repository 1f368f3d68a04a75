"""Options of a param group beyond torch's: how parameters and states are stored, and clipping.

A group contains them only where they differ from the defaults, so that a ``state_dict`` without
them is the same as torch's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..elsewhere.gradients import Gradients
from ..shared.checks import check_bool
from ..shared.dtensor import as_placed, is_dtensor, is_placed_alike, local_tensor
from . import errors, formats, kahan
from .blocks import (
    SCALES,
    coded_format,
    codes_from_saved,
    codes_to_saved,
    from_blocks,
    scale_shape,
    takes_blocks,
    to_blocks,
)
from .formats import StateFormat
from .place import Place
from .rules import MOMENTS, Rule, is_adam, rule_of
from .states import needs_step, step_count

DEFAULTS: dict[str, Any] = {
    "bf16": None, "state_dtype": None, "seed": 0, "max_grad_norm": None, "states_on": None
}  # fmt: skip
_SWITCHES = (
    "amsgrad", "maximize", "capturable", "decoupled_weight_decay", "differentiable", "nesterov"
)  # fmt: skip
_OF_ALL_GROUPS = (
    "in_backward", "small_bytes", "bucket_bytes", "grads_on", "clip_global_norm", "grad_scaler"
)  # fmt: skip
_OF_RULES = ("betas", "eps", "dampening")  # a group has some of them, by its rule
_STORAGE = ("bf16", "state_dtype")  # the options that decide what a state consists of


def of_group(group: dict[str, Any], name: str) -> Any:
    """Returns the group's option, or its default. torch.float32 becomes None, its equivalent."""
    value = group.get(name, DEFAULTS[name])
    return None if value is torch.float32 else value


def check_norm(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")


def check_bytes(name: str, value: Any) -> None:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name} must be an int from 0 to 2**63 - 1, got {value!r}")


def refuse_differentiable(options: Mapping[str, Any]) -> None:
    """Raises ValueError where one of these options is given: torch's implementation has none."""
    for name, value in options.items():
        if value != DEFAULTS.get(name):
            raise ValueError(
                f"differentiable=True uses torch's own implementation, which has no {name}: leave "
                "one of the two out"
            )


def gradients_of(grads_on: Any, grad_scaler: object) -> Gradients | None:
    """Returns what a value of ``grads_on=`` stands for; None: they stay where they are.

    Raises:
        TypeError, ValueError: there is no such place; a ``grad_scaler`` is given.
    """
    if grads_on is None:
        return None
    if grad_scaler is not None:
        refuse_scaler(grads_on)
    return Gradients(grads_on)


def refuse_scaler(gradients: object) -> None:
    if gradients is not None:
        raise ValueError(
            "grads_on needs no grad_scaler: GradScaler unscales the gradients itself, and skips "
            "the step where one is not finite. Leave grad_scaler out"
        )


def refuse_two_norms(groups: list[dict[str, Any]]) -> None:
    if any(group.get("max_grad_norm") is not None for group in groups):
        raise errors.two_norms()


def refuse_options(group: dict[str, Any], defaults: dict[str, Any], kind: str) -> None:
    """Raises TypeError where a param group has an option of the whole optimizer, or one by which
    another rule would step it."""
    for name in _OF_ALL_GROUPS:
        if name in group:
            raise TypeError(
                f"a param group of {kind} cannot have the option {name!r}, which is one of the "
                f"whole optimizer: pass it to {kind}() itself"
            )
    for name in ("amsgrad", "dampening"):
        if name in group and name not in defaults:
            raise TypeError(
                f"a param group of {kind} cannot have the option {name!r}: leave it out"
            )


def _check_flag(name: str, value: Any, *, none: bool = False) -> None:
    """Raises TypeError where ``value`` is no truth value. As in torch, 0, 1 and numpy's are."""
    try:
        is_equal = bool(value in (True, False))
    except Exception:  # comparing arrays can raise any error
        is_equal = False
    if not is_equal:
        check_bool(name, value, none=none)


def _check_number(name: str, value: Any) -> None:
    """Raises TypeError or ValueError where ``value`` is no number. As in torch, numpy's numbers and
    tensors of one element are allowed."""
    of_tensor = isinstance(value, Tensor)
    if of_tensor and value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element, got {value!r}")
    is_complex = value.is_complex() if of_tensor else isinstance(value, complex)
    if is_complex or not (of_tensor or isinstance(value, SupportsFloat)):
        raise TypeError(f"{name} must be a number or a tensor of one element, got {value!r}")


def check_options(group: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for an invalid option of the group, defaults included."""
    rule = rule_of(group)
    numbers = ["lr", "weight_decay", *(["eps"] if is_adam(rule) else [])]
    if "dampening" in group:
        numbers += ["momentum", "dampening"]
    else:
        _check_betas(group.get("betas"))
    for name in numbers:
        _check_number(name, group.get(name))
    for name in _SWITCHES:
        _check_flag(name, group.get(name, False))
    for name in ("foreach", "fused"):
        _check_flag(name, group.get(name), none=True)
    formats.param_format(group.get("bf16"))
    formats.state_option(group)
    seed = group.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an int from 0 to 2**64 - 1, got {seed!r}")
    if (norm := group.get("max_grad_norm")) is not None:
        check_norm("max_grad_norm", norm)
    if not isinstance(place := group.get("states_on"), (Place, NoneType)):
        raise TypeError(
            "states_on of a param group cannot be changed after the group was made, and has been "
            f"changed to {place!r}: make a new optimizer with it"
        )


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, got {betas!r}")
    for beta in betas:
        _check_number("betas", beta)


# What torch calls options in its errors; any number that is finite and at least 0 is allowed.
_AT_LEAST_0 = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "weight_decay": "weight_decay value",
    "momentum": "momentum value",
}


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def check_ranges(group: dict[str, Any]) -> None:
    """Raises ValueError where an option that check_options() has passed is out of its range.

    Not in every step: to read a tensor on a device is to wait for it.
    """
    for name, said in _AT_LEAST_0.items():
        if name in group and not 0 <= _number(group[name]) < math.inf:
            raise ValueError(f"Invalid {said}: {group[name]}. {name} must be finite and at least 0")
    for index, beta in enumerate(group.get("betas", ())):
        if not 0 <= _number(beta) < 1:
            raise ValueError(
                f"Invalid beta parameter at index {index}: {beta}. betas must be at least 0 and "
                "below 1"
            )
    if not math.isfinite(dampening := _number(group.get("dampening", 0))):
        raise ValueError(f"Invalid dampening value: {dampening}. dampening must be finite")


def check_group(group: dict[str, Any], rule: Rule) -> None:
    """Raises ValueError where the group's parameters cannot be stepped with its options."""
    states = formats.state_format(formats.state_option(group))
    if states is not None and states.joint and not is_adam(rule):
        raise ValueError(
            f"state_dtype={states.option!r} packs Adam's two moments into one byte, and SGD and "
            "Lion have only one moment: use state_dtype='8bit', which takes as much memory"
        )
    if states is not None and "max_exp_avg_sq" in rule.moments and not states.amsgrad:
        raise ValueError(
            f"state_dtype={states.option!r} cannot be combined with amsgrad=True: choose one"
        )
    for param in listed(group["params"]):
        _check_param(param, group, states)
    if (place := group.get("states_on")) is not None:
        place.check(listed(group["params"]))


def listed(params: Any) -> list[Tensor]:
    """Returns the tensors in ``params``: a tensor, or several, each alone or as (name, tensor)."""
    several = [params] if isinstance(params, Tensor) else params
    tensors = [param[1] if isinstance(param, tuple) else param for param in several]
    return [param for param in tensors if isinstance(param, Tensor)]  # torch rejects the others


def refuse_twice(params: Any) -> None:
    """Raises ValueError where a parameter is twice in a group: torch would step it twice."""
    seen: set[int] = set()
    for param in listed(params):
        if id(param) in seen:
            raise ValueError(f"{_described(param)} is twice in a param group: leave one out")
        seen.add(id(param))


def _described(param: Tensor) -> str:
    if is_lazy(param):
        return f"a parameter of {param.dtype} that has no shape yet"
    return f"a parameter of {param.dtype} and shape {list(param.shape)}"


def _check_param(param: Tensor, group: dict[str, Any], states: StateFormat | None) -> None:
    got = _described(param)
    own = "Put it into a param group of its own, with"
    if is_lazy(param) and group.get("states_on") is not None:  # which makes room for all at once
        raise ValueError(f"states_on got {got}: call its module once, then make its optimizer")
    bf16 = group.get("bf16")
    if bf16 is not None and param.dtype != torch.bfloat16:
        raise ValueError(f"bf16={bf16!r} is for bfloat16 parameters, got {got}. {own} bf16=None.")
    if states is not None and param.dtype not in states.params:
        raise ValueError(
            f"state_dtype={states.option!r} is for float32, float16 and bfloat16 parameters, got "
            f"{got}. {own} state_dtype=None."
        )


def check_loadable(loaded: dict[str, Any], own: list[dict[str, Any]]) -> None:
    """Raises ValueError where saved states do not fit: torch's can be converted to this
    optimizer's mode, those of another mode cannot."""
    for theirs, ours in zip(loaded["param_groups"], own, strict=False):
        _check_rule(theirs, ours)
        for saved, param in zip(theirs["params"], ours["params"], strict=False):
            _check_placement(loaded["state"].get(saved, {}), param)
            _check_scales(loaded["state"].get(saved, {}), param)
            _check_bitsandbytes(loaded["state"].get(saved, {}), param, ours)
            _check_count(loaded["state"].get(saved, {}), saved, theirs, ours)
        states = formats.state_format(formats.state_option(ours))
        if states is not None and not states.amsgrad and theirs.get("amsgrad"):
            raise ValueError(
                "state_dict was saved with amsgrad=True, which cannot be combined with this "
                f"optimizer's state_dtype={states.option!r}: make the optimizer with another "
                "state_dtype"
            )
        modes = [{name: of_group(group, name) for name in _STORAGE} for group in (theirs, ours)]
        if modes[0] == modes[1] or not any(modes[0].values()):
            continue
        names = [", ".join(f"{name}={value!r}" for name, value in mode.items()) for mode in modes]
        raise ValueError(
            f"state_dict was saved with {names[0]}, this optimizer has {names[1]}. Make this "
            "optimizer with the same options, or load what to_fp32_state_dict() of the saved one "
            "returns."
        )


def _check_rule(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises ValueError where a saved group is of another rule, which would step from then on."""
    of_theirs, of_ours = ([n for n in _OF_RULES if n in group] for group in (theirs, ours))
    if of_theirs != of_ours:
        raise ValueError(
            "state_dict is of another kind of optimizer: of the options betas, eps and dampening "
            f"its param groups have {of_theirs}, and those of this optimizer have {of_ours}"
        )


def _check_count(state: Any, saved: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises ValueError where Adam could not know how many steps have made a saved state."""
    if not isinstance(state, dict) or not is_adam(rule_of(ours)) or "step" in state:
        return
    has_moments = formats.first_of_state(state) is not None or _BITSANDBYTES in state
    if has_moments and _count_of_group(theirs) is None:
        raise ValueError(
            f"state_dict has moments of Adam but no 'step' for parameter {saved!r}, and none in "
            "its param group, where apex's FusedAdam has it. Put the number of steps that were "
            "made into one of the two"
        )


def _count_of_group(group: dict[str, Any]) -> float | None:
    """Returns the number of steps that a saved group has, as apex's FusedAdam saves it."""
    count = group.get("step")
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    if not isinstance(count, (int, float)) or isinstance(count, bool) or not count >= 0:
        return None
    return float(count)


def _check_placement(state: dict[str, Any], param: Any) -> None:
    """Raises ValueError where a saved state is split otherwise than the parameter is."""
    for name, value in state.items() if is_dtensor(param) else ():
        if is_dtensor(value) and not is_placed_alike(param, value):
            raise ValueError(
                f"state_dict has {name!r} as a DTensor on {value.device_mesh} with "
                f"{value.placements}, but the parameter is on {param.device_mesh} with "
                f"{param.placements}. Load it with torch.distributed.checkpoint, which shards it "
                "anew."
            )


def _check_scales(state: dict[str, Any], param: Tensor) -> None:
    """Raises ValueError where the blocks of a saved state are those of other shards."""
    row = coded_format(state)
    if row is None or row.codes is None:
        return
    expected = scale_shape(param, row.codes)
    for name in (name for name in SCALES if name in state):
        is_sharded = state[name].dim() > 1 or is_dtensor(param)
        if is_sharded and state[name].shape != expected:
            raise ValueError(
                f"state_dict has {name!r} of shape {list(state[name].shape)} for a parameter that "
                f"needs shape {list(expected)} here: it was saved with another sharding, and "
                f"{row.option} states cannot be sharded anew. Save to_fp32_state_dict() instead, "
                "which loads with any sharding."
            )


def keep(old: list[dict[str, Any]], new: list[dict[str, Any]], scaled: bool) -> None:
    """Restores the options that a loaded state_dict does not contain.

    With a GradScaler (``scaled``) also ``fused``, which decides where steps are counted.
    """
    for before, after in zip(old, new, strict=True):
        if scaled and "fused" in before:
            after["fused"] = before["fused"]
        for name in DEFAULTS:
            if name in before and name not in after:
                after[name] = before[name]


def to_saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state_dict in types that torch.distributed can gather and send.

    A dtype among the options becomes its name, and codes have names of their own. 16-bit low parts
    that are DTensors become int32 of the same numbers: gloo and NCCL gather no int16. Where states
    lie is not saved: it is this machine's.
    """
    states = {}
    for index, state in state_dict["state"].items():
        if isinstance(state, dict):
            low_part = state.get("param_rest")
            if low_part is not None and low_part.dtype == torch.int16 and is_dtensor(low_part):
                state = state | {"param_rest": as_placed(low_part, local_tensor(low_part).int())}
            state = codes_to_saved(state)
        states[index] = state
    groups = []
    for group in state_dict["param_groups"]:
        group = {name: value for name, value in group.items() if name != "states_on"}
        if isinstance(dtype := group.get("state_dtype"), torch.dtype):
            group["state_dtype"] = str(dtype).removeprefix("torch.")
        groups.append(group)
    return {**state_dict, "state": states, "param_groups": groups}


def from_saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state_dict with dtypes in place of their names and codes under those of their
    moments, as older ones have them, and "split" in place of "kahan"."""
    states = {
        index: codes_from_saved(state) if isinstance(state, dict) else state
        for index, state in state_dict["state"].items()
    }
    groups = []
    for group in state_dict["param_groups"]:
        name = group.get("state_dtype")
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        group = group | {"state_dtype": dtype} if isinstance(dtype, torch.dtype) else {**group}
        kahan.replace(group)
        groups.append(group)
    return {**state_dict, "state": states, "param_groups": groups}


_BITSANDBYTES = "__bnb_optimizer_quant_state__"  # where its optimizers keep what torch would cast
_BITSANDBYTES_BLOCK = 256  # elements that share a scale


def from_bitsandbytes(state: Any, group: dict[str, Any]) -> Any:
    """Returns a saved state of bitsandbytes' optimizers as torch's has it; any other as it is.

    Codes of eight bits stand for numbers in ``qmap1`` and ``qmap2``, with a scale for each block in
    ``absmax1`` and ``absmax2``: bitsandbytes/functional.py, dequantize_blockwise().
    """
    if not isinstance(state, dict) or _BITSANDBYTES not in state:
        return state
    parts = state[_BITSANDBYTES]
    made = {name: value for name, value in state.items() if name != _BITSANDBYTES}
    for number, name in enumerate(rule_of(group).moments, 1):
        values = parts[f"state{number}"]
        if values.dtype == torch.uint8:
            scales = parts[f"absmax{number}"].repeat_interleave(_BITSANDBYTES_BLOCK)
            numbers = parts[f"qmap{number}"][values.flatten().int()]
            values = (numbers * scales[: numbers.numel()]).view(values.shape)
        made[name] = values
    return made


def _check_bitsandbytes(state: Any, param: Tensor, group: dict[str, Any]) -> None:
    """Raises ValueError where a saved state of bitsandbytes cannot be converted."""
    parts = state.get(_BITSANDBYTES) if isinstance(state, dict) else None
    if parts is None:
        return
    blocks = -(-param.numel() // _BITSANDBYTES_BLOCK)
    for number, name in enumerate(rule_of(group).moments, 1):
        values, scales = parts.get(f"state{number}"), parts.get(f"absmax{number}")
        is_coded = values is not None and values.dtype == torch.uint8
        if values is None or (is_coded and (scales is None or scales.numel() != blocks)):
            raise ValueError(
                f"state_dict is of an optimizer of bitsandbytes, and its {name} cannot be "
                f"converted: only plain numbers, and codes in blocks of {_BITSANDBYTES_BLOCK}, can "
                "be"
            )


def tensors_in(state: Any) -> dict[str, Tensor]:
    """Returns what torch's ``load_state_dict`` casts to the dtype of the parameter."""
    items = state.items() if isinstance(state, dict) else ()
    return {name: v for name, v in items if name != "step" and isinstance(v, Tensor)}


def without_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state_dict without the tensors in parameters' states, which torch would cast to
    the dtypes of the parameters, all of them before any can be converted."""
    params = {index for group in state_dict["param_groups"] for index in group["params"]}
    states = {}
    for index, state in state_dict["state"].items():
        if index in params and isinstance(state, dict):
            left_out = {*tensors_in(state), _BITSANDBYTES}
            state = {name: v for name, v in state.items() if name not in left_out}
        states[index] = state
    return {**state_dict, "state": states}


def convert_loaded(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Converts a loaded torch state to the group's mode; one of that mode stays as it is."""
    if state.get("momentum_buffer", ...) is None:  # as older SGDs of torch without momentum have it
        del state["momentum_buffer"]
    first = formats.first_of_state(state)
    if first is None and "param_rest" not in state:
        return
    low_part = formats.param_format(of_group(group, "bf16")).low_part
    if low_part is not None and "param_rest" not in state:
        state["param_rest"] = torch.zeros_like(param, dtype=low_part)
    elif low_part is not None and state["param_rest"].is_floating_point():
        state["param_rest"] = kahan.low_bits(param, state["param_rest"])
    elif low_part is not None:
        # A new tensor, of which no versions are known: this low part belongs to weights that were
        # loaded with it, and must not be dropped as stale.
        state["param_rest"] = state["param_rest"].to(low_part, copy=True)
    made = formats.made_state_format(param, group, takes_blocks(param))
    if "step" not in state and needs_step(param, group, made):
        # torch's SGD does not count, and apex's Adam does so in the group.
        count = _count_of_group(group) if is_adam(rule_of(group)) else None
        state["step"] = step_count(1 if count is None else count, param, group)
    states = formats.state_format(formats.state_option(group))
    if states is None or states.dtype is None or first is None:
        return
    if states.codes is None:
        for name in MOMENTS:
            if name in state:
                state[name] = state[name].to(states.dtype)
    elif coded_format(state) is None and takes_blocks(param):
        to_blocks(state, param, states)


def convert_unpickled(states: Mapping[Tensor, Any], groups: list[dict[str, Any]]) -> None:
    """Converts what an optimizer of an earlier version was pickled with."""
    for group in groups:
        if not kahan.replace(group):
            continue
        for param in group["params"]:
            if "param_rest" in (state := states.get(param, {})):
                state["param_rest"] = kahan.low_bits(param, state["param_rest"])


def to_fp32(
    state_dict: dict[str, Any], put: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[str, Any]:
    """Returns the state_dict as torch's optimizer would have it, with moments of at least float32.

    Only Adam counts steps in it. ``put`` is given each tensor, as soon as it is made, and returns
    one with its values.
    """
    counts = all(is_adam(rule_of(group)) for group in state_dict["param_groups"])
    ours = ("moments", *SCALES, "param_rest", *([] if counts else ["step"]))
    groups = [
        {name: value for name, value in group.items() if name not in DEFAULTS}
        for group in copy.deepcopy(state_dict["param_groups"])
    ]
    states = {}
    for index, state in state_dict["state"].items():
        if not isinstance(state, dict):  # a user's, under a name of its own
            states[index] = state
            continue
        state = codes_from_saved(state)
        plain = {name: value for name, value in state.items() if name not in ours}
        if (row := coded_format(state)) is not None:
            plain |= from_blocks(state, row)
        for name in MOMENTS:
            if name in plain and plain[name].dtype in (torch.bfloat16, torch.float16):
                plain[name] = plain[name].float()
        if plain:
            states[index] = {
                name: put(v) if isinstance(v, Tensor) else v for name, v in plain.items()
            }
    return {**state_dict, "state": states, "param_groups": groups}


def fp32_parameter(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Returns a float32 copy of ``param``, including the low part kept beside its 16 bits."""
    low_part, load = state.get("param_rest"), formats.param_format_of(param, group).load
    if low_part is None or load is None:
        dtype = torch.complex64 if param.is_complex() else torch.float32
        return param.detach().to(dtype, copy=True)
    # Bits are those of memory, which a DTensor's operators do not see.
    return as_placed(param, load(local_tensor(param.detach()), local_tensor(low_part)))
