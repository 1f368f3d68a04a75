"""Adam's operators in torch's dispatcher: schemas, and the Python kernels of the fallback.

csrc registers kernels for the devices it was built for, and for meta tensors. On every other
device, and without the native part, ``adam/fallback`` runs.
"""

from __future__ import annotations

import torch

from . import _native
from .adam.fallback import operator as _operator

_library = torch.library.Library("memsave_ext", "DEF")
# Steps parameters of one device, in place, and their states and step counts with them. One call
# for parameters of several groups and formats, so a tensor that some have and others have not is
# in its list for those that have it.
# Of each parameter: `present`, bit 0 where it has a gradient and the next ones for its states, in
# the order of the optimizer's; `phases`, 0 for a whole step, 1 and 2 to fold a gradient into the
# moments, first and later ones, 3 for the step that closes this; `positions` in the optimizer; and
# `groups`, which count from 0 here.
# Of each group: `options` lr, beta1, beta2, eps, weight_decay and max_grad_norm, 0 for none;
# `modes` decoupled_weight_decay, amsgrad, maximize, the rows of bf16 and state_dtype (formats.py),
# seed, and whether its lr is the next of `lrs`.
# Gradients are multiples of `loss_scale`, and `found` becomes 1 where one is not finite; or are
# multiplied by `factor`, and nothing is done where `skip` is not 0.
_library.define(
    "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, int[] present, "
    "int[] phases, int[] positions, int[] groups, float[] options, int[] modes, Tensor[] lrs, "
    "Tensor? loss_scale=None, Tensor(c!)? found=None, Tensor? factor=None, Tensor? skip=None) -> ()"
)
# The sum of squares of all elements, a float64 scalar.
_library.define("adam_sum_of_squares(Tensor[] grads) -> Tensor")
for _name in ("adam_step_", "adam_sum_of_squares"):
    # CompositeExplicitAutograd: chosen where no kernel of csrc fits the device.
    _library.impl(_name, getattr(_operator, _name), "CompositeExplicitAutograd")
    for _lazy in ("Conjugate", "Negative", "ZeroTensor"):  # torch would refuse to change such views
        _library.impl(_name, torch.library.fallthrough_kernel, _lazy)
    if not _native.available:
        torch.library.register_fake(
            f"memsave_ext::{_name}", getattr(_operator, f"fake_{_name}"), lib=_library
        )
