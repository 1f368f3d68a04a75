"""The adam operator in torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..states import check
from .update import update


@torch.no_grad()
def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr_tensor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    amsgrad: bool,
    maximize: bool,
) -> None:
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    if amsgrad:
        lists["max_exp_avg_sqs"] = max_exp_avg_sqs
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(
                f"adam_step_: {name} must have {len(params)} tensors, as params, got {len(tensors)}"
            )
    group = {
        "lr": lr if lr_tensor is None else lr_tensor,
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": decoupled_weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    states = [
        {name.removesuffix("s"): of[i] for name, of in lists.items() if name != "grads"}
        for i in range(len(params))
    ]
    for param, grad, state in zip(params, grads, states, strict=True):
        check(param, grad, state, group)
    for param, grad, state in zip(params, grads, states, strict=True):
        update(param, grad, state, group)
