"""The adam operator in torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    for i, param in enumerate(params):
        check(param, grads[i], exp_avgs[i], exp_avg_sqs[i], steps[i])
    for i, param in enumerate(params):
        steps[i].add_(1)
        if param.numel() == 0:
            torch.autograd.graph.increment_version(param)
            continue
        rate: float | Tensor = lr if lr_tensor is None else lr_tensor.to(param.device)
        p, grad, exp_avg, exp_avg_sq = (
            torch.view_as_real(t) if t.is_complex() else t
            for t in (param, grads[i], exp_avgs[i], exp_avg_sqs[i])
        )
        compute = torch.float64 if p.dtype == torch.float64 else torch.float32
        value, g = p.to(compute), grad.to(compute)
        if maximize:
            g = -g
        if weight_decay != 0 and decoupled_weight_decay:
            value = value * (1 - rate * weight_decay)
        elif weight_decay != 0:
            g = g + value * weight_decay
        m = torch.lerp(exp_avg.to(compute), g, 1 - beta1)
        v = exp_avg_sq.to(compute) * beta2 + (1 - beta2) * g * g
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        if amsgrad:
            largest = max_exp_avg_sqs[i]
            largest = torch.view_as_real(largest) if largest.is_complex() else largest
            largest.copy_(torch.maximum(largest.to(compute), v))
            v = largest.to(compute)
        step = steps[i].to(p.device) if steps[i].device != p.device else steps[i]
        number = step.item() if step.device.type == "cpu" else step.double()
        step_size = rate / (1 - beta1**number)
        denom = v.sqrt() / (1 - beta2**number) ** 0.5 + eps
        p.copy_(value - step_size * (m / denom))


def check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> None:
    """Raises where a step cannot be made; nothing is changed then."""
    if grad.is_sparse:
        raise RuntimeError(
            "Adam does not support sparse gradients, please consider SparseAdam instead"
        )
    if grad.shape != param.shape or grad.device != param.device or grad.dtype != param.dtype:
        raise RuntimeError(
            "Adam: a gradient must have the shape, dtype and device of its parameter, "
            f"{list(param.shape)} {param.dtype} {param.device}, got {list(grad.shape)} "
            f"{grad.dtype} {grad.device}"
        )
    for name, state in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if state.device != param.device or state.shape != param.shape:
            raise RuntimeError(
                f"Adam: the state {name} of a parameter is a tensor of shape {list(state.shape)} "
                f"on {state.device}, the parameter one of shape {list(param.shape)} on "
                f"{param.device}. Move the model before making the optimizer, or load the "
                "optimizer's state_dict() into it again."
            )
    if not isinstance(step, Tensor) or step.numel() != 1:
        raise RuntimeError("Adam: the state step of a parameter must be a scalar tensor")
