"""Tells regions and blocks that wait for their recompute which parameters other optimizers stepped.

Those of this package tell it themselves. Version counters show most steps of others, but neither
those of torch's fused kernels nor writes to ``param.data``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..checkpoint.function import is_any_pending, note_step
from ..shared.dtensor import local_tensor
from .owners import is_own


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not is_any_pending() or is_own(optimizer):
        return
    found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler
    if found_inf is not None and float(found_inf):
        return  # nothing was stepped
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for position, param in enumerate(params):
        if param.grad is not None:
            note_step(local_tensor(param), position)


register_optimizer_step_post_hook(_note)
