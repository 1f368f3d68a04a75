"""The operators in torch's dispatcher: schemas, fakes, and the Python kernels of the fallback.

The contract with csrc: it registers kernels for the devices it was built for, and autograd. On
every other device, and without the native part, ``_reference`` runs.

Terms. A ``tensor`` has shape (N, C, *). ``statistics``: (2, C), mean and 1 / sqrt(var + eps) per
channel, float64 for float64 tensors and else float32. ``sums``, ``means``: (2, C) likewise, of the
gradient before activation and of its product with the normalised input. ``moments``: bytes, to be
gathered from several processes: mean (C), sum of squared deviations (C), count (int64).
``activation``: "none", "relu" or "leaky_relu"; ``negative_slope`` belongs to the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native
from ._reference import adam as _adam
from ._reference import batch_norm as _reference
from ._reference import batch_norm_autograd as _autograd

_ACTIVATION = "str activation, float negative_slope"
_SCHEMAS = {
    # With `statistics`, they are used again: nothing is reduced or updated. Without them and
    # without `training`, the running ones are used. `group` names the processes whose statistics
    # they are; its backward then sums over them.
    "batch_norm_forward": "(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
    "Tensor? statistics, Tensor(a!)? running_mean, Tensor(b!)? running_var, bool training, "
    f"float momentum, float eps, {_ACTIVATION}, str? group) -> (Tensor output, Tensor statistics)",
    # Gradients of input, residual, weight, bias; empty where the mask is False.
    "batch_norm_backward": "(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, "
    f"Tensor? residual, Tensor statistics, bool training, float eps, {_ACTIVATION}, "
    "bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_moments": "(Tensor input) -> Tensor",
    "batch_norm_backward_sums": "(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, "
    f"Tensor? residual, Tensor statistics, {_ACTIVATION}) -> Tensor",
    "batch_norm_backward_input": "(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, "
    f"Tensor? residual, Tensor statistics, Tensor means, {_ACTIVATION}, bool[2] output_mask) "
    "-> (Tensor, Tensor)",
    # One step for all, in place; advances `steps`. `lr_tensor`, where given, in place of `lr`.
    "adam_step_": "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] steps, "
    "Tensor? lr_tensor, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool decoupled_weight_decay, bool amsgrad, bool maximize) -> ()",
}

_library = torch.library.Library("memsave_ext", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    # CompositeExplicitAutograd: chosen where no kernel of csrc fits the device.
    _kernel = getattr(_adam if _name.startswith("adam") else _reference, _name)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
if not _native.available:
    for _name in ("batch_norm_forward", "batch_norm_backward"):
        _library.impl(_name, getattr(_autograd, _name), "Autograd")


def _empty_like(input: Tensor) -> Tensor:
    return torch.empty_like(input, memory_format=_reference.memory_format(input))


def _statistics(input: Tensor) -> Tensor:
    return input.new_empty((2, input.shape[1]), dtype=_reference.statistic_dtype(input))


def _wanted(input: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return _reference.nothing(input)
    return torch.empty_like(input, memory_format=_reference.grad_memory_format(input))


def _channels(input: Tensor, of: Tensor | None, wanted: bool) -> Tensor:
    if not wanted:
        return _reference.nothing(input)
    dtype = _reference.statistic_dtype(input) if of is None else of.dtype
    return input.new_empty(input.shape[1], dtype=dtype)


def _fake_forward(
    input: Tensor, weight: Any, bias: Any, residual: Any, statistics: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    mean, var, _, _, _, activation, _, _ = rest
    _reference.check(input, weight, bias, residual, activation, running_mean=mean, running_var=var)
    return _empty_like(input), _statistics(input)


def _fake_backward(
    grad: Tensor, input: Tensor, weight: Any, bias: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = rest[-1]
    return (
        _wanted(input, mask[0]),
        _wanted(input, mask[1]),
        _channels(input, weight, mask[2]),
        _channels(input, bias, mask[3]),
    )


def _fake_moments(input: Tensor) -> Tensor:
    size = 2 * input.shape[1] * _reference.statistic_dtype(input).itemsize + 8
    return input.new_empty(size, dtype=torch.uint8)


def _fake_backward_sums(grad: Tensor, input: Tensor, *rest: Any) -> Tensor:
    return _statistics(input)


def _fake_backward_input(grad: Tensor, input: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    mask = rest[-1]
    return _wanted(input, mask[0]), _wanted(input, mask[1])


def _fake_adam_step_(*args: Any) -> None:
    return None


for _name in _SCHEMAS:
    _fake = globals()[f"_fake_{_name.removeprefix('batch_norm_')}"]
    torch.library.register_fake(f"memsave_ext::{_name}", _fake, lib=_library)
