"""Packs and unpacks the arguments of Adam's operator (``memsave_ext/_ops.py``), as
csrc/adam/arguments.cpp does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..formats import PARAM_FORMATS, STATE_FORMATS, state_option
from ..rules import AMSGRAD, MOMENTUM, RULES, SGD, is_adam, rule_of
from ..states import StepPhase

_STATES = (
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "moments", "exp_avg_scale",
    "exp_avg_sq_scale", "momentum_buffer", "momentum_buffer_scale", "param_rest",
)  # fmt: skip
_PHASES: tuple[StepPhase, ...] = ("whole", "first_fold", "fold", "close")
_BF16 = tuple(row.name for row in PARAM_FORMATS)
_STATE_DTYPES = tuple(row.option for row in STATE_FORMATS)
_OPTIONS, _MODES = 6, 8  # how many `options` and `modes` each group has
LISTS = 10  # how many lists pack() returns, the operator's first arguments


class Prepared(NamedTuple):
    """A parameter to step, in the form that kernels take."""

    param: Tensor
    grad: Tensor | None  # None for zeros
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]
    phase: StepPhase
    position: int = 0


def pack(prepared: Iterable[Prepared]) -> tuple[list[Any], ...]:
    params, grads, states, present, phases, positions, groups = ([] for _ in range(7))
    options: list[float] = []
    modes: list[int] = []
    lrs: list[Tensor] = []
    numbers: dict[int, int] = {}  # each group's index among the packed ones, by id
    for p in prepared:
        if id(p.group) not in numbers:
            numbers[id(p.group)] = len(numbers)
            _pack_group(p.group, options, modes, lrs)
        names = [name for name in _STATES if name in p.state]
        params.append(p.param)
        grads += [] if p.grad is None else [p.grad]
        states += [p.state[name] for name in names]
        present.append((p.grad is not None) + sum(2 << _STATES.index(name) for name in names))
        phases.append(_PHASES.index(p.phase))
        positions.append(p.position)
        groups.append(numbers[id(p.group)])
    return params, grads, states, present, phases, positions, groups, options, modes, lrs


def _pack_group(
    group: Mapping[str, Any], options: list[float], modes: list[int], lrs: list[Tensor]
) -> None:
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    if on_device:
        lrs.append(lr.float())
    rule = rule_of(group)
    betas = (group["momentum"], group["dampening"]) if "dampening" in group else group["betas"]
    first = [0.0 if on_device else lr, *betas, group.get("eps", 0.0), group["weight_decay"]]
    options += [float(value) for value in (*first, group.get("max_grad_norm") or 0.0)]
    seed = group.get("seed", 0)
    modes += [
        RULES.index(rule),
        bool(group.get("decoupled_weight_decay")),
        bool(group.get("nesterov")),
        bool(group["maximize"]),
        _BF16.index(group.get("bf16")),
        _STATE_DTYPES.index(state_option(group)),
        seed if seed < 2**63 else seed - 2**64,
        on_device,
    ]


def unpack(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    present: Sequence[int],
    phases: Sequence[int],
    positions: Sequence[int],
    groups: Sequence[int],
    options: Sequence[float],
    modes: Sequence[int],
    lrs: Sequence[Tensor],
) -> list[Prepared]:
    count = len(options) // _OPTIONS
    for name, length, expected in (
        ("present", len(present), len(params)),
        ("phases", len(phases), len(params)),
        ("positions", len(positions), len(params)),
        ("groups", len(groups), len(params)),
        ("options", len(options), count * _OPTIONS),
        ("modes", len(modes), count * _MODES),
    ):
        if length != expected:
            raise ValueError(f"adam_step_: {name} must have {expected} elements, got {length}")
    next_lr, next_grad, next_state = iter(lrs), iter(grads), iter(states)
    of_groups = [
        _unpack_group(options[i * _OPTIONS :], modes[i * _MODES :], next_lr) for i in range(count)
    ]
    prepared = []
    for i, param in enumerate(params):
        for name, number, end in (("group", groups[i], count), ("phase", phases[i], len(_PHASES))):
            if not 0 <= number < end:
                raise ValueError(f"adam_step_: there is no {name} {number}")
        grad = _next(next_grad, "grads") if present[i] & 1 else None
        names = (name for j, name in enumerate(_STATES) if present[i] & 2 << j)
        state = {name: _next(next_state, "states") for name in names}
        group, phase = of_groups[groups[i]], _PHASES[phases[i]]
        if phase != "whole" and not (rule := rule_of(group)).folds:
            raise ValueError(f"adam_step_: nothing is folded by {rule.name}")
        prepared.append(Prepared(param, grad, state, group, phase, positions[i]))
    if any(left is not None for of in (next_grad, next_state, next_lr) for left in of):
        raise ValueError("adam_step_: there are more tensors than present and modes say")
    return prepared


def _unpack_group(
    options: Sequence[float], modes: Sequence[int], lrs: Iterator[Tensor]
) -> dict[str, Any]:
    lr, beta1, beta2, eps, weight_decay, max_grad_norm = options[:_OPTIONS]
    number, decoupled, nesterov, maximize, bf16, state_dtype, seed, lr_on_device = modes[:_MODES]
    for name, value, of in (
        ("rule", number, RULES), ("format", bf16, _BF16), ("format", state_dtype, _STATE_DTYPES)
    ):  # fmt: skip
        if not 0 <= value < len(of):
            raise ValueError(f"adam_step_: no {name} has the number {value}")
    rule = RULES[number]
    group: dict[str, Any] = {
        "lr": _next(lrs, "lrs", "modes") if lr_on_device else lr,
        "weight_decay": weight_decay,
        "maximize": bool(maximize),
        "bf16": _BF16[bf16],
        "state_dtype": _STATE_DTYPES[state_dtype],
        "seed": seed % 2**64,
        "max_grad_norm": max_grad_norm or None,
    }
    if rule in (SGD, MOMENTUM):
        return group | {"momentum": beta1, "dampening": beta2, "nesterov": bool(nesterov)}
    group["betas"] = (beta1, beta2)
    if is_adam(rule):
        group |= {"eps": eps, "decoupled_weight_decay": bool(decoupled), "amsgrad": rule is AMSGRAD}
    return group


def _next(tensors: Iterator[Tensor], name: str, says: str = "present") -> Tensor:
    tensor = next(tensors, None)
    if tensor is None:
        raise ValueError(f"adam_step_: {name} has fewer tensors than {says} says")
    return tensor
