"""What gradients are multiplied by: clipping, and the loss scale of torch.amp.GradScaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import dtensor
from ..elements import plain
from ..states import check_dense


def square_of(grad: Tensor) -> Tensor:
    """The sum of squares."""
    check_dense(grad)
    values = plain(dtensor.local_tensor(grad))
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.double().square().sum()


def loss_scale_of(optimizer: Any) -> Tensor | None:
    scaler = getattr(optimizer, "grad_scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._get_scale_async()  # type: ignore[no-any-return]


class GradNorm:
    """The norm of all gradients together, and what clips them to it."""

    def __init__(self) -> None:
        self._squares: dict[int, Tensor] = {}  # by the parameter's id
        self.value: Tensor | None = None  # before clipping; None before finish()
        self.factor: Tensor | None = None
        self.skip: Tensor | None = None  # whether it is not finite; None without a scale

    def add(self, param: Tensor, grad: Tensor) -> None:
        self._squares[id(param)] = square_of(grad)

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._squares

    def finish(self, max_norm: float, scale: Tensor | None) -> None:
        """No more are added."""
        squares = list(self._squares.values())
        total = sum((s.to(squares[0].device) for s in squares), torch.zeros((), dtype=torch.double))
        norm = total.sqrt()
        if scale is not None:
            scale = scale.to(norm.device, torch.double)
            norm = norm / scale
            self.skip = norm.isfinite().logical_not().float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        self.factor = factor if scale is None else factor / scale
        self.value = norm.float()


class Scaling:
    """Of the gradients of a step.

    Attributes:
        norm: of all of them, where they are clipped together.
        last_norm: the value of the last one.
        last_found: of the last step with a loss scale, for each device, 1 where a gradient was not
            finite.
    """

    def __init__(self) -> None:
        self.norm: GradNorm | None = None
        self.last_norm: Tensor | None = None
        self.last_found: list[Tensor] = []
        self._found: dict[torch.device, Tensor] = {}

    @property
    def clips_all(self) -> bool:
        return self.norm is not None and self.norm.factor is not None

    def measure(self, param: Tensor, grad: Tensor) -> None:
        assert self.norm is not None
        self.norm.add(param, grad)

    def finish_norm(self, max_norm: float, scale: Tensor | None) -> None:
        assert self.norm is not None
        self.norm.finish(max_norm, scale)
        self.last_norm = self.norm.value

    def clip_together(
        self, grads: Iterable[tuple[Tensor, Tensor]], max_norm: float, scale: Tensor | None
    ) -> None:
        """Gradients that are all there, with their parameters."""
        self.norm = GradNorm()
        for param, grad in grads:
            self.norm.add(param, grad)
        self.finish_norm(max_norm, scale)

    def of(
        self, grad: Tensor | None, group: dict[str, Any], scale: Tensor | None
    ) -> tuple[Tensor | None, bool]:
        """What a gradient is multiplied by, and whether it is left out."""
        if self.norm is not None and self.norm.factor is not None:
            return self.norm.factor, self.norm.skip is not None and bool(self.norm.skip)
        max_norm = group.get("max_grad_norm")
        if grad is None or (scale is None and max_norm is None):
            return None, False
        square = square_of(grad)
        inverse = torch.ones((), dtype=torch.double) if scale is None else 1 / scale.double()
        factor = inverse.to(square.device)
        if max_norm is not None:
            factor = factor * (max_norm / (square.sqrt() * factor + 1e-6)).clamp(max=1)
        if scale is None:
            return factor, False
        found = self._found.setdefault(grad.device, torch.zeros((), device=grad.device))
        if skip := not bool(square.isfinite()):
            found.fill_(1)
        return factor, skip

    def end_step(self) -> None:
        self.last_found = list(self._found.values())
        if self.norm is not None and self.norm.skip is not None:
            self.last_found.append(self.norm.skip)
        self._found, self.norm = {}, None
