"""``remat``: a block in which autograd keeps less memory for backward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..fakes.mode import predicts
from ..shared.budgets import Budget
from ..shared.modules import no_hook, without_compiler
from ..shared.table import Text, as_text, format_bytes, format_seconds
from .ahead import SECONDS, ahead_of
from .budget import (
    LivedBefore,
    bytes_of_device,
    check_ahead,
    check_arguments,
    check_support,
    counted_device,
    number_of,
)
from .figures import PLANNED, RematFigures, make_figures, write_moves, write_report
from .functions import check_pure, tell
from .limit import Limit, describe_limit, limit_of, warn_of_least, write_limit
from .offload import Offload, check_offload, most_moved, store_of
from .picture import draw_budget
from .recorder import NoRecorder, Recorder, make_recorder

_NOT_AHEAD = "ahead=False was passed"


class remat:  # noqa: N801, a context manager is used like a function
    """A block that keeps less memory for backward.

    Of the tensors that autograd saves in it, those that are cheap to recompute from what is kept
    are dropped. Backward recomputes them, one operator at a time. The model's code stays as it is,
    and gradients equal those of the plain run bit for bit. On the CPU, the third step of a shape
    and later ones follow a plan, which takes a percent more of the step's time wherever that saves
    four percent of the activations. Only the native part records a block: without it, and on fake
    tensors outside of a prediction, a block without a budget keeps everything, says so in a
    UserWarning, and its figures are empty.

    Example::

        with memsave_ext.remat() as r:
            loss = model(x)
        loss.backward()              # inside of the block or after it
        print(r.report())

    Only what the entering thread does in the block is recorded, except its backwards; what other
    threads save is kept as usual. Blocks may be nested: the inner one has its own record.

    With a budget, expensive operators are recomputed, too, as many as it takes, by a plan that
    takes the least time within it. The first step of a shape (the same operators with arguments of
    the same shapes) runs ahead on fake tensors and is planned, if ``model`` is given and is the
    first that the block calls; otherwise it is measured, and its peak may exceed the budget. Later
    ones follow a plan made of the first. The run ahead is in a child process made by ``fork``, so
    that it touches nothing of this one; what the model does outside of memory, as sending messages,
    it does there, too (see :func:`is_dry_run`). What counts
    on the CPU: parameters and buffers of the modules that the block calls, their gradients, states
    of this package's optimizers, and what is allocated from the block's beginning to the end of its
    backward, by any thread; inputs do not. On CUDA: all that the caching allocator has given out.

    Args:
        model: :meth:`report` shows its modules separately. Which one runs is seen from outside:
            nothing is put into them, but for a hook on ``model`` in a block with a budget.
        budget: the most bytes that the step may need: an int; text with a unit, such as "8GB" (1e9
            bytes each) or "512MiB" (2**20 each); "80%", of what the process may have of the
            device's memory; "auto", what is free of it; or a float above 0 and at most 1:
            parameters, gradients and states, and this share of what a step that keeps everything
            needs besides. "80%" and "auto" are asked of the device when the block is entered: on
            the CPU of the least of physical memory, the process's limits and those of its control
            groups; on CUDA of what the caching allocator has and what the device has free, without
            pieces of segments in use. "auto" is what counts already and nine tenths of what is
            free: the rest is for memory that does not count.
            Where it is less than the minimum, a warning says so once, and the step runs at the
            minimum.
        optimizer: one or several optimizers that are not this package's: their states count, too.
        strict: with too small a budget, a step that has a plan raises torch.OutOfMemoryError at its
            first saved tensor, in place of the warning.
        retry: where an allocation fails, on any thread, from the block's beginning to the end of
            its backward, the block drops memory that it has kept and that nobody else refers to,
            the oldest first, at least as much as is asked for. It is tried again until it succeeds;
            its error goes on where nothing is left to drop. On CUDA, whose allocator does not say
            how much it needs, memory is dropped where the allocator has none to reuse and less than
            an eighth of the device's is free.

        offload: what would take longer to recompute is moved elsewhere while the step goes on, and
            brought back before backward needs it, as far as the budget asks for it: to a folder, as
            of a local disk, in a file without a name that is gone with the process, also after a
            crash; or, from CUDA, to "cpu", pinned memory of the host, copied on streams of its own.
            A folder of the name cpu is "./cpu". What there is no room for is kept; the report says
            so. "cpu" in a block on the CPU moves nothing, which a UserWarning says once.
        ahead: whether the first step of a shape runs ahead; or the most seconds that it may take,
            besides 0.05 for each parameter. True: 10. A step that cannot run ahead is measured, and
            the report says why.
        pure: classes of ``autograd.Function`` whose forwards compute the same from the same
            arguments: their results, and what they save, are computed again like an operator's,
            once a second run has given the same. While the block is open, their ``forward`` is
            replaced by one that tells of it.
        offload_limit: the most bytes that all blocks with the same folder, or of the same CUDA
            device, may have there at a time: an int, or text such as "50GB". None: as many as there
            is room for.

    Raises:
        TypeError: an argument of the wrong type, or ``pure`` has anything but such classes.
        ValueError: a budget out of range or not to be read; ``optimizer``, ``strict`` or
            ``offload`` without a budget; ``offload`` is neither "cpu" nor a folder, or the model is
            on a device that it does not move from; ``offload_limit`` without ``offload``, or out of
            range.
        OSError: no file can be made in the folder ``offload``.
        RuntimeError: a budget without the native part, with a CUDA allocator that reports nothing
            (cudaMallocAsync), or a part of a device whose memory is not known; a block is entered a
            second time, or is left in another thread than the one that entered it, or before a
            block inside it.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        budget: int | float | str | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        strict: bool = False,
        retry: bool = False,
        offload: Offload | None = None,
        offload_limit: int | str | None = None,
        ahead: bool | float = True,
        pure: Sequence[type[Function]] = (),
        _everything: bool | None = False,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"remat: model must be a torch.nn.Module or None, got {type(model).__name__}"
            )
        within = check_arguments(budget, optimizer, strict, retry)
        check_ahead(ahead)
        functions = check_pure("remat", pure)
        self._prepare(
            model, model, within, optimizer, strict, retry, offload, offload_limit, ahead,
            functions, _everything,
        )  # fmt: skip

    @classmethod
    def _of_checked(cls, counted: nn.Module, by_module: bool, **options: Any) -> remat:
        """Returns a block for one of many forwards of a module, whose options were checked once:
        these take as long as all else. What may have changed since is looked at again."""
        check_support(options["budget"])
        block = cls.__new__(cls)
        block._prepare(counted if by_module else None, counted, **options)
        return block

    def _prepare(
        self,
        model: nn.Module | None,
        counted: nn.Module | None,
        budget: Budget | None,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        strict: bool,
        retry: bool,
        offload: Offload | None,
        offload_limit: int | str | None,
        ahead: bool | float,
        pure: tuple[type[Function], ...],
        everything: bool | None,
    ) -> None:
        """``counted``: the model whose memory counts, also where reports do not show it."""
        device = counted_device(counted)
        has_budget = budget is not None or bool(everything)
        offload = check_offload("remat", offload, offload_limit, has_budget, device)
        self._model = model
        self._recorder = make_recorder(
            everything, budget, strict, device, store_of(offload, device),
            most_moved(offload_limit),
        )  # fmt: skip
        if model is not None:
            self._recorder.tell_modules(model)
        self._within = None if isinstance(self._recorder, NoRecorder) else budget
        self._pure = pure
        self._before: LivedBefore | None = None
        if self._within is not None and not isinstance(self._recorder, NoRecorder):
            self._before = LivedBefore(self._recorder, counted, optimizer)
        self._retry, self._ahead = retry, ahead
        self._hooks: ExitStack | None = None
        self._device = device
        self._counted, self._was_planned = counted, False
        self._measured = ""  # why the first step of these shapes was not planned ahead

    def __enter__(self) -> remat:
        if self._hooks is not None:
            raise RuntimeError("remat: one `with remat()` is entered once; make another one")
        within, bytes_now = self._within, None
        if within is not None and within.of_device:
            bytes_now = bytes_of_device("remat", within, self._device)
        self._hooks = stack = ExitStack()
        try:
            recorded = not isinstance(self._recorder, NoRecorder)
            if recorded and (telling := tell(self._pure)):
                self._end_with(stack, telling.close)
            self._recorder.open(bytes_now, self._retry)
            if self._before is not None:
                if (remove := self._before.install()) is not None:
                    self._end_with(stack, remove)
                self._plan_first_call(stack)
            return self
        except BaseException:
            self._recorder.undo_open()
            stack.close()
            raise

    def _end_with(self, stack: ExitStack, end: Callable[[], None]) -> None:
        """Calls ``end``, which gives the process back what it had, when the block is left, or at
        the latest when it is collected, as it may never be left."""
        ends = weakref.finalize(self, end)
        ends.atexit = False
        stack.callback(ends)

    def _plan_first_call(self, stack: ExitStack) -> None:
        """Plans the step when the block calls its model, where it begins."""
        model, recorder = self._counted, self._recorder
        if self._was_planned or isinstance(recorder, NoRecorder):
            return
        if not self._ahead:
            self._measured = _NOT_AHEAD
            return
        if model is None or isinstance(model, torch.jit.ScriptModule):
            given = "no model" if model is None else "a scripted model"
            self._measured = f"remat was given {given}"
            return
        if isinstance(model, DistributedDataParallel):
            model = model.module  # what comes before is not the same in its second step
        hook = model.register_forward_pre_hook(_PlanAtFirstCall(self), with_kwargs=True)
        stack.callback(hook.remove)

    def _plan_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans the step of the model, whose call begins, unless it was planned."""
        if self._was_planned:
            return
        recorder = self._recorder
        assert not isinstance(recorder, NoRecorder)
        try:
            if recorder.restart() and recorder.suspend():
                self._plan_ahead(module, _forward, args, kwargs, module)
            else:
                self._was_planned = True
                self._measured = "tensors were saved for backward before the model was called"
        finally:
            recorder.resume()

    def _plan_ahead(
        self,
        module: nn.Module,
        forward: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known_as: nn.Module,
    ) -> None:
        """Plans the step of a module that is about to run, where none like it is known.

        ``known_as``: the module, or that of which it is a replica, new in each step.
        """
        self._was_planned = True
        if self._within is None or predicts():
            return
        if not self._ahead:
            self._measured = _NOT_AHEAD
            return
        seconds = SECONDS if self._ahead is True else self._ahead
        model = number_of(module if self._counted is None else self._counted)
        why_not = ahead_of(known_as).plan(
            module, args, kwargs, self._device, forward, self._pure, seconds, model, self._model
        )
        self._measured = why_not or ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hooks is None:
            raise RuntimeError("remat: a `with remat()` that was not entered cannot be left")
        try:
            self._recorder.close()
        finally:
            self._hooks.close()
        if self._within is not None and error is None:
            recorder = self._budgeted("budget")
            if recorder.is_newly_short() and (limit := self._limit(recorder)):
                warn_of_least(recorder, limit, self._device.type == "cuda")

    @property
    def peak(self) -> int:
        """The most bytes that counted until now, from the block's beginning to its backward's end.

        Raises:
            RuntimeError: the block has no budget.
        """
        return self._of_budget("peak")

    @property
    def least(self) -> int | None:
        """The lowest budget for a step of these shapes; None in a first one that is measured.

        Raises:
            RuntimeError: the block has no budget.
        """
        return self._of_budget("least") or None

    @property
    def budget(self) -> int | None:
        """The budget in bytes; None where it is a share and the step has no plan.

        Raises:
            RuntimeError: the block has no budget.
        """
        return self._of_budget("budget") or None

    def _of_budget(self, name: str) -> int:
        return int(self._budgeted(name).budget()[name])

    def _budgeted(self, name: str) -> Recorder:
        if isinstance(self._recorder, NoRecorder):
            raise RuntimeError(f"remat: {name} is not known: {self._recorder.reason}")
        if self._within is None:
            raise RuntimeError(f"remat: {name} is known only with a budget")
        return self._recorder

    def figures(self) -> RematFigures:
        """Returns what has been kept, dropped and recomputed until now."""
        return make_figures(self._recorder.figures(), self._names())

    def report(self, *, top: int = 10, file: TextIO | None = None) -> Text:
        """Returns the figures as tables by module and by operator, and why the rest is kept.

        Args:
            top: the most rows a table has; those with the most memory come first.
            file: where to print it, too; None for nowhere.
        """

        def write(text: TextIO) -> None:
            if isinstance(self._recorder, NoRecorder):
                print(f"Kept everything: {self._recorder.reason}", file=text)
                return
            figures = self._recorder.figures()
            if self._within is not None:
                print(self._budget_line(self._recorder), file=text)
                self._write_limit(self._recorder, top, text)
            elif figures["planned"]:
                print(PLANNED, file=text)
            if figures["planned"]:
                known, planned = figures["shapes"]
                print(
                    f"Steps of {known} shapes are known, and {planned} of them have plans",
                    file=text,
                )
            if "moves" in figures:
                write_moves(figures["moves"], text)
            write_report(make_figures(figures, self._names()), top, text)

        return as_text(write, file)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the step's memory beside its budget, and the time that other budgets would take.

        Args:
            path: the picture's; its suffix names the format.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: the block has no budget, or was not entered yet.
        """
        recorder = self._budgeted("plot")
        figures = recorder.budget()
        forward = recorder.trace()[3]
        draw_budget(figures, forward, self.figures().dropped_bytes, path)

    def _budget_line(self, recorder: Recorder) -> str:
        figures = recorder.budget()
        budget, peak, least = (format_bytes(figures[name]) for name in ("budget", "peak", "least"))
        if figures["plan"] is None:
            why = self._measured or "it went differently than on fake tensors, where it was planned"
            return (
                f"Peak {peak}; this is the first step of these shapes, which is measured and has "
                f"no plan yet: {why}"
            )
        waiting = figures["waiting"]
        line = (
            f"Peak {peak} of a budget of {budget}; the minimum for these shapes is {least}; "
            f"recomputing is planned to take {format_seconds(figures['plan'][1] - waiting)}"
        )
        if waiting:
            line += f", and waiting for moved results {format_seconds(waiting)}"
        if limit := self._limit(recorder):
            line += f"\nThe minimum is needed in {describe_limit(limit)}"
        if deviation := recorder.deviation():
            line += f"\n{_describe(*deviation)}"
        return line

    def _limit(self, recorder: Recorder) -> Limit | None:
        return None if self._before is None else limit_of(recorder, self._before.lived())

    def _write_limit(self, recorder: Recorder, top: int, text: TextIO) -> None:
        figures, limit = recorder.budget(), self._limit(recorder)
        if limit is None or figures["budget"] >= figures["least"]:
            return
        write_limit(limit, self._names(), self._device.type == "cuda", top, text)

    def _names(self) -> list[str]:
        """By number; see :meth:`Recorder.modules`."""
        names = self._recorder.modules()
        if self._model is not None and names:
            names[0] = type(without_compiler(self._model)).__name__
        return names


def _describe(in_forward: bool | None, operator: str, measured: int, foreseen: int) -> str:
    """Tells of a step whose peak was not the planned one."""
    planned = f"{format_bytes(measured)}, where {format_bytes(foreseen)} was planned"
    if in_forward is None:
        return f"The peak was off its plan: {planned}. The next step will tell where"
    name = operator or "an input"
    where = f"after {name}" if in_forward else f"where backward reads a result of {name}"
    return f"The peak was off its plan, most {where}: {planned}"


class _PlanAtFirstCall:
    """A hook with which a block hears of its model's first call. A copy of the model has none."""

    def __init__(self, block: remat) -> None:
        self._block = weakref.ref(block)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (block := self._block()) is not None:
            block._plan_call(module, args, kwargs)

    def __reduce__(self) -> Any:
        return no_hook, ()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)
