"""Cards that simulations take figures of, and how long an operator would run on one of them."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_iter

from memsave_ext.fakes import costs, repeats, storages
from memsave_ext.fakes.kernels import nbytes


@dataclass(frozen=True)
class Card:
    """What a card's maker says of it, dense products in bfloat16, and of its bus, each way."""

    name: str
    flops: float  # per second
    memory: float  # bytes per second
    bus: float  # bytes per second, each way
    source: str


CARDS = (
    Card("H200", 989e12, 4.8e12, 64e9, "NVIDIA H200 datasheet: SXM; PCIe 5.0 x16"),
    Card("A100", 312e12, 2.039e12, 32e9, "NVIDIA A100 datasheet: 80 GB SXM; PCIe 4.0 x16"),
    Card(
        "4090",
        165.2e12,
        1.008e12,
        32e9,
        "NVIDIA Ada GPU architecture, table of RTX 4090; PCIe 4.0 x16",
    ),
)
# Of these figures so much is reached in practice.
FLOPS_REACHED, MEMORY_REACHED, BUS_REACHED = 0.4, 0.8, 0.85
_LAUNCH = 5e-6  # seconds of a kernel that does nothing, with the dispatcher's


def seconds_on(card: Card, func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """How long an operator would run there: what takes longer, its arithmetic or its memory."""
    tensors = {id(t): t for t in tree_iter((args, result)) if isinstance(t, Tensor)}
    seconds = sum(map(nbytes, tensors.values())) / (MEMORY_REACHED * card.memory)
    formula = costs._FORMULAS.get(getattr(func, "_overloadpacket", None))
    if formula is not None:
        with contextlib.suppress(TypeError, ValueError, AssertionError, RuntimeError):
            flops = formula(*args, **kwargs, out_val=result)
            seconds = max(seconds, flops / (FLOPS_REACHED * card.flops))
    return _LAUNCH + seconds


@contextlib.contextmanager
def timed_as(card: Card) -> Iterator[None]:
    timed = functools.partial(seconds_on, card)
    # What is remembered of calls has the times of another card.
    forgotten = mock.patch.dict(repeats._of_process, clear=True)
    names = ("operator_seconds", "seconds_on_card")  # within a budget, and without one
    with forgotten, mock.patch.multiple(storages, **dict.fromkeys(names, timed)):
        yield
