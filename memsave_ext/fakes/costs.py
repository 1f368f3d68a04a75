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
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from .kernels import is_view, nbytes

_SECONDS_PER_BYTE = 3e-11  # read or written; csrc/remat/policy.cpp has twice that for a copied byte
_SECONDS_PER_FLOP = 1e-11
SECONDS_PER_CALL = 6e-6  # of the dispatcher and the recorder, also of a view
_SECONDS_PER_CALL_IN_PLACE = 2.5e-6  # which makes no tensor, as most of an optimizer's
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
    "addcdiv": 1,
    "div": 2,
    "sqrt": 3,
    "tanh": 2,
    "gelu_backward": 6,
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
# Of a card, as the maker says of an A100, and as much of it as is reached: 0.8 of 2 TB/s, 0.4 of
# 312 TFLOP/s in types of two bytes, 0.7 of 19.5 TFLOP/s in larger ones, and a launch.
_CARD_PER_BYTE = 6e-13
_CARD_PER_FLOP, _CARD_PER_LARGE_FLOP = 8e-15, 7e-14
_CARD_PER_CALL = 5e-6
_ROUNDED = 4  # a step of this package's Adam with states of one byte, for each of its bytes
_aten = torch.ops.aten


def _lstm_flop(
    x: Tensor, of_input: Tensor, of_hidden: Tensor, *_: Any, out_val: Any, **options: Any
) -> int:
    return int(2 * x.shape[0] * x.shape[1] * (of_input.numel() + of_hidden.numel()))


def _lstm_backward_flop(*args: Any, **options: Any) -> int:
    return 2 * _lstm_flop(*args, **options)


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    _aten.mkldnn_rnn_layer: _lstm_flop,
    _aten.mkldnn_rnn_layer_backward: _lstm_backward_flop,
    **flop_registry,
}
# Of oneDNN's convolutions, which copy into another layout and back.
_CONVOLUTION_FACTOR = 5
_SECONDS_PER_CONVOLUTION = {True: 3e-5, False: 1.5e-4}  # whether the kernel has one element


def operator_seconds(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns about how long an operator would run."""
    if is_view(func):
        return SECONDS_PER_CALL
    if (found := _convolution(func, args, result)) is not None:
        count, tensors, flops = found
        moved = sum(map(nbytes, tensors)) * _CONVOLUTION_FACTOR * _SECONDS_PER_BYTE
        call = _SECONDS_PER_CONVOLUTION[tensors[1][0, 0].numel() == 1]
        return SECONDS_PER_CALL + count * (call + moved) + flops * _SECONDS_PER_FLOP
    tensors = _tensors(args, result)
    seconds = sum(map(nbytes, tensors)) * _SECONDS_PER_BYTE
    operations = _flops(func, args, kwargs, result)
    if operations is not None:
        return SECONDS_PER_CALL + seconds + operations * _SECONDS_PER_FLOP
    name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
    seconds *= _factor(name)
    if name.startswith("memsave_ext::adam_step") and any(t.itemsize == 1 for t in tensors):
        seconds *= _ROUNDED
    return seconds + (_SECONDS_PER_CALL_IN_PLACE if name.endswith("_") else SECONDS_PER_CALL)


def seconds_on_card(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns about how long an operator would run on a CUDA card. No card has checked it."""
    if is_view(func):
        return 0.0  # it launches nothing
    tensors = _tensors(args, result)
    seconds = _CARD_PER_CALL + sum(map(nbytes, tensors)) * _CARD_PER_BYTE
    half = any(t.is_floating_point() and t.itemsize <= 2 for t in tensors)
    per_flop = _CARD_PER_FLOP if half else _CARD_PER_LARGE_FLOP
    return seconds + (_flops(func, args, kwargs, result) or 0) * per_flop


def _convolution(func: Any, args: Any, result: Any) -> tuple[int, list[Tensor], int] | None:
    """Returns how many convolutions an operator computes, input, weight and output of each, and
    their operations; None for other operators.

    torch's formula counts groups as if each had all channels in backward.
    """
    if func is _aten.convolution.default:
        count, tensors = 1, [args[0], args[1], result]
    elif func is _aten.convolution_backward.default:
        count, tensors = sum(args[10][:2]), [args[1], args[2], args[0]]
    else:
        return None
    operations = 2 * tensors[2].numel() * (tensors[1].numel() // tensors[1].shape[0])
    return count, tensors, count * operations


def _tensors(args: Any, result: Any) -> list[Tensor]:
    """What is changed in place is among the arguments and the results, and is counted once."""
    tensors = {id(t): t for t in tree_iter((args, result)) if isinstance(t, Tensor)}
    return list(tensors.values())


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Returns None for an operator that multiplies no matrices."""
    if (found := _convolution(func, args, result)) is not None:
        return found[2]
    formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
    if formula is None:
        return None
    operations: int = 0
    # It raises where it does not know the arguments.
    with contextlib.suppress(TypeError, ValueError, AssertionError, RuntimeError):
        operations = formula(*args, **kwargs, out_val=result)
    return operations


def _factor(name: str) -> int:
    return next((times for part, times in _FACTORS.items() if part in name), 1)
