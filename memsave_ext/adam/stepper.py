"""Chooses the stepper of an optimizer's parameters: native, or the fallback without it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _native, _parts
from . import dtensor, errors, fallback, modes, shards, state_machine, states

if _native.module:
    called = (
        dtensor.local_tensor, dtensor.local_gradient, dtensor.leave_buffer, shards.sharding_of,
        shards.agree, shards.clip_to_norm, modes.check_options, states.make_state,
        states.publish_states,
    )  # fmt: skip
    _native.module.register_functions({function.__name__: function for function in called})
    _native.module.register_functions({"adam_errors": errors})
    _native.module.give_adam_transitions(state_machine.transitions())


def make(*arguments: Any) -> Any:
    """Returns a stepper; either class has the methods that memsave_ext/_C.pyi lists."""
    return (_parts.native("adam") or fallback).AdamStepper(*arguments)


def owner(param: Tensor) -> Any:
    """Returns the optimizer that steps ``param`` in backward, or None."""
    found = _native.module.AdamStepper.owner(param) if _native.module else None
    return fallback.AdamStepper.owner(param) if found is None else found
