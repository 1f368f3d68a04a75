"""``remat``: a block in which autograd keeps less memory for backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..memory.hooks import Modules
from .budget import LivedBefore, check_arguments, device_of, parse_budget, warn_if_short
from .figures import RematFigures, make_figures, make_report
from .recorder import make_recorder


class remat:  # noqa: N801, a context manager is used like a function
    """A block that keeps less memory for backward.

    Of the tensors that autograd saves in it, those that are cheap to recompute from what is kept
    are dropped. Backward recomputes them, one operator at a time. The model's code stays as it is,
    and gradients equal those of the plain run bit for bit.

    Example::

        with memsave_ext.remat() as r:
            loss = model(x)
        loss.backward()              # inside of the block or after it
        print(r.report())

    Only what the entering thread does in the block is recorded, except its backwards; what other
    threads save is kept as usual. Blocks may be nested: the inner one has its own record.

    Args:
        model: :meth:`report` shows its modules separately. They have hooks only inside the block,
            which cost a microsecond or two per call.

    Raises:
        TypeError: ``model`` is neither a module nor None.
        RuntimeError: a block is entered a second time, or is left in another thread than the one
            that entered it, or before a block inside it.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        budget: int | float | str | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        strict: bool = False,
        _everything: bool | None = False,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"remat: model must be a torch.nn.Module or None, got {type(model).__name__}"
            )
        check_arguments(budget, optimizer, strict)
        self._modules = Modules(model)
        self._within = None if budget is None else parse_budget(budget, strict)
        self._recorder = make_recorder(_everything, self._within, device_of(model))
        self._before = None if budget is None else LivedBefore(self._recorder, model, optimizer)
        self._hooks: ExitStack | None = None

    def __enter__(self) -> remat:
        if self._hooks is not None:
            raise RuntimeError("remat: a block is entered once; make another")
        self._hooks = self._install()
        try:
            self._recorder.open()
            if self._before is not None:
                self._before.install(self._hooks)
        except BaseException:
            self._hooks.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hooks is None:
            raise RuntimeError("remat: a block that was not entered cannot be left")
        self._recorder.close()
        self._hooks.close()
        if self._within is not None and error is None:
            warn_if_short(self._recorder)

    @property
    def peak(self) -> int:
        """The most bytes that counted until now, from the block's beginning to its backward's end.

        Raises:
            RuntimeError: the block has no budget.
        """
        return self._of_budget("peak")

    @property
    def least(self) -> int | None:
        """The lowest budget for a step of these shapes; None in the first one, which is measured.

        Raises:
            RuntimeError: the block has no budget.
        """
        return self._of_budget("least") or None

    @property
    def budget(self) -> int | None:
        """The budget in bytes; None where it is a share and this is the first step of its shape.

        Raises:
            RuntimeError: the block has no budget.
        """
        return self._of_budget("budget") or None

    def _of_budget(self, name: str) -> int:
        if self._within is None:
            raise RuntimeError(f"remat: {name} is known only with a budget")
        return int(self._recorder.budget()[name])

    def figures(self) -> RematFigures:
        """Returns what has been kept, dropped and recomputed until now."""
        return make_figures(self._recorder.figures(), self._modules.names)

    def report(self, *, top: int = 10) -> str:
        """Returns the figures as tables by module and by operator, and why the rest is kept.

        Args:
            top: the most rows a table has; those with the most memory come first.
        """
        return make_report(self.figures(), top)

    def _install(self) -> ExitStack:
        recorder = self._recorder
        with ExitStack() as stack:
            for number, module in enumerate(self._modules.modules):

                def before(*_: Any, number: int = number) -> None:
                    recorder.enter_module(number)

                def after(*_: Any) -> None:
                    recorder.leave_module()

                stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                # always_call: it is called also where the forward raises.
                stack.callback(module.register_forward_hook(after, always_call=True).remove)
            return stack.pop_all()
