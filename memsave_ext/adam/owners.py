"""Tracks which optimizer steps a parameter in backward: at most one does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import stepper

# All optimizers of this package that are alive, by id: a thread may look at all of them, which a
# WeakSet lets it not, while another makes one.
_alive: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()


def note_optimizer(optimizer: Optimizer) -> None:
    _alive[id(optimizer)] = optimizer


def release(optimizer: Any) -> None:
    """Has nothing of this package look after an optimizer that becomes another."""
    optimizer.remove_hooks()
    _alive.pop(id(optimizer), None)


def is_own(optimizer: Optimizer) -> bool:
    """Whether it is one of this package's."""
    return _alive.get(id(optimizer)) is optimizer


def alive_optimizers() -> list[Optimizer]:
    """Returns all of this package's optimizers."""
    found = (reference() for reference in _alive.valuerefs())
    return [optimizer for optimizer in found if optimizer is not None]


def optimizers_of(params: Iterable[Tensor]) -> list[Optimizer]:
    """Returns this package's optimizers that have states of one of ``params``."""
    listed = list(params)
    return [o for o in alive_optimizers() if any(p in o.state for p in listed)]


_NO_PARAMS = (
    "remove_hooks: params must be a module, a parameter or an iterable of parameters, got {}"
)


def remove_hooks(params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Release parameters that optimizers step in backward, so that a new one can be made for them.

    The old optimizers go on as ordinary ones, with all of their parameters, as after their own
    ``remove_hooks()``. One from whose ``param_groups`` a parameter was taken goes on in backward
    with the others. For example, where a trainer makes optimizers anew in each of its runs::

        def configure_optimizers(self):
            ms.remove_hooks(self)
            return ms.AdamW(self.parameters(), in_backward=True)

    Args:
        params: a module, a parameter, or several parameters.

    Raises:
        TypeError: something else.
    """
    if isinstance(params, torch.nn.Module):
        params = params.parameters()
    elif isinstance(params, Tensor):
        params = [params]
    elif not isinstance(params, Iterable):
        raise TypeError(_NO_PARAMS.format(type(params).__name__))
    listed = list(params)
    for param in listed:
        if not isinstance(param, Tensor):
            raise TypeError(_NO_PARAMS.format(f"an iterable with a {type(param).__name__}"))
    _release_departed(listed)
    for param in listed:
        if (owner := stepper.owner(param)) is not None:
            owner.remove_hooks()


def _release_departed(params: list[Tensor]) -> None:
    """Removes the hooks of parameters that were taken out of their optimizer's groups."""
    of_each: dict[int, tuple[Any, list[Tensor]]] = {}
    for param in params:
        if (owner := stepper.owner(param)) is not None:
            of_each.setdefault(id(owner), (owner, []))[1].append(param)
    for owner, owned in of_each.values():
        present = {id(p) for group in owner.param_groups for p in group["params"]}
        owner._release([p for p in owned if id(p) not in present])


def refuse_taken(optimizer: Any, params: list[Tensor]) -> None:
    """Raises ValueError where another optimizer that is still alive steps one of ``params``."""
    if _first_of_another(optimizer, params) is not None:
        _release_departed(params)
    if _first_of_another(optimizer, params) is not None:
        # Schedulers and optimizers refer to each other, so an unused one may await collection.
        gc.collect()
    taken = _first_of_another(optimizer, params)
    if taken is None:
        return
    param, owner = taken
    name = _name_in(optimizer, param) or _name_in(owner, param) or "a parameter"
    if owner._gradients is not None:
        raise ValueError(
            f"{name} of shape {list(param.shape)} has its gradients elsewhere, by grads_on= of "
            f"another optimizer (of class {type(owner).__name__}). Put each parameter into one "
            "optimizer only, or call memsave_ext.remove_hooks(model) before this one is made"
        )
    raise ValueError(
        f"{name} of shape {list(param.shape)} is stepped in backward by another optimizer already "
        f"(of class {type(owner).__name__}). Put each parameter into one optimizer only, or call "
        "memsave_ext.remove_hooks(model) before this one is made: the other optimizer then steps "
        "in its step(), as an ordinary one"
    )


def _first_of_another(optimizer: Any, params: list[Tensor]) -> tuple[Tensor, Any] | None:
    owners = ((param, stepper.owner(param)) for param in params)
    return next(((p, owner) for p, owner in owners if owner not in (None, optimizer)), None)


def _name_in(optimizer: Any, param: Tensor) -> str:
    """Returns the parameter's name; empty where ``optimizer`` was not given names."""
    for group in optimizer.param_groups:
        for name, other in zip(group.get("param_names", ()), group["params"], strict=False):
            if other is param:
                return f"parameter {name!r}"
    return ""
