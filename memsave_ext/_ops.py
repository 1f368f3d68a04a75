"""Registers Adam's operators with torch's dispatcher: schemas, and the fallback's Python kernels.

csrc registers kernels for the devices it was built for, and for meta tensors. On every other
device, and without the native part, ``adam/fallback`` runs.
"""

from __future__ import annotations

import torch

from . import _native, _parts
from .adam.fallback import operator as _operator

_library = torch.library.Library("memsave_ext", "DEF")
# Steps parameters of one device in place, with their states and step counts. One call can have
# parameters of several groups and formats, so `grads` and `states` contain only tensors that exist.
#
# Each parameter has an element in
# - `present`: bit 0 is set where it has a gradient, the next bits where it has the states, in the
#   order of adam/fallback/arguments.py;
# - `phases`: 0 for a whole step; 1 to fold the first gradient of a step into the moments, 2 to fold
#   a later one; 3 for the step that closes folding;
# - `positions`: its position in the optimizer;
# - `groups`: the index of its group among those of this call.
#
# Each group has
# - 6 `options`: lr, beta1 (SGD: momentum), beta2 (SGD: dampening), eps, weight_decay, and
#   max_grad_norm (0: none);
# - 8 `modes`: the row of the rule (adam/rules.py), decoupled_weight_decay, nesterov, maximize, the
#   rows of bf16 and state_dtype (adam/formats.py), the seed, and whether its lr is the next tensor
#   of `lrs`.
#
# With `grad_scale` the gradients are divided by it, and `found_inf` becomes 1 where one is not
# finite. With `factor` they are multiplied by it instead, and nothing is stepped where `skip` is
# not 0; both are scalars, or vectors with an element for each parameter.
_library.define(
    "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, int[] present, "
    "int[] phases, int[] positions, int[] groups, float[] options, int[] modes, Tensor[] lrs, "
    "Tensor? grad_scale=None, Tensor(c!)? found_inf=None, Tensor? factor=None, "
    "Tensor? skip=None) -> ()"
)
# Returns the sum of squares of all elements, a float64 scalar.
_library.define("adam_sum_of_squares(Tensor[] grads) -> Tensor")
for _name in ("adam_step_", "adam_sum_of_squares"):
    # The dispatcher uses CompositeExplicitAutograd where csrc has no kernel for the device.
    _library.impl(_name, getattr(_operator, _name), "CompositeExplicitAutograd")
    _parts.add_kernel("adam", _name, getattr(_operator, _name))
    # Without the fallthrough torch would refuse to change such views in place.
    for _lazy in ("Conjugate", "Negative", "ZeroTensor"):
        _library.impl(_name, torch.library.fallthrough_kernel, _lazy)
    if not _native.available:
        torch.library.register_fake(
            f"memsave_ext::{_name}", getattr(_operator, f"fake_{_name}"), lib=_library
        )
