"""Fake tensors, made fit for training steps; and what is said where they fail."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from .values import MOST_KNOWN

# What fakes raise that is not the step's own error.
FAKES_ERRORS = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedOperatorException, UnsupportedFakeTensorException),
)


def predicts() -> bool:
    """Whether this thread runs on fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def fake_of(tensor: Tensor) -> FakeTensor:
    """Returns a fake tensor with the memory of one on the meta device."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return FakeTensor(mode, tensor, torch.device("cpu"))


def values_elsewhere(arguments: Any) -> list[tuple[Tensor, Any]]:
    """Returns the number of each tensor of whole numbers on another device whose elements all have
    the same: a model may leave out a mask that hides nothing. A child asks the CPU's themselves."""
    tensors = (t for t in tree_leaves(arguments) if isinstance(t, Tensor) and not t.is_cpu)
    return [(t, value) for t in tensors if (value := _only_value(t)) is not None]


def _only_value(tensor: Tensor) -> Any:
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    first = tensor.flatten()[0]
    return first.item() if bool((tensor == first).all()) else None


def loss_in(output: Any) -> Tensor | None:
    """Returns the loss that a model has returned, alone or as ``loss`` beside other results."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and output.numel() == 1:
        found = output
    return found if isinstance(found, Tensor) else None


def make_fit() -> None:
    """Makes fake tensors of this process fit for steps, for good: they are converted and copied as
    real ones are, and operators on small tensors of known values compute values."""
    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST_KNOWN
    fake_tensor.log.disabled = True  # the traceback of a fake kernel
    swap, deepcopy = torch.utils.swap_tensors, Tensor.__deepcopy__
    tolist = FakeTensor.tolist

    def swapped(t1: Tensor, t2: Tensor) -> None:
        # A module swaps its parameters where it converts them, as in ``model.bfloat16()``. That
        # fails where a weak reference to one exists, and fake tensors' own bookkeeping makes such.
        if isinstance(t1, FakeTensor) and isinstance(t2, FakeTensor):
            t1.data = t2.data
        else:
            swap(t1, t2)

    def copied(self: Tensor, memo: dict[int, Any]) -> Any:
        # torch would copy memory that is not there.
        if not isinstance(self, FakeTensor) or not self.is_leaf or id(self) in memo:
            return deepcopy(self, memo)
        made: Tensor = self.detach().clone()
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copied(self.grad, memo)
        return made

    def listed(self: FakeTensor) -> Any:
        # Of a fake one torch takes each element out by operators, which a step does not run.
        if self.constant is None:
            return tolist(self)
        with unset_fake_temporarily():
            return self.constant.tolist()

    torch.utils.swap_tensors = swapped
    FakeTensor.tolist = listed  # type: ignore[method-assign]
    Tensor.__deepcopy__ = copied  # type: ignore[method-assign]
    functional.linear = _linear


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
    except (RuntimeError, UnsupportedFakeTensorException) as error:
        if sentence := _sentence(error):
            raise RuntimeError(f"predict: {sentence}") from error
        if hasattr(error, "add_note") and not str(error).startswith("predict: "):
            error.add_note(_ON_FAKES)
        raise


_torchs_linear = functional.linear


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Adds the bias in place where torch does; of fake tensors torch makes a sum."""
    flat = input.dim() == 2 or input.is_contiguous()
    if bias is None or flat or not predicts():
        return _torchs_linear(input, weight, bias)
    product = _torchs_linear(input, weight)
    return product.add_(bias.to(product.dtype))


def run_uncompiled() -> None:
    """Lets compiled modules and functions run as if they were not compiled, for good.

    The compiler cannot trace these fake tensors, as it makes fakes of its own.
    """
    if "torch._dynamo" in sys.modules:  # else nothing is compiled
        torch.compiler.set_stance("force_eager")


def run_transformers_as_in_steps(is_known: Callable[[Tensor], bool]) -> None:
    """Lets models of transformers run the operators that real steps run, for good.

    They look at no value of a fake tensor, as if a graph were traced, and make every mask. They
    make it here where its values are not known, as of a batch's padding. They look for padding in
    tokens that came without a mask, and do not warn of what fake ones seem to have.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    models: Any = sys.modules.get("transformers.modeling_utils")
    if hasattr(utils, "is_fake_tensor"):  # else not imported, or of another version
        is_fake = utils.is_fake_tensor
        utils.is_fake_tensor = lambda x: is_fake(x) and not is_known(x)
    if hasattr(models, "is_tracing"):  # which only that search asks there
        models.is_tracing = lambda _=None: False
        models.logger.warning_once = lambda *_, **__: None


_ON_FAKES = (
    "predict: this was raised on fake tensors. If the step runs by itself, a fake kernel of torch "
    "differs from the real one: leave the operator out of what is predicted"
)


def _sentence(error: Exception) -> str | None:
    """Returns what happened and what to do, None where the error is the step's own."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            f"the result of {error.func} depends on the values of tensors, which are not "
            "known before the step. Leave it out of what is predicted, or put a tensor of the size "
            "that is expected in its place"
        )
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{error.func} has no fake kernel, so that the size of its result is not "
            "known. Register one with torch.library.register_fake, or leave it out of what is "
            "predicted"
        )
    if isinstance(error, UnsupportedFakeTensorException):
        return (
            f"a kind of tensor cannot be predicted ({error.reason}). Put dense tensors of "
            "the same size in its place"
        )
    text = str(error)
    if "Creating a new Tensor subclass Uninitialized" in text:
        return (
            "a lazy module has not learned its shapes yet. Put one in its place that "
            "is told them, as nn.Linear in place of nn.LazyLinear"
        )
    if "its data is not allocated" in text:
        return (
            "an operator reads the values of tensors, which are not known before the "
            "step, as where sizes are given by a tensor. Leave it out of what is predicted"
        )
    if "not supported for tensor subclasses" in text:
        return (
            f"{text.partition(' ')[0]} reads the values of tensors, which are not "
            "known before the step. Leave it out of what is predicted"
        )
    return None
