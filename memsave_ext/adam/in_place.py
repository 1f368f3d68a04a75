"""Optimizers that change their kind in place, and back: who holds the object holds the new kind."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..elsewhere.gradients import bring_back
from ..shared.dtensor import is_dtensor, local_tensor, put_local
from . import modes, owners
from .any_optimizer import in_backward
from .files import Files
from .native import Native
from .own_optimizer import renew_counter
from .rules import rule_of

_CPU = torch.device("cpu")
# Options of a group that are not the same before and after: those that only this package's
# optimizers have, and the one that a GradScaler sets.
_OF_GROUPS = (*modes.DEFAULTS, "fused")


def step_in_backward(optimizer: Optimizer, **options: Any) -> Callable[[], None]:
    """Calls :func:`in_backward`, which may raise.

    Returns a function that makes the optimizer what it was, with the states that it has by then.
    """
    own, before = type(optimizer), dict(optimizer.__dict__)
    groups = [set(group) for group in optimizer.param_groups]
    taken = in_backward(optimizer, **options)
    made = {name for name, value in taken.__dict__.items() if value is not before.get(name)}

    def undo() -> None:
        owners.release(taken)
        bring_back(p for group in taken.param_groups for p in group["params"])
        after = taken.__dict__
        kept = {name: after[name] for name in {*before} - made if name in after}
        given_back = {name: before[name] for name in {*before} & made}
        taken.__class__, taken.__dict__ = own, {**given_back, **kept, **_of_users(after, made)}
        for group, names in zip(taken.param_groups, groups, strict=False):
            if "max_grad_norm" not in names:
                group.pop("max_grad_norm", None)
        renew_counter(taken)

    return undo


def become(optimizer: Optimizer, kind: type[Any], **options: Any) -> Callable[[], None]:
    """Makes an optimizer one of this package's, with its groups, states and hooks.

    Args:
        optimizer: torch's of the same rule, or this package's.
        kind: the class that it is to have.
        **options: of ``kind``, beside those that the groups have.

    Where its states are smaller, its ``state_dict()`` has them as torch's does, so that a training
    can go on from it with either. Those lie in a file without a name, in Python's temporary folder,
    as there may be no memory for them; where no file can be made, in the CPU's memory.

    Returns:
        A function that makes it what it was, with its states converted back.

    Raises:
        ValueError: its ``step()`` has been replaced, other than by a scheduler; it cannot step in
            backward with an option that it has; its states have bits of the parameters, or lie
            elsewhere.
    """
    _check(optimizer)
    own, had = type(optimizer), options_outside_groups(optimizer)
    condition = optimizer._accumulate_when if isinstance(optimizer, Native) else None
    defaults = taken_by(own, optimizer.defaults)
    of_groups = [
        {name: group[name] for name in _OF_GROUPS if name in group}
        for group in optimizer.param_groups
    ]
    new = {name: value for name, value in options.items() if name in modes.DEFAULTS}
    given = taken_by(kind, defaults) | had | options
    names = {*optimizer.__dict__}
    _remake(optimizer, kind, [of | new for of in of_groups], given, condition, set())
    made = {*optimizer.__dict__} - names
    hook = optimizer.register_state_dict_post_hook(_as_torchs) if "state_dtype" in new else None

    def undo() -> None:
        _remake(optimizer, own, of_groups, defaults | had, condition, made)
        if hook is not None:
            hook.remove()

    return undo


def _of_users(attributes: dict[str, Any], made: set[str]) -> dict[str, Any]:
    """Returns those of an optimizer's attributes that a user has given it.

    Args:
        made: the names of those that its class has made.
    """
    names = (name for name in attributes if name not in made and not name.startswith("_"))
    return {name: attributes[name] for name in names}


def _as_torchs(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    try:
        place = Files(tempfile.gettempdir())
        place.reserve(
            local_tensor(p).numel() * torch.float32.itemsize
            for group in optimizer.param_groups
            for _ in rule_of(group).moments
            for p in group["params"]
        )
        return modes.to_fp32(state_dict, lambda tensor: _put(tensor, place))
    except (OSError, ValueError):  # no room in it, or no folder
        return modes.to_fp32(state_dict, Tensor.cpu)


def _put(tensor: Tensor, place: Files) -> Tensor:
    """Returns a tensor on the CPU whose values, of a DTensor those of its shard, lie in a file."""
    moved = tensor.detach().cpu()
    if not is_dtensor(moved):
        return place.put(moved, _CPU)
    put_local(moved, place.put(local_tensor(moved), _CPU))
    return moved


def _check(optimizer: Optimizer) -> None:
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(f"step() of this {type(optimizer).__name__} has been replaced")
    if isinstance(optimizer, Native) and optimizer.clip_global_norm is not None:
        raise ValueError("clip_global_norm needs all gradients, which a step in backward frees")
    if isinstance(optimizer, Native) and optimizer._reductions:
        raise ValueError("the optimizer is attached to a DistributedDataParallel module")
    for group in optimizer.param_groups:
        if modes.of_group(group, "bf16") not in (None, "stochastic"):
            raise ValueError(
                "the optimizer's bf16= mode keeps bits of the parameters in its states, which "
                "would be lost"
            )
        if group.get("states_on") is not None:
            raise ValueError("states_on= keeps the optimizer's states elsewhere already")


def options_outside_groups(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the options that this package's optimizers keep outside of their groups."""
    if not isinstance(optimizer, Native):
        return {}
    return {
        "in_backward": optimizer.in_backward,
        "small_bytes": optimizer._small_bytes,
        "bucket_bytes": optimizer._bucket_bytes,
        "clip_global_norm": optimizer.clip_global_norm,
        "grad_scaler": optimizer.grad_scaler,
        "grads_on": None if optimizer._gradients is None else optimizer._gradients.where,
    }


def _remake(
    optimizer: Any,
    kind: type[Any],
    of_groups: list[dict[str, Any]],
    options: dict[str, Any],
    condition: Callable[[], object] | None,
    made: set[str],
) -> None:
    """Constructs the object anew, as one of another class, with the states that it has.

    Args:
        of_groups: the options of each group that are among ``_OF_GROUPS``.
        condition: that of ``accumulate_when()``.
        made: names of attributes that the class has made which the object had until now.
    """
    own, before = type(optimizer), dict(optimizer.__dict__)
    count = len(optimizer.param_groups)
    of_groups = [*of_groups, *({} for _ in range(count))][:count]  # some may have been added
    saved = None
    if optimizer.state:
        plain = isinstance(optimizer, Native)
        saved = optimizer.to_fp32_state_dict() if plain else optimizer.state_dict()
        for group, more in zip(saved["param_groups"], of_groups, strict=True):
            group["fused"] = more.get("fused")
    groups = [
        {n: v for n, v in group.items() if n not in _OF_GROUPS} | more
        for group, more in zip(before["param_groups"], of_groups, strict=True)
    ]
    was_in_backward = isinstance(optimizer, Native) and optimizer.in_backward
    if isinstance(optimizer, Native):
        owners.release(optimizer)
    try:
        optimizer.__class__, optimizer.__dict__ = kind, {}
        kind.__init__(optimizer, groups, **options)
        optimizer.__dict__ |= _of_users(before, made | {*optimizer.__dict__})
        for name, value in before.items():
            if name.startswith("_optimizer_") or name in ("step", "_opt_called"):
                optimizer.__dict__[name] = value
        renew_counter(optimizer)
        if saved is not None:
            gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(saved)  # which forgets the gradients of an open step
            for param, grad in gradients:
                param.grad = grad
        if condition is not None:
            optimizer.accumulate_when(condition)
        _put_into_those_before(optimizer, before)
    except BaseException:
        if "_stepper" in optimizer.__dict__:
            owners.release(optimizer)
        optimizer.__class__, optimizer.__dict__ = own, before
        if isinstance(optimizer, Native):
            owners.note_optimizer(optimizer)
        if was_in_backward:
            optimizer._attach(p for group in optimizer.param_groups for p in group["params"])
        raise


def _put_into_those_before(optimizer: Any, before: dict[str, Any]) -> None:
    """A training loop may have kept its groups, in which it sets a rate, or its states."""
    for old, new in zip(before["param_groups"], optimizer.param_groups, strict=True):
        old.clear()
        old.update(new)
    before["state"].clear()
    before["state"].update(optimizer.state)
    optimizer.param_groups, optimizer.state = before["param_groups"], before["state"]


def taken_by(kind: type[Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of an optimizer's defaults that a class's constructor has names for."""
    names = inspect.signature(kind.__init__).parameters
    return {name: value for name, value in defaults.items() if name in names}
