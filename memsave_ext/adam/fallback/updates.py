"""Steps an optimizer's parameters. All of them are checked before the first is stepped."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoint.function import note_step
from .. import dtensor, modes
from ..rules import is_complete
from ..shards import sharding_of
from ..state_machine import StateMachine
from ..states import check, make_state, publish_states
from .operator import Prepared, step
from .params import Params
from .records import Records
from .scaling import Scaling


class Update(NamedTuple):
    param: Tensor
    group: dict[str, Any]
    grad: Tensor | None  # None where folded gradients are closed without another gradient


def apply(
    updates: list[Update],
    params: Params,
    records: Records,
    scaling: Scaling,
    machine: StateMachine,
    scale: Tensor | None,
    *,
    folds: bool,
) -> None:
    """Steps parameters of the optimizer of ``params``, or folds their gradients.

    ``scale`` is the loss scale of the gradients; None without one.
    """
    if params.own_step:
        try:
            return _apply_by_own(updates, params, scaling, scale)
        except BaseException:
            machine.fail(len(updates))  # which of them were stepped?
            raise
    optimizer = params.optimizer()
    assert optimizer is not None
    for group in {id(group): group for _, group, _ in updates}.values():
        modes.check_options(group)
    if scaling.clips_all:
        modes.refuse_two_norms(params.groups())
    _make_and_check_states(optimizer, updates, records, folds=folds)
    by_device: dict[torch.device, list[Update]] = {}
    for made in updates:
        by_device.setdefault(made.param.device, []).append(made)
    positions = {id(param): i for i, param in enumerate(params)}
    for on_device in by_device.values():
        prepared = [
            _prepare(made, optimizer, records, folds=folds, position=positions[id(made.param)])
            for made in on_device
        ]
        _step(on_device, prepared, scaling, scale)
        for made, p in zip(on_device, prepared, strict=True):
            records.set_folded(optimizer.state.get(made.param, {}), folds)
            if not folds:
                records.note_versions(p.param, p.state)


def asks_others(
    param: Tensor, group: dict[str, Any], scaling: Scaling, scale: Tensor | None
) -> bool:
    """Whether a step needs the whole gradient of which this process has a shard."""
    if scaling.clips_all or not dtensor.is_dtensor(param):
        return False
    clips = group.get("max_grad_norm") is not None
    return (clips or scale is not None) and sharding_of(param)[0] != 0


def _step(
    updates: list[Update], prepared: list[Prepared], scaling: Scaling, scale: Tensor | None
) -> None:
    """Steps parameters on one device. Shards that must be scaled alike ask for the others first,
    together with those that are split and clipped alike."""
    parts: dict[tuple[int, Any], list[int]] = {}
    others: list[Prepared] = []
    for i, (param, group, grad) in enumerate(updates):
        if grad is not None and asks_others(param, group, scaling, scale):
            key = sharding_of(param)[0], group.get("max_grad_norm")
            parts.setdefault(key, []).append(i)
        else:
            others.append(prepared[i])
    for part in parts.values():
        of_part = [prepared[i] for i in part]
        step(of_part, **scaling.agree(updates[part[0]].param, of_part, scale))
    if others:
        step(others, **scaling.on(others[0].param.device, scale))


def _apply_by_own(
    updates: list[Update], params: Params, scaling: Scaling, scale: Tensor | None
) -> None:
    optimizer: Any
    optimizer, groups = params.optimizer(), params.groups()
    assert optimizer is not None
    numbers = {id(group): number for number, group in enumerate(groups)}
    positions = {id(param): i for i, param in enumerate(params)}
    by_device: dict[torch.device, list[Update]] = {}
    for made in updates:
        by_device.setdefault(made.param.device, []).append(made)
    for device, on_device in by_device.items():
        for param, _, grad in on_device:
            assert grad is not None
            # Where DistributedDataParallel has reduced it, it is not in .grad.
            param.grad = _changeable(grad) if grad is param.grad else grad
        by_name = scaling.on(device, scale)
        names = ("grad_scale", "found_inf", "factor", "skip")
        optimizer._step_by_own(
            [made.param for made in on_device],
            [numbers[id(made.group)] for made in on_device],
            tuple(by_name.get(name) for name in names) if by_name else None,
        )
        for param, *_ in on_device:
            note_step(dtensor.local_tensor(param), positions[id(param)])


def _changeable(grad: Tensor) -> Tensor:
    """Returns the gradient as one that a step may change in place.

    It is a copy where backward goes on with memory that the gradient shares: that of a view, as in
    ``h + param.view(...)``.
    """
    if torch._C._current_graph_task_id() == -1 or dtensor.is_dtensor(grad):
        return grad
    storage = grad.untyped_storage()
    is_shared = torch._C._storage_Use_Count(storage._cdata) > 2  # by more than both of these
    return grad.detach().clone() if is_shared else grad


def _make_and_check_states(
    optimizer: torch.optim.Optimizer, updates: list[Update], records: Records, *, folds: bool
) -> None:
    """Makes missing states, and raises where a parameter cannot be stepped, changing nothing."""
    fresh = []
    try:
        for param, group, grad in updates:
            state = optimizer.state.get(param, {})
            if not is_complete(state, group):
                if made := make_state(param, group):
                    fresh.append((param, state))
                    publish_states(optimizer, [(param, made)])
                state = made
            check(param, grad, state, group, records.phase(state, folds=folds))
    except BaseException:
        for param, state in fresh:
            if state:
                optimizer.state[param] = state
            else:
                del optimizer.state[param]
        raise


def _prepare(
    made: Update, optimizer: torch.optim.Optimizer, records: Records, *, folds: bool, position: int
) -> Prepared:
    """Returns the operator's view of an update: of DTensors the local parts."""
    param, state = dtensor.local_tensor(made.param), optimizer.state.get(made.param, {})
    grad = None if made.grad is None else dtensor.local_gradient(made.param, made.grad)
    phase = records.phase(state, folds=folds)
    state = {name: dtensor.local_tensor(value) for name, value in state.items()}
    if not folds:
        records.drop_stale_low_part(param, state.get("param_rest"))
    return Prepared(param, grad, state, made.group, phase, position)
