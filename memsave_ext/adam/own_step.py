"""Runs an optimizer's own step() for some of its parameters."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .dtensor import is_dtensor

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
    groups: list[dict[str, Any]], params: list[Tensor], numbers: list[int]
) -> list[dict[str, Any]]:
    """Returns the groups with these parameters alone. ``numbers`` are those of their groups.

    The options are those of this moment, so that a scheduler may change them between two steps.
    """
    if len(params) == 1:
        return [{**groups[numbers[0]], "params": params}]
    by_group: dict[int, list[Tensor]] = {}
    for param, number in zip(params, numbers, strict=True):
        by_group.setdefault(number, []).append(param)
    return [{**groups[number], "params": some} for number, some in by_group.items()]


@torch.no_grad()
def scale(
    params: list[Tensor], groups: Iterable[dict[str, Any]], scalars: tuple[Tensor | None, ...]
) -> list[bool]:
    """Unscales and clips the gradients in ``.grad``. Returns which of them are to be used.

    Args:
        groups: the group of each parameter; ``max_grad_norm`` in it clips.
        scalars: grad_scale and found_inf, of a GradScaler; factor and skip, where the norm of all
            gradients is known. Each is None where there is none.
    """
    grad_scale, found_inf, factor, skip = scalars
    used = []
    for param, group in zip(params, groups, strict=True):
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
        if (max_norm := group.get("max_grad_norm")) is not None:
            norm = torch.nn.utils.get_total_norm([grad])  # as clip_grad_norm_()
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(grad.device))
    return used


def refuse_group_steps(optimizer: Optimizer) -> None:
    """Raises ValueError where its step() is not one for each parameter by itself.

    Found by a step of a small parameter, made for it, which changes nothing of the optimizer.
    """
    own: Any = type(optimizer)
    for group in optimizer.param_groups:
        like = next((p for p in group["params"] if p.requires_grad and not p.is_meta), None)
        if like is None:
            continue
        shape = [min(size, 2) for size in like.shape]
        param = torch.ones(shape, dtype=like.dtype, device=like.device).requires_grad_()
        param.grad = torch.ones_like(param)
        attributes = {**optimizer.__dict__, "state": defaultdict(dict)}
        before, tried = {**group, "params": [param]}, {**group, "params": [param]}
        devices = [like.device] if like.is_cuda else []
        try:
            with torch.random.fork_rng(devices=devices):
                step_of(own)(view(view_class(own), attributes, [tried]))
        except Exception as error:
            raise ValueError(
                f"in_backward: {own.__name__} cannot step a parameter by itself: {error}"
            ) from error
        changed = [*_changed(before, tried), *_changed(optimizer.__dict__, attributes)]
        if changed:
            raise ValueError(
                f"in_backward: a step of {own.__name__} changes {', '.join(changed)}, which all "
                "parameters share, and in backward it would do so once for each of them. Step it "
                "after backward."
            )


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the names of numbers and tensors that are others now."""
    kinds = (int, float, complex, Tensor)
    return [
        repr(name)
        for name, value in after.items()
        if isinstance(value, kinds)
        and not isinstance(value, bool)
        and value is not (old := before.get(name))
        and (isinstance(value, Tensor) or isinstance(old, Tensor) or value != old)
    ]


def refuse_dtensors_that_clip(groups: list[dict[str, Any]]) -> None:
    if any(
        g.get("max_grad_norm") is not None and any(map(is_dtensor, g["params"])) for g in groups
    ):
        raise ValueError(
            "max_grad_norm would clip each process's part of a DTensor to its own norm: leave it "
            "out"
        )
