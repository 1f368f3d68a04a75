"""When a recompute must not stop at the last save."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def fills_after_saving(outputs: Any, mark: int) -> bool:
    """Whether the graph made since ``mark`` has an operation that saves a tensor and fills it then.

    rrelu in training does, with its noise (pytorch#193671): stopped at that save, a recompute hands
    out what was in the memory before. csrc asks about the last save only; any is good enough here.
    """
    pending = [o.grad_fn for o in tree_leaves(outputs) if isinstance(o, Tensor)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad" or node._sequence_nr() < mark:
            continue
        if node.name().startswith("RreluWithNoise"):
            return True
        pending += [following for following, _ in node.next_functions]
    return False
