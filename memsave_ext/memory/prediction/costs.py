"""Estimates what operators would take, for plans that weigh time against memory.

A fake step takes no time that says anything. A plan within a budget must fit first of all, so that
rough figures do: ratios between operators count, as of a processor that moves ten gigabytes and
computes fifty billion products in a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_SECONDS_PER_BYTE = 1e-10  # csrc/remat/policy.cpp has the same for copies
_SECONDS_PER_FLOP = 1e-11
# What computes functions such as exp takes so many times as long as a copy.
_FUNCTIONS = 4
_ARE_FUNCTIONS = (
    *("gelu", "silu", "mish", "elu", "softmax", "tanh", "sigmoid", "softplus", "exp", "log"),
    *("erf", "sin", "cos", "pow", "bernoulli", "normal", "logsumexp"),
)


def operator_seconds(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns about how long an operator would run."""
    formula: Callable[..., int] | None = flop_registry.get(getattr(func, "_overloadpacket", None))
    moved = sum(t.nbytes for t in tree_iter((args, result)) if isinstance(t, Tensor))
    seconds = moved * _SECONDS_PER_BYTE
    if formula is not None:
        try:
            return seconds + formula(*args, **kwargs, out_val=result) * _SECONDS_PER_FLOP
        except (TypeError, ValueError, AssertionError, RuntimeError):
            return seconds  # arguments that the formula does not know
    return seconds * _factor(func)


def _factor(func: Any) -> int:
    name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
    return _FUNCTIONS if any(part in name for part in _ARE_FUNCTIONS) else 1
