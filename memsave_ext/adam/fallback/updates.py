"""Steps of parameters as an optimizer has them, all of which are checked before one is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dtensor, modes
from ..states import Phase, check, make_state
from .params import Params
from .records import Records
from .scaling import Scaling
from .update import update


class Update(NamedTuple):
    param: Tensor
    group: dict[str, Any]
    grad: Tensor | None  # None for zeros, where folded gradients are closed without another


def apply(
    updates: list[Update],
    params: Params,
    records: Records,
    scaling: Scaling,
    scale: Tensor | None,
    *,
    folds: bool,
) -> None:
    """Steps these, of the optimizer of ``params``, or folds their gradients. ``scale``: what these
    are multiples of."""
    optimizer = params.optimizer()
    assert optimizer is not None
    for group in {id(group): group for _, group, _ in updates}.values():
        modes.check_options(group)
    if scaling.clips_all:
        modes.refuse_two_norms(params.groups())
    _make_and_check_states(optimizer, updates, records, folds=folds)
    positions = {id(param): i for i, param in enumerate(params)}
    for made in updates:
        state = optimizer.state[made.param]
        factor, skip = scaling.of(made.grad, made.group, scale)
        phase = records.phase(state, folds=folds)
        records.set_folded(state, folds)
        if not skip:
            position = positions[id(made.param)]
            _make_update(made, state, records, phase, position=position, factor=factor)


def _make_and_check_states(
    optimizer: torch.optim.Optimizer, updates: list[Update], records: Records, *, folds: bool
) -> None:
    """Raises where one cannot be stepped; nothing is changed then."""
    fresh = []
    try:
        for param, group, grad in updates:
            if not optimizer.state.get(param):
                optimizer.state[param] = make_state(param, group)
                fresh.append(param)
            state = optimizer.state[param]
            check(param, grad, state, group, records.phase(state, folds=folds))
    except BaseException:
        for made in fresh:
            del optimizer.state[made]
        raise


def _make_update(
    made: Update,
    state: Mapping[str, Any],
    records: Records,
    phase: Phase,
    *,
    position: int,
    factor: Tensor | None,
) -> None:
    """Of a DTensor, the part that is in this process."""
    param = dtensor.local_tensor(made.param)
    grad = None if made.grad is None else dtensor.local_gradient(made.param, made.grad)
    local = {name: dtensor.local_tensor(value) for name, value in state.items()}
    steps = phase in ("whole", "close")
    if steps:
        records.drop_stale_rest(param, local)
    update(param, grad, local, made.group, position=position, phase=phase, factor=factor)
    if steps:
        records.note_versions(param, local)
