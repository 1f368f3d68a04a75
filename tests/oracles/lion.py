"""Lion in float64, written from algorithm 2 of the paper (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass
class Oracle:
    """One parameter."""

    param: Tensor

    def __post_init__(self) -> None:
        self.param = self.param.detach().to(torch.float64, copy=True)
        self.m = torch.zeros_like(self.param)

    def update(
        self, grad: Tensor, *, lr: float, betas: tuple[float, float], weight_decay: float,
        maximize: bool = False,
    ) -> Tensor:  # fmt: skip
        """Returns the sums whose signs were taken: near 0 a rounding may turn them."""
        grad = grad.detach().double() * (-1 if maximize else 1)
        beta1, beta2 = betas
        c = beta1 * self.m + (1 - beta1) * grad
        self.param -= lr * (c.sign() + weight_decay * self.param)
        self.m = beta2 * self.m + (1 - beta2) * grad
        return c
