"""The look at a region's graph for tensors that were not listed, paid once per call site."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class CallSite:
    """A line of Python code that calls CheckpointFunction.apply."""

    code: CodeType
    instruction: int
    line: int

    @staticmethod
    def of(frame: FrameType) -> CallSite:
        return CallSite(frame.f_code, frame.f_lasti, frame.f_lineno)


_warned: set[str] = set()


def sequence_number() -> int:
    """What autograd will number the next node made by this thread, or less."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    assert node is not None
    return int(node._sequence_nr())


def look(roots: Sequence[Tensor], listed: Sequence[Tensor], mark: int, site: CallSite) -> None:
    """Warn about what the graph of ``roots``, made since ``mark``, uses without being listed."""
    unlisted = _find(roots, listed, mark)
    message = (
        f"CheckpointFunction.apply at {site.code.co_filename}:{site.line}: the function uses "
        "tensors that need a gradient but were not listed; they get none from this region: "
        f"{'; '.join(unlisted)}. List them: "
        "CheckpointFunction.apply(function, n, *inputs, *parameters)."
    )
    if unlisted and message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=2)


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
                    "CheckpointFunction: a listed tensor was computed from another that is listed, "
                    "which the pure-Python path cannot tell apart. Compute it inside the function, "
                    "or pass it as an input."
                )
            seen.add(node)
            pending += [following for following, _ in node.next_functions]


def _find(roots: Sequence[Tensor], listed: Sequence[Tensor], mark: int) -> list[str]:
    def key(edge: GradientEdge) -> tuple[Any, int]:
        return edge.node, edge.output_nr

    known = {key(get_gradient_edge(t)) for t in listed if t.requires_grad}
    found: dict[tuple[Any, int], str] = {}
    visited: set[Any] = set()
    pending: list[tuple[Any, Any, int]] = [(None, *key(get_gradient_edge(r))) for r in roots]
    while pending:
        user, node, number = pending.pop()
        if node is None or (node, number) in known:
            continue
        leaf = node.name() == "torch::autograd::AccumulateGrad"
        if leaf or node._sequence_nr() < mark:
            meta = node._input_metadata[number]
            use = "returned as an output" if user is None else f"used by {user.name()}"
            dtype = str(meta.dtype).removeprefix("torch.")
            found.setdefault((node, number), f"shape {list(meta.shape)}, dtype {dtype}, {use}")
        elif node not in visited:
            visited.add(node)
            pending += [(node, *edge) for edge in node.next_functions]
    return list(found.values())
