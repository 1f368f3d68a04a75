"""One backward in which parameters are stepped: the rules of csrc/adam/backward.cpp."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from ...checkpointing.fallback.pinned import is_pinned
from ..dtensor import is_dtensor
from .updates import Update


class Task(Enum):
    """What becomes of gradients."""

    STEP = "step"
    FOLD = "fold"
    MEASURE = "measure"
    KEEP = "keep"


class UsesGradients(Protocol):
    """A stepper, as its backwards see it."""

    small_bytes: int
    bucket_bytes: int

    def use(self, updates: list[Update], task: Task) -> None: ...
    def ended(self, backward: Backward) -> None: ...
    def raised(self, used: int, waiting: list[Tensor]) -> None: ...


class Backward:
    """One backward in which parameters are stepped. Held by its graph task alone."""

    def __init__(self, stepper: UsesGradients, task: Task, of_ddp: set[int]) -> None:
        self.task = task
        self.of_ddp = of_ddp  # parameters whose gradients are reduced later
        self._stepper = stepper
        self._waiting: list[tuple[Tensor, dict[str, Any]]] = []
        self._late: list[Update] = []
        self._bytes = 0
        self._used = 0
        self._finished = False

    def waits_for(self, param: Tensor) -> bool:
        return any(other is param for other, _ in self._waiting)

    def add(self, param: Tensor, group: dict[str, Any], is_last: bool) -> None:
        """Uses the gradient now, or soon; where hooks are still to run, not now."""
        assert param.grad is not None
        size = param.grad.nbytes
        # FSDP2's are views of all that was reduced together, which one that waits would keep.
        sharded = is_dtensor(param)
        is_small = size < self._stepper.small_bytes and not sharded
        if is_last and not is_small and not self._is_needed(param):
            self._flush([(param, group)])
            return
        self._bytes += size
        if sharded or self._bytes >= self._stepper.bucket_bytes:
            # Not this one, whose later hooks are still to run.
            needed = {id(param) for param, _ in self._waiting if self._is_needed(param)}
            self._flush([each for each in self._waiting if id(each[0]) not in needed])
            self._waiting = [each for each in self._waiting if id(each[0]) in needed]
            self._bytes = size
        self._waiting.append((param, group))

    def use_reduced(self, updates: list[Update]) -> None:
        """Gradients that were reduced over processes."""
        needed = {id(param) for param, *_ in updates if self._is_needed(param)}
        # The reducer uses its memory again.
        self._late += [
            Update(param, group, None if grad is None else grad.clone())
            for param, group, grad in updates
            if id(param) in needed
        ]
        self._stepper.use([each for each in updates if id(each[0]) not in needed], self.task)
        self._used += len(updates)
        for param, *_ in updates:
            param.grad = None

    def finish(self) -> None:
        self._stepper.use(self._late, self.task)
        self._late = []
        self._flush(self._waiting)
        self._waiting = []
        self._finished = True
        self._stepper.ended(self)

    def _is_needed(self, param: Tensor) -> bool:
        """As it is, by what this backward is still to compute again: its step waits, until the end
        at the latest."""
        return self.task is Task.STEP and not self._finished and is_pinned(param)

    def _flush(self, waiting: list[tuple[Tensor, dict[str, Any]]]) -> None:
        updates = [Update(p, group, p.grad) for p, group in waiting if p.grad is not None]
        self._stepper.use(updates, self.task)
        for param, *_ in updates:
            param.grad = None
        self._used += len(updates)

    def __del__(self) -> None:
        self._stepper.ended(self)
        if not self._finished:  # backward raised
            self._stepper.raised(self._used, [param for param, _ in self._waiting])


class Backwards:
    """Those that run, by graph task."""

    def __init__(self) -> None:
        self._by_task: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()
        self._running: set[int] = set()  # ids: one that raised is told of when it is destroyed

    def current(self) -> Backward | None:
        return self._by_task.get(torch._C._current_graph_task_id())

    def begin(self, backward: Backward) -> Backward:
        """In the graph task that runs, which alone holds it."""
        self._by_task[torch._C._current_graph_task_id()] = backward
        self._running.add(id(backward))
        torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
        return backward

    def ended(self, backward: Backward) -> None:
        self._running.discard(id(backward))

    def any_runs(self) -> bool:
        return bool(self._running)
