"""Chooses the stepper of an optimizer's parameters: native, or the fallback without it."""

from __future__ import annotations

from typing import Any

from .. import _native
from . import dtensor, errors, fallback, modes, shards

# Either class has the methods that memsave_ext/_C.pyi lists.
Stepper: Any = fallback.AdamStepper
if _native.module:
    Stepper = _native.module.AdamStepper
    called = (
        dtensor.local_tensor, dtensor.local_gradient, dtensor.as_placed, dtensor.largest_shard,
        dtensor.local_scale_shape, dtensor.scale_as_placed, dtensor.leave_buffer,
        shards.sharding_of, shards.sum_over_shards, modes.check_options,
    )  # fmt: skip
    _native.module.give_adam_functions({function.__name__: function for function in called})
    _native.module.give_adam_functions({"errors": errors})
