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

from ..adam.dtensor import is_dtensor
from .storages import MOST_KNOWN

_ON_FAKES = (
    "predict: this was raised on fake tensors. If the step runs by itself, a fake kernel of torch "
    "differs from the real one: leave the operator out of what is predicted"
)


@contextmanager
def in_sentences() -> Iterator[None]:
    """Turns what fake tensors raise into an error that says what to do.

    torch's log of it, with the traceback of the fake kernel, is left out.
    """
    was_disabled, fake_tensor.log.disabled = fake_tensor.log.disabled, True
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
            if hasattr(error, "add_note") and not text.startswith("predict: "):
                error.add_note(_ON_FAKES)
            raise
        raise RuntimeError(
            f"predict: {text.partition(' ')[0]} reads the values of tensors, which are not "
            "known before the step. Leave it out of what is predicted"
        ) from error
    finally:
        fake_tensor.log.disabled = was_disabled


@contextmanager
def uncompiled() -> Iterator[None]:
    """Lets compiled modules and functions run as if they were not compiled.

    While a fake tensor is traced, it is the compiler's own.
    """
    if "torch._dynamo" not in sys.modules:  # so that nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp": "FSDP",
    "torch.distributed._composable": "FSDP",
}
_UNWRAPPED = (
    "Predict the model before it is wrapped, which is what one process holds without sharding; "
    "memory.footprint(model, optimizer) tells what a shard holds"
)


@contextmanager
def built_alone() -> Iterator[None]:
    """Raises an error that says what to do if DistributedDataParallel or FSDP fails inside."""
    try:
        yield
    except Exception as error:
        trace = error.__traceback__
        while trace is not None:
            module = trace.tb_frame.f_globals.get("__name__", "")
            for name, wrapper in _WRAPPERS.items():
                if module.startswith(name):
                    raise RuntimeError(
                        f"predict: {wrapper} cannot be predicted, as it asks other processes. "
                        f"{_UNWRAPPED}"
                    ) from error
            trace = trace.tb_next
        raise


def refuse_distributed(model: nn.Module) -> None:
    """Raises an error if a module is wrapped, or a parameter sharded, for several processes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            what = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"predict: {what} is a DistributedDataParallel, which asks other processes. "
                f"{_UNWRAPPED}"
            )
    for name, p in model.named_parameters():
        if is_dtensor(p):
            raise ValueError(
                f"predict: the parameter {name} is a DTensor, as FSDP2 makes of it, whose "
                f"collectives are not predicted. {_UNWRAPPED}"
            )


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
