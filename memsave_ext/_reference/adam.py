"""Adam's operators in torch's own. Their arguments: ``memsave_ext/_ops.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import adam_update

_STATES = (
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale",
    "param_rest",
)  # fmt: skip
_PHASES: tuple[adam_update.Phase, ...] = ("whole", "first_fold", "fold", "close")
_BF16 = (None, "stochastic", "kahan", "split")
_STATE_DTYPES = (None, torch.bfloat16, "8bit")
_OPTIONS, _MODES = 6, 7  # how many of each group


class Prepared(NamedTuple):
    """A parameter that is to be stepped, as kernels take it."""

    param: Tensor
    grad: Tensor | None  # None for zeros
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]
    phase: adam_update.Phase
    position: int = 0


def step(prepared: Iterable[Prepared], **scaling: Tensor | None) -> None:
    """The call of the operator for parameters on one device."""
    # A step has no gradient: autograd has no part in it.
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.memsave_ext.adam_step_(*pack(prepared), **scaling)


def sum_of_squares(grad: Tensor) -> Tensor:
    """The call of the operator for one gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        total: Tensor = torch.ops.memsave_ext.adam_sum_of_squares([grad])
    return total


@torch.no_grad()
def adam_step_(
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
    loss_scale: Tensor | None = None,
    found: Tensor | None = None,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    lists = params, grads, states, present, phases, positions, groups, options, modes, lrs
    for p in checked(*lists):
        by, skips = _scaling(p, loss_scale, found, factor, skip)
        if not skips:
            adam_update.update(
                p.param, p.grad, p.state, p.group, position=p.position, phase=p.phase, factor=by
            )


def checked(*lists: Any) -> list[Prepared]:
    """What pack() has made into lists."""
    prepared = _unpack(*lists)
    for p in prepared:
        adam_update.check(p.param, p.grad, p.state, p.group, p.phase)
        if p.param.device != prepared[0].param.device:
            raise ValueError(
                "adam_step_: params must lie on one device, got "
                f"{prepared[0].param.device} and {p.param.device}"
            )
    return prepared


def fake_adam_step_(*arguments: Any, **_: Any) -> None:
    checked(*arguments[:10])


@torch.no_grad()
def adam_sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([_square(grad) for grad in grads]).sum()


def fake_adam_sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=grads[0].device)


def _square(grad: Tensor) -> Tensor:
    """The sum of squares of one."""
    if grad.layout != torch.strided:
        raise RuntimeError(adam_update.SPARSE)
    values = adam_update.plain(grad)
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.double().square().sum()


def _scaling(
    p: Prepared,
    loss_scale: Tensor | None,
    found: Tensor | None,
    factor: Tensor | None,
    skip: Tensor | None,
) -> tuple[Tensor | None, bool]:
    """What a gradient is multiplied by, and whether it is left out."""
    if factor is not None:
        return factor, skip is not None and bool(skip)
    max_norm = p.group["max_grad_norm"]
    if p.grad is None or (loss_scale is None and max_norm is None):
        return None, False
    squared = _square(p.grad)
    inverse = torch.ones((), dtype=torch.double) if loss_scale is None else 1 / loss_scale.double()
    by = inverse.to(squared.device)
    if max_norm is not None:
        by = by * (max_norm / (squared.sqrt() * by + 1e-6)).clamp(max=1)
    if loss_scale is None:
        return by, False
    assert found is not None
    if skips := not bool(squared.isfinite()):
        found.fill_(1)
    return by, skips


def pack(prepared: Iterable[Prepared]) -> tuple[list[Any], ...]:
    params, grads, states, present, phases, positions, groups = ([] for _ in range(7))
    options: list[float] = []
    modes: list[int] = []
    lrs: list[Tensor] = []
    numbers: dict[int, int] = {}  # of groups, by id
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
    first = [0.0 if on_device else lr, *group["betas"], group["eps"], group["weight_decay"]]
    options += [float(value) for value in (*first, group.get("max_grad_norm") or 0.0)]
    seed = group.get("seed", 0)
    modes += [
        bool(group["decoupled_weight_decay"]),
        bool(group["amsgrad"]),
        bool(group["maximize"]),
        _BF16.index(group.get("bf16")),
        _STATE_DTYPES.index(_without_default(group.get("state_dtype"))),
        seed if seed < 2**63 else seed - 2**64,
        on_device,
    ]


def _without_default(dtype: Any) -> Any:
    return None if dtype == torch.float32 else dtype


def _unpack(
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
        prepared.append(Prepared(param, grad, state, group, phase, positions[i]))
    if any(left is not None for of in (next_grad, next_state, next_lr) for left in of):
        raise ValueError("adam_step_: there are more tensors than present and modes say")
    return prepared


def _unpack_group(options: Sequence[float], modes: Sequence[int], lrs: Any) -> dict[str, Any]:
    lr, beta1, beta2, eps, weight_decay, max_grad_norm = options[:_OPTIONS]
    decoupled, amsgrad, maximize, bf16, state_dtype, seed, lr_on_device = modes[:_MODES]
    for number, of in ((bf16, _BF16), (state_dtype, _STATE_DTYPES)):
        if not 0 <= number < len(of):
            raise ValueError(f"adam_step_: no format has the number {number}")
    return {
        "lr": next(lrs) if lr_on_device else lr,
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": bool(decoupled),
        "amsgrad": bool(amsgrad),
        "maximize": bool(maximize),
        "bf16": _BF16[bf16],
        "state_dtype": _STATE_DTYPES[state_dtype],
        "seed": seed % 2**64,
        "max_grad_norm": max_grad_norm or None,
    }


def _next(tensors: Any, name: str) -> Tensor:
    tensor: Tensor | None = next(tensors, None)
    if tensor is None:
        raise ValueError(f"adam_step_: {name} has fewer tensors than present says")
    return tensor
