"""``CheckpointFunction.apply``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._leaves import hold_accumulators
from .. import errors
from .call import CallSite, as_type, call
from .graph import find_unlisted, sequence_number
from .node import Forward, Node
from .surroundings import AutocastState, uncached_autocast


def checkpoint_apply(*args: Any) -> Any:
    errors.check_arguments(*args)
    function, n, *tensors = args
    if torch._C._are_functorch_transforms_active():
        raise errors.inside_transform()
    site = CallSite.of(sys._getframe(1))
    if not torch.is_grad_enabled():
        with torch.no_grad(), uncached_autocast(AutocastState.capture()):
            return function(*tensors[:n])
    if not any(t.requires_grad for t in tensors):
        return _call_and_look(function, tensors[:n], site)
    forward = Forward(function, n, site)
    nodes = hold_accumulators(tensors)
    outputs = Node.apply(forward, *tensors)
    del nodes
    assert forward.result is not None
    # Only tensors pass through torch's Function; the rest of the result travels beside it.
    elements, forward.result.elements = forward.result.elements, []
    for position, output in zip(forward.positions, outputs, strict=True):
        elements[position] = as_type(output, type(elements[position]))
    return forward.result.rebuild(elements)


def _call_and_look(function: Callable[..., Any], inputs: list[Tensor], site: CallSite) -> Any:
    """Where no listed tensor needs a gradient, no backward looks for unlisted ones: look here."""
    mark = sequence_number()
    with uncached_autocast(AutocastState.capture()):
        result = call(function, inputs)
    roots = [e for e in result.elements if isinstance(e, Tensor) and e.requires_grad]
    errors.warn_unlisted(*site, find_unlisted(roots, (), mark))
    return result.rebuild(
        [e.detach() if isinstance(e, Tensor) and e.requires_grad else e for e in result.elements]
    )
