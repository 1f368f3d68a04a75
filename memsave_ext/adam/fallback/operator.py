"""Adam's operators written in torch's own, and their calls. Schemas: ``adam/operators.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..elements import plain, real
from ..formats import (
    PARAM_FORMATS,
    STATE_FORMATS,
    ParamFormat,
    StateFormat,
    param_format,
    state_format,
    state_option,
)
from ..modes import check_options
from ..place import Place
from ..precise import total
from ..rules import AMSGRAD, MOMENTUM, RULES, SGD, Rule, is_adam, rule_of
from ..shards import clip_factor
from ..states import check, check_dense
from .rules import update

STATE_NAMES = (
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "moments", "exp_avg_scale",
    "exp_avg_sq_scale", "momentum_buffer", "momentum_buffer_scale", "param_rest",
)  # fmt: skip


_Row = TypeVar("_Row", Rule, ParamFormat, StateFormat)


class Prepared(NamedTuple):
    """A parameter to step, in the form that kernels take."""

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]
    position: int = 0


class Call(NamedTuple):
    """The arguments of ``adam_step_``, but for scaling: what differs, and what all share."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[Tensor]
    positions: list[int]
    shared: dict[str, Any]


# ---- calls of the operators -------------------------------------------------------------------


def step(prepared: Iterable[Prepared], **scaling: Tensor | None) -> None:
    """Steps parameters on one device, with a call for each batch of parameters that are alike."""
    prepared = list(prepared)
    # A step is not differentiable, so autograd is skipped.
    with torch._C._AutoDispatchBelowAutograd():
        for places in alike(prepared):
            scaled = dict(scaling)
            for name in ("factor", "skip"):
                scaled[name] = of_batch(scaling.get(name), places, len(prepared))
            call = call_of([prepared[i] for i in places])
            torch.ops.memsave_ext.adam_step_(*call[:-1], **call.shared, **scaled)


def sum_of_squares(grad: Tensor) -> Tensor:
    """Calls the operator for one gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        total: Tensor = torch.ops.memsave_ext.adam_sum_of_squares([grad])
    return total


def alike(prepared: Sequence[Prepared]) -> Iterable[list[int]]:
    """Returns the places of parameters of one group that have the same states."""
    batches: dict[Any, list[int]] = {}
    for i, p in enumerate(prepared):
        names = tuple(name for name in STATE_NAMES if name in p.state)
        batches.setdefault((id(p.group), names), []).append(i)
    return batches.values()


def call_of(batch: Sequence[Prepared]) -> Call:
    first = batch[0]
    names = [name for name in STATE_NAMES if name in first.state]
    return Call(
        [p.param for p in batch],
        [p.grad for p in batch],
        [p.state[name] for p in batch for name in names],
        [p.position for p in batch],
        {"state_names": names, **options_of(first.group)},
    )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group as the operator's named arguments.

    The native part calls it once for each group and backward, when options may have been changed.

    Raises:
        TypeError, ValueError: as :func:`~..modes.check_options`.
    """
    try:
        lr, seed, norm = group["lr"], group.get("seed", 0), group.get("max_grad_norm")
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        betas = (group["momentum"], group["dampening"]) if "dampening" in group else group["betas"]
        beta1, beta2 = betas
        rule, states = rule_of(group), state_format(state_option(group)) or STATE_FORMATS[0]
        for name in ("amsgrad", "capturable", "fused"):  # read elsewhere
            _switch(group, name)
        if not 0 <= seed < 2**64 or not (norm is None or norm > 0):
            raise ValueError
        if not isinstance(group.get("states_on"), (Place, NoneType)):
            raise TypeError
        return {
            "rule": rule.name,
            "lr": 0.0 if on_device else _number(lr),
            "tensor_lr": lr.float() if on_device else None,
            "beta1": _number(beta1),
            "beta2": _number(beta2),
            "eps": _number(group["eps"]) if is_adam(rule) else 0.0,
            "weight_decay": _number(group["weight_decay"]),
            "decoupled_weight_decay": _switch(group, "decoupled_weight_decay"),
            "nesterov": _switch(group, "nesterov"),
            "maximize": _switch(group, "maximize"),
            "bf16": param_format(group.get("bf16")).name,
            "state_format": states.name,
            "seed": seed if seed < 2**63 else seed - 2**64,
            "max_grad_norm": None if norm is None else _number(norm),
        }
    except Exception:
        check_options(group)
        raise


def _number(value: Any) -> float:
    if isinstance(value, str):  # which float() may read
        raise TypeError
    return float(value)


def _switch(group: Mapping[str, Any], name: str) -> bool:
    value = group.get(name)
    if isinstance(value, str):  # "no" would be true
        raise TypeError
    return bool(value)


def of_batch(values: Tensor | None, places: list[int], count: int) -> Tensor | None:
    """Returns the scalar for all, or the elements at these places of one for each of ``count``."""
    if values is None or values.numel() == 1 or len(places) == count:
        return values
    return torch.stack([values[i] for i in places])


# ---- what the operators do --------------------------------------------------------------------


@torch.no_grad()
def adam_step_(
    *lists: Any,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    **shared: Any,
) -> None:
    prepared = checked(*lists, **shared)
    for i, p in enumerate(prepared):
        of_one = [_of_one(values, i, len(prepared)) for values in (factor, skip)]
        by, skips = _scaling(p, grad_scale, found_inf, *of_one)
        if not skips:
            update(p.param, p.grad, p.state, p.group, position=p.position, factor=by)


def fake_adam_step_(
    *lists: Any,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    **shared: Any,
) -> None:
    checked(*lists, **shared)


def checked(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    positions: Sequence[int],
    *,
    state_names: Sequence[str],
    **options: Any,
) -> list[Prepared]:
    """Returns the parameters of a call.

    Raises:
        ValueError, RuntimeError: the call cannot be made.
    """
    group, count = _group(**options), len(params)
    for name in state_names:
        if name not in STATE_NAMES:
            raise ValueError(f"adam_step_: no state has the name {name}")
    for list_name, values, expected in (
        ("grads", grads, count),
        ("states", states, count * len(state_names)),
        ("positions", positions, count),
    ):
        if len(values) != expected:
            raise ValueError(
                f"adam_step_: {list_name} must have {expected} elements, got {len(values)}"
            )
    tensors = iter(states)
    prepared = [
        Prepared(
            param,
            grads[i],
            {name: next(tensors) for name in state_names},
            group,
            positions[i],
        )
        for i, param in enumerate(params)
    ]
    for p in prepared:
        check(p.param, p.grad, p.state, p.group)
        if p.param.device != params[0].device:
            raise ValueError(
                "adam_step_: params must lie on one device, got "
                f"{params[0].device} and {p.param.device}"
            )
    return prepared


def check_named(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    rule: str,
    bf16: str,
    state_format: str,
) -> None:
    """As :func:`~..states.check`, with the names of rows; ``bf16``: empty for None."""
    group = _group(rule, 0.0, 0.0, bf16=bf16 or None, state_format=state_format)
    check(param, grad, state, group)


def _group(
    rule: str,
    lr: float,
    weight_decay: float,
    tensor_lr: Tensor | None = None,
    beta1: float = 0.0,
    beta2: float = 0.0,
    eps: float = 0.0,
    decoupled_weight_decay: bool = False,
    nesterov: bool = False,
    maximize: bool = False,
    bf16: str | None = None,
    state_format: str = "as_param",
    seed: int = 0,
    max_grad_norm: float | None = None,
) -> dict[str, Any]:
    """Returns the param group whose options these are."""
    named = _named(RULES, "rule", rule)
    group: dict[str, Any] = {
        "lr": lr if tensor_lr is None else tensor_lr,
        "weight_decay": weight_decay,
        "maximize": maximize,
        "bf16": _named(PARAM_FORMATS, "format", bf16).name,
        "state_dtype": _named(STATE_FORMATS, "format", state_format).option,
        "seed": seed % 2**64,
        "max_grad_norm": max_grad_norm,
    }
    if named in (SGD, MOMENTUM):
        return group | {"momentum": beta1, "dampening": beta2, "nesterov": nesterov}
    group["betas"] = (beta1, beta2)
    if is_adam(named):
        group |= {
            "eps": eps,
            "decoupled_weight_decay": decoupled_weight_decay,
            "amsgrad": named is AMSGRAD,
        }
    return group


def _named(rows: Sequence[_Row], what: str, name: str | None) -> _Row:
    for row in rows:
        if row.name == name:
            return row
    raise ValueError(f"adam_step_: there is no {what} {name}")


@torch.no_grad()
def adam_sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    return total(torch.stack([_square(grad) for grad in grads]))


def fake_adam_sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=grads[0].device)


def _square(grad: Tensor) -> Tensor:
    """Returns one gradient's sum of squares in float64."""
    check_dense(grad)
    return total(real(plain(grad)).double().square())


def _of_one(values: Tensor | None, i: int, count: int) -> Tensor | None:
    """Returns the scalar of one parameter, where there is one for each or one for all."""
    if values is None or values.numel() == 1:
        return None if values is None else values.view(())
    if values.numel() != count:
        raise ValueError(
            "adam_step_: factor and skip must be scalars or have one element for each parameter"
        )
    return values[i]


def _scaling(
    p: Prepared,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    factor: Tensor | None,
    skip: Tensor | None,
) -> tuple[Tensor | None, bool]:
    """Returns what the gradient is multiplied by (None: 1), and whether the step is skipped.

    Sets ``found_inf`` to 1 where a gradient with a loss scale is not finite.
    """
    if factor is not None:
        return factor, skip is not None and bool(skip)
    max_norm = p.group["max_grad_norm"]
    if grad_scale is None and max_norm is None:
        return None, False
    squared = _square(p.grad)
    inverse = (
        torch.ones((), dtype=torch.double, device="cpu")
        if grad_scale is None
        else 1 / grad_scale.double()
    )
    by = inverse.to(squared.device)
    if max_norm is not None:
        by = by * clip_factor(squared.sqrt() * by, max_norm)
    if grad_scale is None:
        return by, False
    assert found_inf is not None
    # The squares of large doubles are not finite, either.
    if skips := not (bool(squared.isfinite()) or bool(plain(p.grad).isfinite().all())):
        found_inf.fill_(1)
    return by, skips
