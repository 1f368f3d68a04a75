"""``remat``: a block in which autograd keeps less."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from ..memory.hooks import Modules
from .figures import RematFigures, make_figures, make_report
from .recorder import make_recorder


class remat:  # noqa: N801, a context manager is used like a function
    """A block that keeps less for backward: of the tensors that autograd saves in it, those that
    are cheap to compute again from what is kept are dropped, and computed again in backward, one
    operator at a time. No line of the model changes, and gradients are those of the plain run, bit
    for bit.

    Example::

        with memsave_ext.remat() as r:
            loss = model(x)
        loss.backward()              # inside of the block or after it
        print(r.report())

    What the thread does in the block is recorded, backwards excepted; what other threads do is
    kept as ever. Blocks may be nested: the inner one has its own record.

    Args:
        model: whose modules :meth:`report` tells apart. Hooks are on them inside of the block only,
            and cost a microsecond or two per call.

    Raises:
        TypeError: ``model`` is neither a module nor None.
        RuntimeError: a block is entered a second time, or left in another order or thread than it
            was entered.
    """

    def __init__(self, model: nn.Module | None = None, *, _everything: bool | None = False) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"remat: model must be a torch.nn.Module or None, got {type(model).__name__}"
            )
        self._modules = Modules(model)
        self._recorder = make_recorder(_everything)
        self._hooks: ExitStack | None = None

    def __enter__(self) -> remat:
        if self._hooks is not None:
            raise RuntimeError("remat: a block is entered once; make another")
        self._hooks = self._install()
        try:
            self._recorder.open()
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

    def figures(self) -> RematFigures:
        """What was kept, dropped and computed again until now."""
        return make_figures(self._recorder.figures(), self._modules.names)

    def report(self, *, top: int = 10) -> str:
        """The same as tables: by module and by operator, and why the rest is kept.

        Args:
            top: of how many modules and operators at most, those with the most memory first.
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
                # Also where the forward raises.
                stack.callback(module.register_forward_hook(after, always_call=True).remove)
            return stack.pop_all()
