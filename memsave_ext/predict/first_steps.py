"""Measures the first steps of a training: the peak of one of them, and how long they take."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..dry_run import is_dry_run
from ..memory.figures import make_tracker, untracked
from ..memory.hooks import Hooks, Names, in_inner_step
from ..shared.modules import Modules, device_of

_MOST_EVENTS = 100_000  # only the peak is asked for
_TIMED = 5  # steps


class FirstSteps:
    """Follows the memory of one of an optimizer's steps, and tells its peak; then the time of some
    more.

    It begins and ends where ``step()`` does. Gradients that there are where it begins are about to
    be freed, most often, and count until then.

    Args:
        number: which step; the first is 1.
        tell: is called with the peak; None: no memory is followed.
        timed: is called with the median seconds of the steps that come next.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        number: int,
        tell: Callable[[int], None] | None,
        timed: Callable[[float], None],
    ) -> None:
        self._model, self._number, self._tell = weakref.ref(model), number, tell
        self._timed = timed
        self._ended: list[float] = []  # when steps did
        self._steps = 0
        self._tracker: Any = None
        self._old: list[weakref.ref[torch.Tensor]] = []  # gradients of the step before
        self._hook = optimizer.register_step_post_hook(self._stepped)
        self._before: Any = None  # a hook of the step after the last one of these

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if is_dry_run() or in_inner_step(optimizer):
            return  # a step of a prediction, or a part of one
        self._steps += 1
        model = self._model()
        if self._steps == self._number - 1 and model is not None and self._tell is not None:
            # A profiler that runs, or another allocator, is in the way: nothing is measured.
            with suppress(RuntimeError):
                self._begin(model, optimizer)
        elif self._steps == self._number:
            tracker = self._stop()
            if tracker is not None and self._tell is not None:
                self._tell(int(tracker.peak))
        if self._steps >= self._number:
            self._ended.append(time.perf_counter())
        if len(self._ended) > _TIMED:
            self._end(optimizer)
            times = zip(self._ended, self._ended[1:], strict=False)
            self._timed(statistics.median(end - begin for begin, end in times))

    def _end(self, optimizer: Optimizer) -> None:
        """Removes the hook, which runs now. torch goes through the hooks meanwhile, and none but
        the last one may go: where others come after it, it goes when the next step begins."""
        if next(reversed(optimizer._optimizer_step_post_hooks)) == self._hook.id:
            self._hook.remove()
            return

        def begins(optimizer: Optimizer, *_: Any) -> None:
            self._hook.remove()
            self._hook = optimizer.register_step_post_hook(ends)

        def ends(optimizer: Optimizer, *_: Any) -> None:
            self._before.remove()
            self._end(optimizer)

        self._before = optimizer.register_step_pre_hook(begins)

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        modules, device = Modules(model), device_of(model)
        with untracked():
            tracker: Any = make_tracker(device, modules.parents, False, _MOST_EVENTS)
            Hooks(tracker, model, modules, [optimizer], Names()).label()
            cuda = device.type == "cuda"
            tracker.start(torch.cuda.memory_allocated(device) if cuda else None)
        self._tracker = tracker
        # Of memory from before, it is not told on the CPU when it is freed.
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self._old = [weakref.ref(grad, self._freed) for grad in grads]

    def _freed(self, _: object) -> None:
        if self._tracker is not None:
            self._tracker.look()

    def _stop(self) -> Any:
        self._old = []
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.stop()
        return tracker

    def close(self) -> None:
        for hook in (self._hook, self._before):
            if hook is not None:
                hook.remove()
        self._stop()
