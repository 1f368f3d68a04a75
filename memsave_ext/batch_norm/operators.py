"""The batch_norm operators: schemas, fakes, and the Python kernels of the fallback.

The contract with csrc: it registers kernels for the devices it was built for, and autograd. The
fallback runs on every other device, without the native part, and for arguments that do not pass the
checks.

Terms:

- A tensor has shape (N, C, *).
- ``statistics`` (2, C): mean and 1 / sqrt(var + eps) per channel, in float64 for float64 tensors
  and otherwise in float32.
- ``sums`` and ``means`` (2, C), in the same dtype: those of the gradient before the activation, and
  of its product with the normalised input.
- ``moments``: bytes, to be gathered from several processes, which hold mean (C), sum of squared
  deviations (C) and count (int64).
- ``activation``: a key of ``ACTIVATIONS``; ``negative_slope`` is the slope of "leaky_relu".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _native, _parts
from . import fallback
from .arguments import (
    Arguments,
    check,
    grad_memory_format,
    memory_format,
    nothing,
    read,
    statistic_dtype,
)

_GRAD = "Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
_ACTIVATION = "str activation, float negative_slope"


def _statistics(args: Arguments) -> Tensor:
    return args.input.new_empty((2, args.input.shape[1]), dtype=statistic_dtype(args.input))


def _fake_forward(args: Arguments) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(args.input, memory_format=memory_format(args.input))
    return output, nothing(args.input) if args.statistics is not None else _statistics(args)


def _fake_backward_input(args: Arguments) -> tuple[Tensor, ...]:
    layout = grad_memory_format(args.input)
    return tuple(
        torch.empty_like(args.input, memory_format=layout) if wanted else nothing(args.input)
        for wanted in args.output_mask[:2]
    )


def _fake_backward(args: Arguments) -> tuple[Tensor, ...]:
    def channels(like: Tensor | None, wanted: bool) -> Tensor:
        dtype = statistic_dtype(args.input) if like is None or not wanted else like.dtype
        return args.input.new_empty(args.input.shape[1] if wanted else 0, dtype=dtype)

    weight, bias = (
        channels(args.weight, args.output_mask[2]),
        channels(args.bias, args.output_mask[3]),
    )
    return *_fake_backward_input(args), weight, bias


def _fake_moments(args: Arguments) -> Tensor:
    size = 2 * args.input.shape[1] * statistic_dtype(args.input).itemsize + 8
    return args.input.new_empty(size, dtype=torch.uint8)


_Kernel = Callable[[Arguments], Any]
_OPERATORS: dict[str, tuple[str, _Kernel, _Kernel]] = {
    # If `statistics` are given, they are used: nothing is reduced or updated, and the returned ones
    # are empty. Otherwise those of the batch are used in `training`, and else the running ones.
    # `group` names the processes that share the given statistics; backward then sums over them.
    "batch_norm_forward": (
        "(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? statistics, "
        "Tensor(a!)? running_mean, Tensor(b!)? running_var, bool training, float momentum, "
        f"float eps, {_ACTIVATION}, str? group) -> (Tensor output, Tensor statistics)",
        fallback.forward,
        _fake_forward,
    ),
    # Returns the gradients of input, residual, weight and bias; empty where the mask is False.
    "batch_norm_backward": (
        f"({_GRAD}Tensor statistics, bool training, float eps, {_ACTIVATION}, "
        "bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
        fallback.backward,
        _fake_backward,
    ),
    "batch_norm_moments": ("(Tensor input) -> Tensor", fallback.moments, _fake_moments),
    "batch_norm_backward_sums": (
        f"({_GRAD}Tensor statistics, {_ACTIVATION}) -> Tensor",
        fallback.backward_sums,
        _statistics,
    ),
    "batch_norm_backward_input": (
        f"({_GRAD}Tensor statistics, Tensor means, {_ACTIVATION}, bool[2] output_mask) "
        "-> (Tensor, Tensor)",
        fallback.backward_input,
        _fake_backward_input,
    ),
}


def _checked(name: str, kernel: _Kernel) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        args = read(name, values)
        check(args)
        return kernel(args)

    return run


_library = torch.library.Library("memsave_ext", "FRAGMENT")
for _name, (_schema, _kernel, _fake) in _OPERATORS.items():
    _library.define(_name + _schema)
    # CompositeExplicitAutograd is chosen where csrc has no kernel for the device.
    _library.impl(_name, _checked(_name, _kernel), "CompositeExplicitAutograd")
    _parts.add_kernel("batch_norm", _name, _checked(_name, _kernel))
    torch.library.register_fake(f"memsave_ext::{_name}", _checked(_name, _fake), lib=_library)
for _name, _autograd in (
    ("batch_norm_forward", fallback.differentiable_forward),
    ("batch_norm_backward", fallback.differentiable_backward),
):
    if not _native.available:
        _library.impl(_name, _autograd, "Autograd")
    _parts.add_kernel("batch_norm", _name, _autograd, "Autograd")
