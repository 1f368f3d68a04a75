"""Lion, by the formula of csrc/adam/lion_rule.h."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precise import fused
from .coefficients import learning_rate, rounded
from .stored import Stored


def step(grad: Tensor, stored: Stored) -> None:
    group, dtype = stored.group, stored.compute
    lr = learning_rate(group, stored.device)
    param, exp_avg = stored.load_param(), stored.load("exp_avg")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    total = fused(rounded(1 - beta1, dtype), grad, exp_avg * rounded(beta1, dtype))
    exp_avg = fused(rounded(1 - beta2, dtype), grad, exp_avg * rounded(beta2, dtype))
    change = torch.where(total.isnan(), total, total.sign()) * rounded(-lr, dtype)
    decay = rounded(1 - lr * group["weight_decay"], dtype)
    stored.store_param(change.add_(param * decay))
    stored.store(exp_avg=exp_avg)
