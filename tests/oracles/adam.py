"""Adam in float64, written from the papers, and how far from it a storage format may be."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

# Of one rounding, relative.
ULP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10,
       torch.bfloat16: 2.0**-7}  # fmt: skip


def wide(tensor: Tensor) -> Tensor:
    """A copy in float64, of complex numbers the pairs, with the bits for conj and neg resolved."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.to(torch.float64, copy=True)


@dataclasses.dataclass
class Oracle:
    """One parameter."""

    param: Tensor
    step: int = 0
    path: float = 0.0  # the sum of learning rates: how far Adam can have gone, about

    def __post_init__(self) -> None:
        self.param = wide(self.param)
        self.m, self.v, self.vmax = (torch.zeros_like(self.param) for _ in range(3))
        # What one ulp of a gradient's parts, before weight decay cancels them, makes of the
        # moments and of the parameter.
        self.m_error, self.v_error, self.error = (torch.zeros_like(self.param) for _ in range(3))

    def update(
        self, grad: Tensor, *, lr: float, betas: tuple[float, float], eps: float,
        weight_decay: float, amsgrad: bool, maximize: bool, decoupled: bool, parts: Tensor,
    ) -> None:  # fmt: skip
        """``parts``: the sum of the absolute values of which ``grad`` is the sum."""
        self.step += 1
        self.path += lr
        grad = -grad if maximize else grad
        if decoupled:
            self.param *= 1 - lr * weight_decay
        else:
            parts = parts + weight_decay * self.param.abs()
            grad = grad + weight_decay * self.param
        self.m = betas[0] * self.m + (1 - betas[0]) * grad
        self.v = betas[1] * self.v + (1 - betas[1]) * grad.square()
        self.vmax = torch.maximum(self.vmax, self.v)
        second = (self.vmax if amsgrad else self.v) / (1 - betas[1] ** self.step)
        first = self.m / (1 - betas[0] ** self.step)
        self.param -= lr * first / (second.sqrt() + eps)
        self.m_error = betas[0] * self.m_error + (1 - betas[0]) * parts
        self.v_error = betas[1] * self.v_error + (1 - betas[1]) * parts.square()
        # The root of a mean of squares moves by at most that of the errors.
        of_first = self.m_error / (1 - betas[0] ** self.step)
        of_root = (self.v_error / (1 - betas[1] ** self.step)).sqrt()
        root = second.sqrt() + eps
        self.error += lr * (of_first + of_root * first.abs() / root) / root


def clip_factor(grads: list[Tensor], limit: float | None) -> float:
    """As of torch.nn.utils.clip_grad_norm_."""
    if limit is None:
        return 1.0
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
    return min(1.0, limit / (norm + 1e-6))


def too_far(param: Tensor, oracle: Oracle, storage: str, dtype: torch.dtype) -> str:
    """Nothing, or how far a parameter is from the oracle's and how far it may be. ``storage``:
    "exact", "bf16" (rounded to nearest or at random), "split", "split8", "states" (of
    bfloat16), "8bit", "4bit"; several joined by "+"."""
    if oracle.step == 0:
        return "" if torch.equal(wide(param), oracle.param) else "it was stepped without a gradient"
    if not param.numel():
        return ""
    ours = wide(param)
    if not torch.equal(ours.isfinite(), oracle.param.isfinite()):
        return "other elements are finite"
    size = float(oracle.param.abs().max()) + oracle.path
    real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    per_step = 64 * ULP[real]  # of a learning rate: moments are weighted sums of several gradients
    bound = oracle.path * per_step + 2 * oracle.step * size * ULP[real]
    if dtype in (torch.float16, torch.bfloat16):
        rounding = {"split8": 2.0**-15, "split": ULP[torch.float32]}
        relative = next((rounding[s] for s in rounding if s in storage), ULP[dtype])
        bound += oracle.step * size * relative
    # Where weight decay cancels a gradient, Adam magnifies what rounding left of it.
    excess = (ours - oracle.param).abs() - 4 * ULP[real] * oracle.error
    worst = float(excess.max())
    distance = float((ours - oracle.param).norm()) / math.sqrt(ours.numel())
    coarse = {"4bit": 0.6, "8bit": 0.3, "states": 0.1}
    if of_path := [share for name, share in coarse.items() if name in storage]:
        allowed = bound + oracle.path * of_path[0]
        return f"distance {distance:.3g}, allowed {allowed:.3g}" if distance > allowed else ""
    return f"off by {worst:.3g}, allowed {bound:.3g}" if worst > bound else ""
