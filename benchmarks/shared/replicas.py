"""A DenseNet and its optimizer on one device, or on several of one process."""

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shared.training import Job, memory_of, network, sgd

PEAK_STEPS = 4  # the first one makes the optimizer's states; from the third on, remat has a plan


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Each call in a new thread, as nn.parallel.parallel_apply starts them; raises what one did."""
    failures: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class Replicas:
    """Data parallel in threads, with nn.DataParallel's steps, where there are no two GPUs.

    Each replica is a copy of the network with gradients of its own, and in every step gets the
    parameters and statistics of the first one, and an equal part of the batch. Its forward *and*
    backward run in a thread: on GPUs the autograd engine has one for each, on a CPU it has none.
    Then the gradients are added up, and the first replica is stepped.
    """

    def __init__(self, method: str, job: Job, count: int) -> None:
        self.memories = [memory_of(job.device) for _ in range(count)]
        with self.memories[0]:
            self.models = [network(method, job)]
            self.optimizer = sgd(self.models[0])
        for memory in self.memories[1:]:
            with memory:
                self.models.append(copy.deepcopy(self.models[0]))

    def step(self, x: Tensor, y: Tensor) -> None:
        calls = self._backwards(x, y)
        if len(calls) == 1:
            calls[0]()
        else:
            self._broadcast()
            in_threads(calls)
            self._reduce()
        self._update()

    def peak(self, x: Tensor, y: Tensor) -> int:
        """Bytes at the peak of the device that needs most, in steps whose replicas take turns."""
        for _ in range(PEAK_STEPS):
            self._broadcast()
            for memory, call in zip(self.memories, self._backwards(x, y), strict=True):
                with memory:
                    call()
            with self.memories[0]:
                self._reduce(keep=True)
                self._update()
            for memory, model in zip(self.memories[1:], self.models[1:], strict=True):
                with memory:
                    model.zero_grad()
        return max(memory.peak for memory in self.memories)

    def _backwards(self, x: Tensor, y: Tensor) -> list[Callable[[], None]]:
        parts = zip(x.chunk(len(self.models)), y.chunk(len(self.models)), strict=True)

        def call(model: nn.Module, x: Tensor, y: Tensor, whole: int) -> None:
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / whole
            loss.backward()

        return [
            lambda model=model, part=part: call(model, *part, len(x))
            for model, part in zip(self.models, parts, strict=True)
        ]

    @torch.no_grad()
    def _broadcast(self) -> None:
        first = [*self.models[0].parameters(), *self.models[0].buffers()]
        for model in self.models[1:]:
            torch._foreach_copy_([*model.parameters(), *model.buffers()], first)

    def _reduce(self, keep: bool = False) -> None:
        """Into the first replica's gradients; those of the others go, unless they are kept."""
        first = [p.grad for p in self.models[0].parameters()]
        for model in self.models[1:]:
            torch._foreach_add_(first, [p.grad for p in model.parameters()])
            if not keep:
                model.zero_grad()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DataParallel:
    """nn.DataParallel itself, over the first GPUs of the machine."""

    def __init__(self, method: str, job: Job, count: int) -> None:
        self.memories = [memory_of(torch.device("cuda", i)) for i in range(count)]
        with self._tracked():
            model = network(method, job)
            self.model = nn.DataParallel(model, list(range(count)))
            self.optimizer = sgd(model)

    def _tracked(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for memory in self.memories:
            stack.enter_context(memory)
        return stack

    def step(self, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self, x: Tensor, y: Tensor) -> int:
        for _ in range(PEAK_STEPS):
            with self._tracked():
                self.step(x, y)
        return max(memory.peak for memory in self.memories)
