"""Random loops whose gradients lie elsewhere, beside the same loops with gradients in memory: all
that a loop sees of its gradients, and its parameters, are the same to the bit."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

import memsave_ext as ms
from memsave_ext.elsewhere.gradient import GradientElsewhere, is_dense
from memsave_ext.elsewhere.gradients import any_elsewhere
from memsave_ext.store.kept import SMALLEST

from .adam_cases import Case
from .adam_training import Training
from .uses_of_gradients import CLIPS, OPTIMIZERS, USES


class Loop(Training):
    """The run of a case, with gradients in this folder, or in memory beside such a loop."""

    def __init__(self, case: Case, folder: str | None, ours: Loop | None = None) -> None:
        self.folder, self.ours = folder, ours
        super().__init__(case, in_backward=bool(folder and case["elsewhere"]["in_backward"]))

    def make(self, groups: Any) -> Any:
        """Without a grad_scaler=, which gradients elsewhere do not need."""
        chosen = self.case["elsewhere"]
        on = {} if self.folder is None else {"grads_on": self.folder}
        if chosen["optimizer"] is not None:
            optimizer = OPTIMIZERS[chosen["optimizer"]](list(groups))
            return ms.in_backward(optimizer, **on) if on else optimizer
        if on and chosen["states_on"]:
            on["states_on"] = self.folder
        return self.adam(groups, **on)

    def interlude(self, kind: str) -> None:
        if kind == "remove_hooks" and self.folder is None:
            return
        super().interlude(kind)
        if kind == "remove_hooks":
            self.folder = None  # gradients stay from now on

    def run(self, number: int) -> list[Any]:
        """One step. Returns what the loop has seen."""
        case = self.case
        chosen, seen = case["elsewhere"], []
        self.begin(number)
        between = case["interlude"] and case["interlude"][1] == number
        if between and not chosen["within"]:
            self.interlude(case["interlude"][0])
        for loss, _ in self.losses(number):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            seen += self.grads()
            self.check_left()
        if between and chosen["within"]:
            self.interlude(case["interlude"][0])
        clips = chosen["clip"] or chosen["use"] or case["clip_global_norm"]
        if self.scaler is not None and clips:
            self.scaler.unscale_(self.optimizer)
        if chosen["clip"]:
            seen.append(CLIPS[chosen["clip"]](self.params, number).clone())
        if chosen["use"]:
            param = self.params[number % len(self.params)]
            if param.grad is not None:
                USES[chosen["use"]](param)
        seen += self.grads()
        self.elsewhere = any_elsewhere(self.params)
        if self.ours is not None and case["clip_global_norm"]:
            self.clip_global_norm(case["clip_global_norm"], self.ours.elsewhere)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            seen.append(torch.tensor(self.scaler.get_scale()))
        self.end()
        return [*seen, *self.grads(), *self.values().values(), *(p.detach() for p in self.params)]

    def clip_global_norm(self, most: float, elsewhere: bool) -> None:
        """Of gradients that are elsewhere it is torch's function."""
        self.optimizer.clip_global_norm = None if elsewhere else most
        if elsewhere:
            groups = self.optimizer.param_groups
            torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], most)

    def grads(self) -> list[Tensor | None]:
        if not self.case["elsewhere"]["reads"]:  # what is known without being read, is used
            return []
        return [None if p.grad is None else p.grad.clone() for p in self.params]

    def check_left(self) -> None:
        """Every gradient that can leave has left."""
        for param in self.params if self.folder else []:
            grad = param.grad
            if grad is not None and not isinstance(grad, GradientElsewhere):
                can = grad.nbytes >= SMALLEST and is_dense(grad)
                assert not can, f"a gradient of {list(param.shape)} has stayed"


def same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if (left.dtype, left.shape, left.stride()) != (right.dtype, right.shape, right.stride()):
        return False
    return bits(left).equal(bits(right))


def bits(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def check(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ours = Loop(case, folder)
        plain = Loop(case, None, ours)
        for number in range(case["steps"]):
            both = ours.run(number), plain.run(number)
            for i, (left, right) in enumerate(zip(*both, strict=True)):
                if not same(left, right):
                    return f"other bits with grads_on=: step {number}, {i} of {len(both[0])} seen"
    return ""
