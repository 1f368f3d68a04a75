"""What a step needs around it to run on fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from .storages import MOST_KNOWN


@contextmanager
def in_sentences() -> Iterator[None]:
    """Turns what fake tensors raise into an error that says what to do."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RuntimeError(
            f"predict: the result of {error.func} depends on the values of tensors, which are not "
            "known before the step. Leave it out of what is predicted, or put a tensor of the size "
            "that is expected in its place"
        ) from error
    except UnsupportedOperatorException as error:
        raise RuntimeError(
            f"predict: {error.func} has no fake kernel, so that the size of its result is not "
            "known. Register one with torch.library.register_fake, or leave it out of what is "
            "predicted"
        ) from error
    except UnsupportedFakeTensorException as error:
        raise RuntimeError(
            f"predict: a kind of tensor cannot be predicted ({error.reason}). Put dense tensors of "
            "the same size in its place"
        ) from error
    except RuntimeError as error:
        text = str(error)
        if "Creating a new Tensor subclass Uninitialized" in text:
            raise RuntimeError(
                "predict: a lazy module has not learned its shapes yet. Put one in its place that "
                "is told them, as nn.Linear in place of nn.LazyLinear"
            ) from error
        if "its data is not allocated" in text:
            raise RuntimeError(
                "predict: an operator reads the values of tensors, which are not known before the "
                "step, as where sizes are given by a tensor. Leave it out of what is predicted"
            ) from error
        if "not supported for tensor subclasses" not in text:
            raise
        raise RuntimeError(
            f"predict: {text.partition(' ')[0]} reads the values of tensors, which are not "
            "known before the step. Leave it out of what is predicted"
        ) from error


@contextmanager
def swaps_of_fakes() -> Iterator[None]:
    """Lets modules convert fake parameters, as in ``model.bfloat16()``.

    torch swaps the tensors then, which fails where a weak reference to one exists, and fake
    tensors' own bookkeeping makes such references.
    """
    swap = torch.utils.swap_tensors

    def set_data(t1: Tensor, t2: Tensor) -> None:
        if isinstance(t1, FakeTensor) and isinstance(t2, FakeTensor):
            t1.data = t2.data
        else:
            swap(t1, t2)

    torch.utils.swap_tensors = set_data
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def copies_of_fakes() -> Iterator[None]:
    """Lets fake tensors be deep-copied, of which torch would copy memory that is not there."""
    deepcopy = Tensor.__deepcopy__

    def copied(self: Tensor, memo: dict[int, Any]) -> Any:
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

    Tensor.__deepcopy__ = copied  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]


@contextmanager
def known_values() -> Iterator[None]:
    """Lets operators on small tensors of known values compute values, as torch does for scalars."""
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST_KNOWN
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def predicts() -> bool:
    """Whether this thread runs on fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def masks_as_in_steps(is_known: Callable[[Tensor], bool]) -> Iterator[None]:
    """Lets models of transformers leave out the masks that real steps leave out.

    They look at no value of a fake tensor, as if a graph were traced, and make every mask. They
    make it here where its values are not known, as of a batch's padding.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(utils, "is_fake_tensor"):  # not imported, or of another version
        yield
        return
    is_fake = utils.is_fake_tensor
    utils.is_fake_tensor = lambda value: is_fake(value) and not is_known(value)
    try:
        yield
    finally:
        utils.is_fake_tensor = is_fake
