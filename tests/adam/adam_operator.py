"""Calls of Adam's operator from lists of tensors of one group."""

import torch

from memsave_ext.adam.fallback.operator import Prepared, call_of

NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
OPTIONS = (1e-2, 0.9, 0.99, 1e-8, 0.1)  # lr, both betas, eps, weight_decay


def call(lists, decoupled, amsgrad, maximize):
    """Returns the arguments by position, and those by name."""
    lr, beta1, beta2, eps, weight_decay = OPTIONS
    group = {
        "lr": lr,
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": decoupled,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    params, grads, *states = lists
    made = call_of(
        [
            Prepared(
                param,
                grads[i],
                {name: of[i] for name, of in zip(NAMES, states, strict=True) if of},
                group,
                i,
            )
            for i, param in enumerate(params)
        ]
    )
    return made[:-1], made.shared


def step_(lists, decoupled, amsgrad, maximize):
    by_position, by_name = call(lists, decoupled, amsgrad, maximize)
    torch.ops.memsave_ext.adam_step_(*by_position, **by_name)
