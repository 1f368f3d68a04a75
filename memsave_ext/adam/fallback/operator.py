"""Adam's operators written in torch's own. ``memsave_ext/_ops.py`` describes their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..elements import plain, real
from ..precise import total
from ..states import check, check_dense
from .arguments import LISTS, Prepared, pack, unpack
from .update import update


def step(prepared: Iterable[Prepared], **scaling: Tensor | None) -> None:
    """Calls the operator for parameters on one device."""
    # A step is not differentiable, so autograd is skipped.
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.memsave_ext.adam_step_(*pack(prepared), **scaling)


def sum_of_squares(grad: Tensor) -> Tensor:
    """Calls the operator for one gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        total: Tensor = torch.ops.memsave_ext.adam_sum_of_squares([grad])
    return total


@torch.no_grad()
def adam_step_(*arguments: Any, **scaling: Tensor | None) -> None:
    prepared = checked(*arguments[:LISTS])
    names = ("grad_scale", "found_inf", "factor", "skip")
    scaling |= dict(zip(names, arguments[LISTS:], strict=False))
    for i, p in enumerate(prepared):
        of_one = dict(scaling)
        for name in names[2:]:
            of_one[name] = _of_one(scaling.get(name), i, len(prepared))
        by, skips = _scaling(p, **of_one)
        if not skips:
            update(p.param, p.grad, p.state, p.group, position=p.position, phase=p.phase, factor=by)


def checked(*lists: Any) -> list[Prepared]:
    """Unpacks what pack() has made, and raises where a parameter cannot be stepped."""
    prepared = unpack(*lists)
    for p in prepared:
        check(p.param, p.grad, p.state, p.group, p.phase)
        if p.param.device != prepared[0].param.device:
            raise ValueError(
                "adam_step_: params must lie on one device, got "
                f"{prepared[0].param.device} and {p.param.device}"
            )
    return prepared


def fake_adam_step_(*arguments: Any, **_: Any) -> None:
    checked(*arguments[:LISTS])


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
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """Returns what the gradient is multiplied by (None: 1), and whether the step is skipped.

    Sets ``found_inf`` to 1 where a gradient with a loss scale is not finite.
    """
    if factor is not None:
        return factor, skip is not None and bool(skip)
    max_norm = p.group["max_grad_norm"]
    if p.grad is None or (grad_scale is None and max_norm is None):
        return None, False
    squared = _square(p.grad)
    inverse = torch.ones((), dtype=torch.double) if grad_scale is None else 1 / grad_scale.double()
    by = inverse.to(squared.device)
    if max_norm is not None:
        by = by * (max_norm / (squared.sqrt() * by + 1e-6)).clamp(max=1)
    if grad_scale is None:
        return by, False
    assert found_inf is not None
    if skips := not bool(squared.isfinite()):
        found_inf.fill_(1)
    return by, skips
