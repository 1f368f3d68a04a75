"""One backward in which parameters are stepped: the rules of csrc/adam/backward.cpp."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..._streams import current_stream, use_here
from .. import errors
from ..dtensor import is_dtensor, leave_buffer, local_tensor
from ..shards import sharding_of
from .updates import Update


class GradientAction(Enum):
    """What a backward does with its gradients."""

    STEP = "step"
    FOLD = "fold"
    MEASURE = "measure"
    KEEP = "keep"


class UsesGradients(Protocol):
    """The part of a stepper that its backwards use."""

    small_bytes: int
    bucket_bytes: int

    def optimizer(self) -> Any: ...
    def use(self, updates: list[Update], action: GradientAction) -> None: ...
    def asks_others(self, param: Tensor, group: dict[str, Any]) -> bool: ...
    def ended(self, backward: Backward) -> None: ...
    def raised(self, used: int, waiting: list[Tensor]) -> None: ...


class Waiting(NamedTuple):
    """A parameter whose gradient waits in ``.grad``."""

    param: Tensor
    group: dict[str, Any]
    made_on: torch.cuda.Stream | None  # the stream of the gradient


class Backward:
    """One backward in which parameters are stepped, until :meth:`finish` or :meth:`fail`."""

    def __init__(self, stepper: UsesGradients, action: GradientAction, of_ddp: set[int]) -> None:
        self.action = action
        self.of_ddp = of_ddp  # ids of parameters whose gradients a DDP reducer reduces later
        self._stepper = stepper
        self._optimizer = stepper.optimizer()  # is not to go meanwhile
        self._waiting: list[Waiting] = []
        self._bytes = 0  # of the gradients queued since the last flush
        # Shards whose step takes a collective. All processes must flush the same ones together, so
        # that only what all of them know decides how long they wait.
        self._asking: list[Waiting] = []
        self._asking_bytes = 0
        self._used = 0  # how many gradients have been used
        self._finished = self._failed = False

    def waits_for(self, param: Tensor) -> bool:
        return any(other.param is param for other in self._waiting + self._asking)

    def add(self, param: Tensor, group: dict[str, Any], is_last: bool) -> None:
        """Uses the gradient now, or queues it. If other hooks still run (not ``is_last``): queues.

        Queued gradients stay in ``.grad``.
        """
        assert param.grad is not None
        waiting = Waiting(param, group, current_stream(param.device))
        size = param.grad.nbytes
        sharded = is_dtensor(param)
        is_small = size < self._stepper.small_bytes
        steps = self.action is GradientAction.STEP and not self._finished
        if sharded and steps and self._stepper.asks_others(param, group):
            return self._add_asking(waiting, is_last, is_small)
        # To wait is worth it for what is saved in calls, or in collectives.
        is_small = is_small and not sharded
        if is_last and not is_small:
            self._flush([waiting])
            return
        self._bytes += size
        if sharded or self._bytes >= self._stepper.bucket_bytes:
            # This gradient is not flushed: its later hooks may still have to run.
            self._flush(self._waiting)
            self._waiting = []
            self._bytes = size
        if sharded and size < self._stepper.small_bytes:
            leave_buffer(param.grad, local_tensor(param.grad))
        self._waiting.append(waiting)

    def _add_asking(self, waiting: Waiting, is_last: bool, is_small: bool) -> None:
        param = waiting.param
        # By now all hooks of the parameters that were queued before this one have run.
        if self._asking_bytes >= self._stepper.bucket_bytes:
            self._flush_asking()
        if is_small:
            leave_buffer(param.grad, local_tensor(param.grad))
        self._asking.append(waiting)
        size = param.numel() * param.element_size()  # of all shards
        self._asking_bytes += size // sharding_of(param)[1]
        if is_last and self._asking_bytes >= self._stepper.bucket_bytes:
            self._flush_asking()

    def _flush_asking(self) -> None:
        self._flush(self._asking)
        self._asking, self._asking_bytes = [], 0

    def use_reduced(self, updates: list[Update]) -> None:
        """Uses gradients that were reduced over processes."""
        self._stepper.use(updates, self.action)
        self._used += len(updates)
        for param, *_ in updates:
            param.grad = None

    def finish(self) -> None:
        self._flush_asking()
        self._flush(self._waiting)
        self._waiting = []
        self._finished, self._optimizer = True, None
        self._stepper.ended(self)

    def _flush(self, waiting: list[Waiting]) -> None:
        updates = []
        for param, group, made_on in waiting:
            if param.grad is not None:
                use_here(local_tensor(param.grad), made_on)
                updates.append(Update(param, group, param.grad))
        self._stepper.use(updates, self.action)
        for param, *_ in updates:
            param.grad = None
        self._used += len(updates)

    def fail(self) -> None:
        """Called where the backward raised. Does nothing after :meth:`finish`, and twice."""
        if self._finished or self._failed:
            return
        self._failed, self._optimizer = True, None
        self._stepper.ended(self)
        waiting = [param for param, *_ in self._waiting + self._asking]
        self._stepper.raised(self._used, waiting)


class _AtEnd:
    """The callback of a graph task, which alone keeps it alive: it goes where the task fails.

    The backward itself may live on in an error's traceback.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def __call__(self) -> None:
        try:
            self._backward.finish()
        except BaseException:
            self._backward.fail()
            raise

    def __del__(self) -> None:
        self._backward.fail()


class Backwards:
    """The backwards that run, by graph task."""

    def __init__(self) -> None:
        self._by_task: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()
        self._running: set[int] = set()  # ids

    def current(self) -> Backward | None:
        return self._by_task.get(torch._C._current_graph_task_id())

    def begin(self, backward: Backward) -> Backward:
        """Registers ``backward`` for the current graph task."""
        self._by_task[torch._C._current_graph_task_id()] = backward
        self._running.add(id(backward))
        torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(backward))
        return backward

    def ended(self, backward: Backward) -> None:
        self._running.discard(id(backward))

    def check_none(self, call: str) -> None:
        """Raises RuntimeError while any backward runs. ``call``: what cannot be called then."""
        if self._running:
            raise errors.backward_runs(call)
