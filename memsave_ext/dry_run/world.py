"""What a child process needs so that steps run there on fake tensors: everything is replaced once,
and nothing is put back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..fakes import patches
from ..fakes.cuda import as_on_cuda
from ..fakes.mode import FAKES_ERRORS, fakes, new_mode
from ..fakes.storages import Storages
from ..shared.device_memory import card_of_child
from ..shared.tensors import plain_tensors
from . import child
from .tensors import swap_all


@contextmanager
def on_fakes(
    storages: Storages, device: torch.device, counted: Iterable[Tensor] = ()
) -> Iterator[Callable[[Any], None]]:
    """In a child: runs what is inside on fake tensors, as all tensors of the process are then.

    What is yielded makes fakes of real tensors that came later: all in what it is given. Parameters
    that are made inside are given to it.

    Args:
        storages: is told of memory, and knows that of all tensors.
        device: that is predicted.
        counted: tensors of whose memory it is told, too.
    """
    mode = new_mode()
    patches.patch(patches.on_fakes(storages.resized))
    # transformers would read weights in threads of its own, in which nothing is fake.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    known: dict[int, torch.UntypedStorage] = {}
    swapped = swap_all(child.tensors, mode, known)
    for tensor in plain_tensors(list(counted)):
        storages.note_before(tensor, counts=True)
    for tensor in swapped:
        storages.note_before(tensor, counts=False)
    adopt = _adopting(mode, storages, known)
    patches.patch([patches.of_parameters(adopt)])
    with ExitStack() as stack:
        if device.type == "cuda":
            patches.patch(patches.on_cuda(card_of_child()))
            stack.enter_context(as_on_cuda())
        stack.enter_context(fakes(mode))
        stack.enter_context(storages)
        yield adopt
        if isinstance(storages.failed, FAKES_ERRORS):
            # A model's own `except` may have taken it for an error of the step's.
            raise storages.failed


def _adopting(
    mode: FakeTensorMode, storages: Storages, known: dict[int, torch.UntypedStorage]
) -> Callable[[Any], None]:
    """``known``: as of :func:`swap_all`."""

    def adopt(value: Any) -> None:
        real = [tensor for tensor in plain_tensors(value) if not isinstance(tensor, FakeTensor)]
        if real:
            with _disable_current_modes():
                swapped = swap_all(real, mode, known)
            for tensor in swapped:
                storages.memory(tensor)

    return adopt


def follow_libraries(storages: Storages) -> None:
    """Lets models of libraries that are imported by now run as in steps."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled
        # The compiler cannot trace these fake tensors, as it makes fakes of its own.
        torch.compiler.set_stance("force_eager")
    patches.patch(patches.of_libraries(storages.has_known_values))
