"""Registers Adam's operators with torch's dispatcher: schemas, and the fallback's Python kernels.

csrc registers kernels for the devices it was built for, and for meta tensors. On every other
device, and without the native part, ``adam/fallback`` runs.
"""

from __future__ import annotations

import torch

from .. import _native, _parts
from .fallback import operator

_library = torch.library.Library("memsave_ext", "FRAGMENT")
# Steps parameters in place, with their states and step counts. They lie on one device and share
# the options of a param group, and which states they have.
#
# - `grads`: one for each parameter.
# - `states`: those of the first parameter, in the order of `state_names`, then those of the second.
# - `positions`: of the parameters in the optimizer, which random bits depend on.
# - `rule`, `bf16` and `state_format`: names of rows of adam/rules.py and adam/formats.py.
# - `tensor_lr`: in place of `lr`, where that lies on a device.
# - `beta1` and `beta2`: for SGD momentum and dampening.
#
# With `grad_scale` the gradients are divided by it, and `found_inf` becomes 1 where one is not
# finite. With `factor` they are multiplied by it instead, and nothing is stepped where `skip` is
# not 0; both are scalars, or vectors with an element for each parameter.
_library.define(
    "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, int[] positions, *, "
    "str[] state_names, str rule, float lr, Tensor? tensor_lr=None, "
    "float beta1=0., float beta2=0., float eps=0., float weight_decay, "
    "bool decoupled_weight_decay=False, bool nesterov=False, bool maximize=False, "
    'str? bf16=None, str state_format="as_param", int seed=0, float? max_grad_norm=None, '
    "Tensor? grad_scale=None, Tensor(c!)? found_inf=None, Tensor? factor=None, "
    "Tensor? skip=None) -> ()"
)
# Returns the sum of squares of all elements, a float64 scalar.
_library.define("adam_sum_of_squares(Tensor[] grads) -> Tensor")
for _name in ("adam_step_", "adam_sum_of_squares"):
    # The dispatcher uses CompositeExplicitAutograd where csrc has no kernel for the device.
    _library.impl(_name, getattr(operator, _name), "CompositeExplicitAutograd")
    _parts.add_kernel("adam", _name, getattr(operator, _name))
    # Without the fallthrough torch would refuse to change such views in place.
    for _lazy in ("Conjugate", "Negative", "ZeroTensor"):
        _library.impl(_name, torch.library.fallthrough_kernel, _lazy)
    if not _native.available:
        torch.library.register_fake(
            f"memsave_ext::{_name}", getattr(operator, f"fake_{_name}"), lib=_library
        )
