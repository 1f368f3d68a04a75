"""Tries whether an optimizer's own step() is one for each parameter by itself."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..shared.dtensor import local_tensor
from .own_optimizer import OF_EACH, equal, part_of, restricted, step_of, view, view_class

_STEPS = 3
_MOST_GROUPS = 8


def find_counts(optimizer: Optimizer) -> tuple[str, ...]:
    """Returns the names of options of param groups that a step changes, as a count of steps.

    Small parameters are stepped together and one by one, and must come out the same, with their
    states and groups. They begin without states, and with those that there are, cut to their size,
    where a step needs what the constructor made. Nothing of the optimizer changes.

    Raises:
        ValueError: they come out differently, or a step raises.
    """
    name = type(optimizer).__name__
    tried = _Trial(optimizer)
    if not tried.groups:
        return ()
    try:
        together, alone = tried.run_both()
    except Exception as error:
        reason = repr(error) if isinstance(error, KeyError) else error  # prints the key alone
        where = (
            " It was tried without states, and with those that the optimizer has."
            if optimizer.state
            else ""
        )
        raise ValueError(
            f"in_backward: {name} cannot step one parameter without the others; trying that "
            f"raised: {reason}.{where}"
        ) from error
    for of_one, of_other in zip(together, alone, strict=True):
        for key, value in of_one.items():
            if not equal(value, of_other.get(key)):
                raise ValueError(
                    f"in_backward: {name} steps a parameter differently alone than together with "
                    f"others ({key!r} differs), as it needs all gradients or counts steps for all "
                    "parameters. Call its step() after backward instead."
                )
    changed = {
        key: None
        for before, after in zip(tried.groups, together, strict=False)
        for key, value in after.items()
        if key != "params" and not equal(before.get(key), value)
    }
    return tuple(changed)


class _Trial:
    """Two small parameters for each group of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind: Any = type(optimizer)
        left_out = ("state", "param_groups")  # which have one parameter's size, or all of them
        self._attributes = {k: v for k, v in optimizer.__dict__.items() if k not in left_out}
        self._state = optimizer.state
        params = (p for group in optimizer.param_groups for p in group["params"])
        self._shapes = {p.shape for p in params if not is_lazy(p)}
        self.groups: list[dict[str, Any]] = []
        self._like: list[list[Tensor]] = []
        self._with_states = False
        for group in optimizer.param_groups:
            real = (p for p in group["params"] if not (is_lazy(p) or p.is_meta))
            like = [p for p in real if p.requires_grad][:2]
            if like and len(self.groups) < _MOST_GROUPS:
                self._like.append([like[0], like[-1]])
                self.groups.append(part_of(group, self._like[-1]))

    def run_both(self) -> list[list[dict[str, Any]]]:
        """Returns what ``run()`` does, together and alone."""
        try:
            return [self.run(alone=False), self.run(alone=True)]
        except Exception:
            self._with_states = any(self._state.get(p) for like in self._like for p in like)
            if not self._with_states:
                raise
        return [self.run(alone=False), self.run(alone=True)]

    def run(self, *, alone: bool) -> list[dict[str, Any]]:
        """Returns the groups after some steps; then, of each parameter, its values and state; and
        the optimizer's numbers."""
        kind, step = view_class(self._kind), step_of(self._kind)
        params = [[_made(like, i) for i, like in enumerate(listed)] for listed in self._like]
        state: dict[Tensor, Any] = defaultdict(dict)
        if self._with_states:
            for listed, likes in zip(params, self._like, strict=True):
                for param, like in zip(listed, likes, strict=True):
                    state[param] = _cut(self._state.get(like, {}))
        attributes = {**_copies(self._attributes, self._shapes), "state": state}
        groups = [
            {
                **_copies({k: v for k, v in group.items() if k != "params"}, self._shapes),
                "params": listed,
            }
            for group, listed in zip(self.groups, params, strict=True)
        ]
        devices = {p.device for listed in params for p in listed if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            for number in range(_STEPS):
                for i, param in enumerate(p for listed in params for p in listed):
                    param.grad = _values(param, i + 2 * number + 1) * (i + 1)
                if not alone:
                    step(view(kind, attributes, groups))
                    continue
                changes: list[dict[str, Any]] = []
                for i, group in enumerate(groups):
                    for param in params[i]:
                        (one,) = restricted([group], [param], [0], group).values()
                        step(view(kind, attributes, [one]))
                    changes.append({**one, **{k: group[k] for k in OF_EACH if k in group}})
                groups = changes
        states = [
            {"params": p.detach(), **attributes["state"][p]} for listed in params for p in listed
        ]
        return [*({**g, "params": None} for g in groups), *states, _numbers(attributes)]


def _values(like: Tensor, number: int) -> Tensor:
    return (
        torch.linspace(-1, 0.3 * number, like.numel(), device=like.device)
        .to(like.dtype)
        .view(like.shape)
    )


def _cut(value: Any) -> Any:
    """Returns a copy of what a state has, its tensors with the sizes of `_made`."""
    if isinstance(value, Tensor):
        local = local_tensor(value)
        made = local.new_zeros([min(size, 2) for size in value.shape])
        part = local[tuple(slice(size) for size in made.shape)]
        made[tuple(slice(size) for size in part.shape)] = part
        return made
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list) else copy.copy(value)


def _made(like: Tensor, number: int) -> Tensor:
    shape = [min(size, 2) for size in like.shape]
    empty = torch.empty(shape, dtype=like.dtype, device=like.device)
    return _values(empty, number + 1).requires_grad_()


def _copies(fields: dict[str, Any], shapes: Container[torch.Size]) -> dict[str, Any]:
    """Returns the same with copies of what a step could change in place.

    Args:
        shapes: of the parameters. Of tensors that are like these there may be one for each: they
            are cut, as the parameters are.
    """
    copies: dict[int, Any] = {}
    return {name: _copy(value, shapes, copies) for name, value in fields.items()}


def _copy(value: Any, shapes: Container[torch.Size], copies: dict[int, Any]) -> Any:
    """``copies``: those of containers by id, as one may contain itself."""
    if isinstance(value, Tensor):
        return _cut(value.detach()) if value.shape in shapes else value.detach().clone()
    if type(value) is tuple:
        return tuple(_copy(item, shapes, copies) for item in value)
    if not isinstance(value, (dict, list, deque, set)):
        return value
    if (known := copies.get(id(value))) is not None:
        return known
    made: Any = copy.copy(value)
    copies[id(value)] = made
    if isinstance(value, set):
        return made
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        made[key] = _copy(item, shapes, copies)
    return made


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns what can be compared between two trials, whose parameters are not the same."""
    kinds = (int, float, Tensor, list, deque)
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, kinds)
        or (isinstance(value, dict) and all(isinstance(key, str) for key in value))
    }
