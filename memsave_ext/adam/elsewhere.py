"""``states_on=``: optimizer states that lie elsewhere between steps.

A step fetches a parameter's states, works on them, and writes them back. What lies elsewhere is
still a tensor in ``optimizer.state``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..shared.dtensor import as_placed, local_tensor
from .files import Files
from .host_memory import OnCpu
from .place import Place


def place_of(value: Any) -> Place | None:
    """Returns the place that a value of ``states_on=`` stands for; None for memory.

    Raises:
        ValueError, TypeError: there is no such place.
    """
    if value is None or isinstance(value, Place):
        return value
    if value == "cpu":
        return OnCpu()
    if isinstance(value, (str, os.PathLike)):
        return Files(value)
    raise TypeError(f"states_on must be None, 'cpu' or a folder, got {value!r}")


def buffers_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns what is kept in memory for the next step, where states lie elsewhere."""
    places = {id(p): p for g in optimizer.param_groups if (p := g.get("states_on")) is not None}
    return [b for p in places.values() if isinstance(p, Place) for b in p.buffers()]


def put_state(
    state: dict[str, Any], group: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Returns a parameter's state with its tensors where the group's states lie."""
    place = group.get("states_on") or Place()
    return {
        name: _put(value, place, device)
        if isinstance(value, Tensor) and not place.stays(name, device)
        else value
        for name, value in state.items()
    }


def _put(value: Tensor, place: Place, device: torch.device) -> Tensor:
    local = local_tensor(value)
    placed = place.put(local, device)
    return value if placed is local else as_placed(value, placed)


def put_states(states: Any, groups: Iterable[Mapping[str, Any]]) -> None:
    """Moves an optimizer's states to where they belong. First makes room for all of them."""
    groups = list(groups)
    sizes: dict[Place, list[int]] = {}
    for group in groups:
        if (place := group.get("states_on")) is not None:
            tensors = [t for p in group["params"] for t in states.get(p, {}).values()]
            new = (local_tensor(t).nbytes for t in tensors if isinstance(t, Tensor))
            sizes.setdefault(place, []).extend(new)
    for place, of_place in sizes.items():
        place.reserve(of_place)
    for group in groups:
        for param in group["params"]:
            if param in states:
                states[param] = put_state(states[param], group, param.device)
