"""What records the operators of a block: the native part, or nothing, and then all is kept."""

from __future__ import annotations

import functools
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from .. import _parts
from ..fakes.mode import predicts
from ..shared.budgets import Budget
from ..shared.checks import check_allocator
from ..shared.warn import warn


class Recorder(Protocol):
    """Records one block. It is opened once, by the thread whose operators it records."""

    def open(self, bytes: int | None = None, retry: bool = False) -> None:
        """Begins to record.

        ``bytes``: the budget's, where they are known only now. ``retry``: see :class:`remat`.
        """

    def close(self) -> None:
        """Stops recording. RuntimeError in another thread, or while an inner block is open."""

    def undo_open(self) -> None:
        """Stops recording, if an interrupt came once it was open; else does nothing."""

    def restart(self) -> bool:
        """Forgets what was recorded; False, and does not, where something was saved in it."""

    def suspend(self) -> bool:
        """Records nothing until resume(); False, and goes on, where other hooks lie above it."""

    def resume(self) -> None:
        """Ends suspend(); does nothing where an interrupt came before that."""

    def tell_modules(self, model: nn.Module) -> None:
        """Has figures tell the model's modules apart. Called before it is opened."""

    def modules(self) -> list[str]:
        """Returns the names of the model's modules by number, as of named_modules(); none without
        a model."""

    def count(self, tensors: list[Tensor], gradients: list[Tensor], missing: int) -> None:
        """Within a budget: counts memory from before, and bytes of gradients yet to be made."""

    def of_model(self, number: int) -> None:
        """Within a budget: says whose step it is; a model proves its own plans."""

    def count_model(self, model: nn.Module, states: list[dict[Tensor, Any]]) -> bool:
        """Counts what a model, and what these states of optimizers have for its parameters.

        False, and counts nothing, where it holds anything but plain tensors.
        """

    def is_newly_short(self) -> bool:
        """Within a budget: whether it is too small, and this was not asked for this shape yet."""

    def limit(self) -> dict[str, Any] | None:
        """Within a budget: where the least is needed. None: it is not known yet. Else a dict of

        - ``in_forward``; ``operator``: that runs there, or whose result a node of backward reads,
        - ``others``: bytes that no plan changes, of parameters and the like, too; ``made``: those
          of them that the step made until then and that live on, such as gradients,
        - ``on_context``: of the others, what autograd.Functions made in forward and keep without
          having saved it, as on ``ctx``,
        - ``held``: bytes of activations; ``kept`` and ``recomputed``: tuples of a module's number,
          an operator's name and bytes, of most of these,
        - ``logits``: bytes of held logits of a loss over classes, and of what is made of them for
          it; ``largest_logits``: of the largest of these in the step; ``largest``: of the largest
          held activation that is none of them.
        """

    def deviation(self) -> tuple[bool | None, str, int, int] | None:
        """Within a budget: where a step that is over was most off its plan.

        Whether that is in forward, None where the step did not look at each operator; the operator,
        as of limit(); bytes measured; bytes foreseen.
        None: its peak was at most a hundredth off.
        """

    def trace(self) -> tuple[Any, ...]:
        """Within a budget: what was written down; see csrc/remat/bindings.cpp."""

    def budget(self) -> dict[str, Any]:
        """Within a budget: returns a dict of bytes, 0 where they are not known yet.

        - ``budget``, ``peak`` and ``least`` (see :class:`remat`),
        - ``before``: of parameters, gradients and states from before the block,
        - ``plan``: None, or the predicted peak and the seconds to recompute,
        - ``plans``: the same of all plans, from the fastest to the smallest,
        - ``waiting``: the seconds for which the step is planned to wait for what is moved,
        - ``curve``: the most bytes between the moments of the step, in order.
        """

    def figures(self) -> dict[str, Any]:
        """Returns a dict of

        - ``operators``: how many operators were seen; ``passed``: how many of them were not
          recorded, as the plan needs none of their results again,
        - ``planned``: whether the step follows a plan,
        - ``shapes``: how many steps are known in the process, and how many of them have plans; not
          there where nothing is planned,
        - ``saved``: tuples of a module's number (-1: none), an operator's name ("": none was
          seen), a position in ``figures.VERDICTS``, how many storage contents, their bytes, and the
          seconds to recompute those that were dropped, as measured in the forward,
        - ``given_back``: how many contents were dropped, or once more after a recompute, as
          allocations failed, and their bytes,
        - ``moves``: where something may be moved: bytes moved, brought back, and not moved as there
          was no room; seconds waited; why there was none, "" for the limit; where they go,
        - ``again``: tuples of a module's number, an operator's name, how often it ran again, the
          bytes it made, and the seconds it took.
        """


class NoRecorder:
    """Stands where nothing records a block: autograd keeps all that it saves, as without one.

    ``reason``: a clause that says why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def open(self, bytes: int | None = None, retry: bool = False) -> None: ...

    def close(self) -> None: ...

    def undo_open(self) -> None: ...

    def tell_modules(self, model: nn.Module) -> None: ...

    def modules(self) -> list[str]:
        return []

    def figures(self) -> dict[str, Any]:
        return {"operators": 0, "given_back": (0, 0), "saved": [], "again": []}


def make_recorder(
    everything: bool | None,
    budget: Budget | None,
    strict: bool,
    device: torch.device,
    store: Any = None,
    most_moved: int = 0,
) -> Recorder | NoRecorder:
    """Returns a recorder for one block on a device, or one within a budget.

    Warns where there is none: once in a process without the native part, and on fake tensors, but
    not in a prediction, which tells the native part what the allocator and the clock would.

    ``everything``: True drops all that can be recomputed, cheap or not, for tests. None drops
    nothing, to measure what recording costs. ``store``: where at most ``most_moved`` bytes may be
    moved to; with ``everything`` every second of what can be dropped is.
    """
    native = _parts.native("remat")
    if not native:
        reason = "the native part of memsave_ext, which alone records operators, is not in use here"
        _warn_once(reason)
        return NoRecorder(reason)
    if predicts() and not native.remat_is_predicted():
        reason = "tensors are fake, and this is not a prediction by memsave_ext.memory.predict()"
        _warn(reason)
        return NoRecorder(reason)
    if budget is not None and not predicts():
        check_allocator("remat: a budget", device)
    arguments: tuple[Any, ...] = (everything,)
    if budget is not None:
        arguments = budget.bytes, budget.share, strict, budget.of_free
    return cast(Recorder, native.RematRecorder(*arguments, device, store, most_moved))


def _warn(reason: str) -> None:
    warn(f"remat keeps everything: {reason}")


_warn_once = functools.cache(_warn)
