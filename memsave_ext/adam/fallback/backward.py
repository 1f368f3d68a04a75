"""One backward in which parameters are stepped: the rules of csrc/adam/backward.cpp."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .stepper import AdamStepper


class Backward:
    """One backward in which parameters are stepped. Held by its graph task alone."""

    def __init__(self, stepper: AdamStepper, of_ddp: set[int], task: str) -> None:
        self.stepper = stepper
        self.task = task  # what becomes of gradients: step, fold, measure or keep
        self.of_ddp = of_ddp  # parameters whose gradients are reduced later
        self.waiting: list[tuple[Tensor, dict[str, Any]]] = []
        self.bytes = 0
        self.stepped = 0
        self.finished = False
        stepper.running.add(id(self))

    def add(self, param: Tensor, group: dict[str, Any], wait: bool) -> None:
        assert param.grad is not None
        self.waiting.append((param, group))
        if self.task == "step":
            self.stepper.stepped.add(id(param))
        self.bytes += param.grad.nbytes
        if not wait:
            self._flush([self.waiting.pop()])
        elif self.bytes >= self.stepper.bucket_bytes:
            # All but this one, whose later hooks are still to run.
            self._flush(self.waiting[:-1])
            self.waiting = self.waiting[-1:]
            self.bytes = param.grad.nbytes

    def finish(self) -> None:
        self._flush(self.waiting)
        self.waiting = []
        self.finished = True
        self.stepper.running.discard(id(self))

    def _flush(self, updates: list[tuple[Tensor, dict[str, Any]]]) -> None:
        updates = [u for u in updates if u[0].grad is not None]
        self.stepper.update(
            [(p, group, p.grad) for p, group in updates], self.task, self.stepper._loss_scale()
        )
        for param, _ in updates:
            param.grad = None
        self.stepped += len(updates)

    def __del__(self) -> None:
        self.stepper.running.discard(id(self))
        if not self.finished:  # backward raised
            self.stepper.stepped_before_failure += self.stepped
            self.stepper.stepped -= {id(p) for p, _ in self.waiting}


def check_not_compiled_autograd() -> None:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    # Once while it is traced, and where that has failed once more, run.
    if torch.compiler.is_compiling() or getattr(module, "in_compiled_autograd_region", False):
        raise NotImplementedError(
            "Adam: compiled autograd cannot trace a step in backward. Leave it off, "
            "torch._dynamo.config.compiled_autograd = False, or the optimizer's in_backward=True "
            "out. torch.compile() of the model alone works."
        )
