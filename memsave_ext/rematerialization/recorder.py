"""Chooses what records the operators of a block: the native part, or the fallback."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .. import _native
from .fallback.block import Block
from .fallback.content import under_fakes


class Budget(NamedTuple):
    bytes: int  # 0 for a share
    share: float  # of the activations; 0 for bytes
    strict: bool


class Recorder(Protocol):
    """Records one block. It is opened once, by the thread whose operators it records."""

    def open(self) -> None: ...

    def close(self) -> None:
        """Stops recording. RuntimeError in another thread, or while an inner block is open."""

    def enter_module(self, number: int) -> None:
        """Notes that the module's forward begins.

        Ignored in other threads, where replicas of a module run its hooks.
        """

    def leave_module(self) -> None: ...

    def count(self, tensors: list[Tensor], missing: int) -> None:
        """Within a budget: counts memory from before, and bytes of gradients yet to be made."""

    def is_newly_short(self) -> bool:
        """Within a budget: whether it is too small, and this was not asked for this shape yet."""

    def limit(self) -> tuple[bool, str, int, int] | None:
        """Within a budget: where the least is needed. None: it is not known yet.

        Whether that is in forward; the operator that runs there, or whose result a node of backward
        reads; bytes that no plan changes, parameters and the like included; bytes of activations.
        """

    def trace(self) -> tuple[Any, ...]:
        """Within a budget: what was written down; see csrc/remat/bindings.cpp."""

    def budget(self) -> dict[str, Any]:
        """Within a budget: returns a dict of bytes, 0 where they are not known yet.

        - ``budget``, ``peak`` and ``least`` (see :class:`remat`),
        - ``before``: of parameters, gradients and states from before the block,
        - ``plan``: None, or the predicted peak and the seconds to recompute,
        - ``plans``: the same of all plans, from the fastest to the smallest,
        - ``curve``: the most bytes between the moments of the step, in order.
        """

    def figures(self) -> dict[str, Any]:
        """Returns a dict of

        - ``operators``: how many operators were recorded,
        - ``saved``: tuples of a module's number (-1: none), an operator's name ("": none was
          seen), a position in ``figures.VERDICTS``, how many storage contents, their bytes, and the
          seconds to recompute those that were dropped, as measured in the forward,
        - ``again``: tuples of a module's number, an operator's name, how often it ran again, the
          bytes it made, and the seconds it took.
        """


def keeps_no_budget() -> bool:
    """Whether tensors are fake, and no prediction says what they would take."""
    predicted = _native.module and _native.module.remat_is_predicted()
    return under_fakes() and not predicted


def make_recorder(everything: bool | None, budget: Budget | None, device: torch.device) -> Recorder:
    """Returns a recorder for one block on a device, or one within a budget (native only).

    On fake tensors it is the fallback's, except in a prediction, which tells the native part what
    the allocator and the clock would.

    ``everything``: True drops all that can be recomputed, cheap or not, for tests. None drops
    nothing, to measure what recording costs.
    """
    recorder: Any
    if not _native.module or keeps_no_budget():
        recorder = Block(everything)
    elif budget is not None:
        recorder = _native.module.RematRecorder(*budget, device)
    else:
        recorder = _native.module.RematRecorder(everything, device)
    return cast(Recorder, recorder)
