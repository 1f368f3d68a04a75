"""Fake tensors, made fit for training steps; and what is said where they fail."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

# What fakes raise that is not the step's own error.
FAKES_ERRORS = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedOperatorException, UnsupportedFakeTensorException),
)


class NotPredicted(RuntimeError):
    """A step cannot be predicted. The message says why, and what to do."""


def predicts() -> bool:
    """Whether this thread runs on fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_of_cuda = False


def stand_for_cuda() -> None:
    """From now on fake tensors of the CPU stand for CUDA's, for good: this is a child."""
    global _of_cuda
    _of_cuda = True


def is_cuda(device: torch.device) -> bool:
    """Whether it is a CUDA device, or stands for one in a prediction."""
    return device.type == "cuda" or (_of_cuda and device.type == "cpu")


def fake_of(tensor: Tensor) -> FakeTensor:
    """Returns a fake tensor with the memory of one on the meta device."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return FakeTensor(mode, tensor, torch.device("cpu"))


def loss_in(output: Any) -> Tensor | None:
    """Returns the loss that a model has returned, alone or as ``loss`` beside other results."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and output.numel() == 1:
        found = output
    return found if isinstance(found, Tensor) else None


def new_mode() -> FakeTensorMode:
    """Returns a mode whose fake tensors are those of one prediction."""
    state = random.getstate()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    random.setstate(state)  # which libraries draw from as the first mode imports them
    mode.cache_enabled = False  # Storages.repeats remembers more of a call for less time
    return mode


@contextmanager
def fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Makes fake tensors inside the block, and turns what they raise into sentences."""
    try:
        with mode:
            yield
    except (RuntimeError, AssertionError, UnsupportedFakeTensorException) as error:
        if sentence := _sentence(error):
            kind = _class_in(error)
            of = f"tensors of the class {kind} cannot be predicted: " if kind else ""
            raise NotPredicted(f"predict: {of}{sentence}") from error
        if hasattr(error, "add_note") and not isinstance(error, NotPredicted):
            error.add_note(_ON_FAKES)
        raise


_ON_FAKES = (
    "predict: this was raised on fake tensors. If the step runs by itself, a fake kernel of torch "
    "differs from the real one: leave the operator out of what is predicted by "
    "`if not memsave_ext.is_dry_run():`"
)


def _class_in(error: Exception) -> str | None:
    """Returns the name of the class of tensors whose own dispatch has raised an error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kind = frame.f_locals.get("cls")
        if frame.f_code.co_name not in ("__torch_dispatch__", "__torch_function__"):
            continue
        if isinstance(kind, type) and issubclass(kind, Tensor) and kind is not FakeTensor:
            return f"{kind.__module__}.{kind.__qualname__}"
    return None


_LEAVE_OUT = "Leave it out of what is predicted by `if not memsave_ext.is_dry_run():`"


def _sentence(error: Exception) -> str | None:
    """Returns what happened and what to do, None where the error is the step's own."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            f"the result of {error.func} depends on the values of tensors, which are not "
            f"known before the step. {_LEAVE_OUT}, or put a tensor of the size that is expected in "
            "its place there"
        )
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{error.func} has no fake kernel, so that the size of its result is not "
            f"known. Register one with torch.library.register_fake. Or: {_LEAVE_OUT}"
        )
    if isinstance(error, UnsupportedFakeTensorException):
        return (
            f"one kind of tensor cannot be predicted ({error.reason}). Put dense tensors of the "
            "same size in their place"
        )
    text = str(error)
    if "Creating a new Tensor subclass Uninitialized" in text:
        return (
            "a lazy module has not learned its shapes yet. Put a module with shapes in its place, "
            "such as nn.Linear in place of nn.LazyLinear"
        )
    if "its data is not allocated" in text:
        return (
            "an operator reads the values of tensors, which are not known before the step, such as "
            f"sizes that a tensor holds. {_LEAVE_OUT}"
        )
    if "not supported for tensor subclasses" in text:
        return (
            f"{text.partition(' ')[0]} reads the values of tensors, which are not "
            f"known before the step. {_LEAVE_OUT}"
        )
    return None
