"""Adam's operator in torch's dispatcher: its schema, fake, and the Python kernel of the fallback.

csrc registers kernels for the devices it was built for. On every other device, and without the
native part, ``adam/fallback`` runs.
"""

from __future__ import annotations

import torch

from .adam.fallback.operator import adam_step_

_library = torch.library.Library("memsave_ext", "DEF")
# One step for all, in place; advances `steps`. `lr_tensor`, where given, in place of `lr`.
_library.define(
    "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] steps, "
    "Tensor? lr_tensor, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool decoupled_weight_decay, bool amsgrad, bool maximize) -> ()"
)
# CompositeExplicitAutograd: chosen where no kernel of csrc fits the device.
_library.impl("adam_step_", adam_step_, "CompositeExplicitAutograd")
torch.library.register_fake("memsave_ext::adam_step_", lambda *_: None, lib=_library)
