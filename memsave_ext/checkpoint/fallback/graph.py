"""What a region's autograd graph tells about the tensors that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import rules
from ..errors import Unlisted
from .outside import tensors_in


def sequence_number() -> int:
    """At most the number that autograd will give to this thread's next node."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True, device="cpu").view(()).grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _is_outside(node: Any, mark: int) -> bool:
    """Whether the node is a leaf's, or older than ``mark``, a :func:`sequence_number`."""
    leaf = node.name() == "torch::autograd::AccumulateGrad"
    return leaf or bool(node._sequence_nr() < mark)


def find_unlisted(roots: Sequence[Tensor], listed: Sequence[Tensor], mark: int) -> list[Unlisted]:
    """What the graph of ``roots``, made since ``mark``, uses without being listed."""

    def key(edge: GradientEdge) -> tuple[Any, int]:
        return edge.node, edge.output_nr

    known = {key(get_gradient_edge(t)) for t in listed if t.requires_grad}
    found: dict[tuple[Any, int], Unlisted] = {}
    visited: set[Any] = set()
    pending: list[tuple[str, Any, int]] = [("", *key(get_gradient_edge(r))) for r in roots]
    while pending:
        user, node, number = pending.pop()
        if node is None or (node, number) in known:
            continue
        if _is_outside(node, mark):
            meta = node._input_metadata[number]
            found.setdefault((node, number), (list(meta.shape), meta.dtype, user))
        elif node not in visited:
            visited.add(node)
            pending += [(node.name(), *edge) for edge in node.next_functions]
    return list(found.values())


def check_not_computed_from_listed(listed: Sequence[Tensor]) -> None:
    """A listed tensor that was computed from another: torch's engine would go on through the graph
    that computed it, and count the other twice. csrc cuts the recompute's graph there."""
    nodes = {get_gradient_edge(t).node for t in listed if t.requires_grad}
    for tensor in listed:
        pending = [] if tensor.grad_fn is None else [n for n, _ in tensor.grad_fn.next_functions]
        seen: set[Any] = set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            if node in nodes:
                raise RuntimeError(
                    "CheckpointFunction: one listed tensor was computed from another listed "
                    "tensor, which the pure-Python path does not support. Compute it inside the "
                    "function, or pass it as an input."
                )
            seen.add(node)
            pending += [following for following, _ in node.next_functions]


def fills_after_saving(node: Any) -> bool:
    return bool(node.name().startswith(rules.FILLS_AFTER_SAVING))


def any_fills_after_saving(outputs: Any, mark: int) -> bool:
    """Whether any node made since ``mark`` does so, or none is found. (csrc asks about the last
    save only.)"""
    pending = [output.grad_fn for output in tensors_in(outputs)]
    seen: set[Any] = set()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen or _is_outside(node, mark):
            continue
        if fills_after_saving(node):
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return not seen
