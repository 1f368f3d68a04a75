"""Runs an optimizer's own step() for some of its parameters."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import modes
from .dtensor import is_dtensor
from .shards import clip_factor

# What a view does not share with its optimizer: the groups, step hooks, which belong to the step as
# a whole, and what GradScaler tells a step of whole gradients, which these are not any more.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN = ("param_groups", *_HOOKS, "grad_scale", "found_inf")
_NONE: OrderedDict[int, Any] = OrderedDict()


@functools.cache
def view_class(own: Any) -> type[Optimizer]:
    """Returns a class of views: objects with an optimizer's attributes, but for ``_OWN``.

    Slots of a class come before the attributes of an object.
    """
    return type(own.__name__, (own,), {"__slots__": _OWN, "__module__": own.__module__})


@functools.cache
def step_of(own: Any) -> Any:
    """Returns the class's step(), without what calls step hooks and profiles around it."""
    step: Any = own.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def view(kind: type[Optimizer], attributes: dict[str, Any], groups: list[dict[str, Any]]) -> Any:
    """Returns a view with these attributes, which it shares, and these groups."""
    made: Any = object.__new__(kind)
    made.__dict__ = attributes
    made.param_groups = groups
    made._optimizer_step_pre_hooks = made._optimizer_step_post_hooks = _NONE
    return made


def restricted(
    groups: list[dict[str, Any]], params: list[Tensor], numbers: list[int], counts: Iterable[str]
) -> dict[int, dict[str, Any]]:
    """Returns, by number, copies of the groups with these parameters alone.

    The options are those of this moment, so that a scheduler may change them between two steps.

    Args:
        numbers: those of the groups of the parameters.
        counts: options that a step changes, maybe in place.
    """
    chosen: dict[int, dict[str, Any]] = {}
    for param, number in zip(params, numbers, strict=True):
        if number in chosen:
            chosen[number]["params"].append(param)
        else:
            chosen[number] = {**groups[number], "params": [param]}
    for name in counts:
        for group in chosen.values():
            if isinstance(group.get(name), Tensor):
                group[name] = group[name].clone()
    return chosen


@torch.no_grad()
def scale(
    params: list[Tensor], norms: list[float | None], scalars: tuple[Tensor | None, ...]
) -> list[bool]:
    """Unscales and clips the gradients in ``.grad``. Returns which of them are to be used.

    Of DTensors, all processes find the same, in a collective for each gradient and question.

    Args:
        norms: what each gradient is clipped to; None: not.
        scalars: grad_scale and found_inf, of a GradScaler; factor and skip, where the norm of all
            gradients is known. Each is None where there is none.
    """
    grad_scale, found_inf, factor, skip = scalars
    used = []
    for param, max_norm in zip(params, norms, strict=True):
        grad = param.grad
        assert grad is not None
        if factor is not None:
            used.append(skip is None or not skip.item())
            grad.mul_(factor)
            continue
        found = torch.zeros((), device=grad.device)
        if grad_scale is not None:
            inverse = grad_scale.double().reciprocal().float()  # as GradScaler.unscale_()
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, inverse)
            assert found_inf is not None
            found_inf.copy_(torch.maximum(found_inf, found))
        used.append(grad_scale is None or not found.item())
        if max_norm is not None:
            modes.check_norm("max_grad_norm", max_norm)
            norm: Any = torch.nn.utils.get_total_norm([grad])  # as clip_grad_norm_()
            norm = norm.full_tensor() if is_dtensor(norm) else norm
            grad.mul_(clip_factor(norm, max_norm).to(grad.device))
    return used
