"""Estimates what operators would take, for plans that weigh time against memory, and for the time
of a step over another's.

The time of a fake step itself says nothing. Rough figures do, as a plan has to fit first of all:
those of one core of a server's CPU, as measured for small transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_flop

from .kernels import nbytes

_SECONDS_PER_BYTE = 3e-11  # read or written; csrc/remat/policy.cpp has twice that for a copied byte
_SECONDS_PER_FLOP = 1e-11
SECONDS_PER_CALL = 6e-6  # of the dispatcher and the recorder, also of a view
# Operators whose names have these parts take so many times as long as a sum. The first part that is
# found counts.
_FACTORS = {
    "memsave_ext::batch_norm": 2,
    "batch_norm": 8,
    "group_norm": 4,
    "norm": 5,
    "pool": 20,
    "upsample": 20,
    "cat": 2,
    "bernoulli": 48,
    "div": 2,
    "tanh": 2,
    "gelu": 3,
    "_safe_softmax": 10,
    "softmax": 3,
    "exp": 2,
    "log": 2,
    "sigmoid": 2,
    "silu": 2,
    "softplus": 3,
    "mish": 6,
    "elu": 1,
    "erf": 3,
    "sin": 3,
    "cos": 3,
    "pow": 3,
}
# Of a card, as its maker says of an A100 and as much of it as is reached in practice: 0.8 of 2 TB/s,
# 0.4 of 312 TFLOP/s in types of two bytes, 0.7 of 19.5 TFLOP/s in larger ones, and a launch.
_CARD_PER_BYTE = 6e-13
_CARD_PER_FLOP, _CARD_PER_LARGE_FLOP = 8e-15, 7e-14
_CARD_PER_CALL = 5e-6
_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    **flop_registry,
}


def operator_seconds(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns about how long an operator would run."""
    seconds = sum(map(nbytes, _tensors(args, result))) * _SECONDS_PER_BYTE
    flops = _flops(func, args, kwargs, result)
    if flops is None:
        return SECONDS_PER_CALL + seconds * _factor(func)
    return SECONDS_PER_CALL + seconds + flops * _SECONDS_PER_FLOP


def seconds_on_card(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns about how long an operator would run on a CUDA card. No card has checked it."""
    tensors = _tensors(args, result)
    seconds = _CARD_PER_CALL + sum(map(nbytes, tensors)) * _CARD_PER_BYTE
    half = any(t.is_floating_point() and t.itemsize <= 2 for t in tensors)
    per_flop = _CARD_PER_FLOP if half else _CARD_PER_LARGE_FLOP
    return seconds + (_flops(func, args, kwargs, result) or 0) * per_flop


def _tensors(args: Any, result: Any) -> list[Tensor]:
    """What is changed in place is among the arguments and the results, and is counted once."""
    tensors = {id(t): t for t in tree_iter((args, result)) if isinstance(t, Tensor)}
    return list(tensors.values())


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Returns None for an operator that multiplies no matrices."""
    formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
    if formula is None:
        return None
    # It raises where it does not know the arguments.
    with contextlib.suppress(TypeError, ValueError, AssertionError, RuntimeError):
        return formula(*args, **kwargs, out_val=result)
    return 0


def _factor(func: Any) -> int:
    name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
    return next((times for part, times in _FACTORS.items() if part in name), 1)
