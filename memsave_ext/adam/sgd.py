"""SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .native import Native


class SGD(Native, torch.optim.SGD):
    """SGD that steps in one native call, or in backward while gradients arrive.

    A drop-in for :class:`torch.optim.SGD`: it has the same arguments and ``param_groups``, and each
    can load the other's ``state_dict``. Steps in float32 and float64 are the bits of torch's
    ``foreach`` and for-loop on CPUs. What is said of :class:`Adam` holds: ``in_backward``,
    ``grads_on``, ``accumulate()``, ``paused()``, ``attach()``.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch. A tensor
            ``lr`` on CUDA is read on the device.
        foreach, fused: accepted, without effect.
        differentiable: runs torch's implementation; cannot be combined with ``in_backward``.
        in_backward: step in backward, each parameter once between two calls of :meth:`step`.
        modes: ``small_bytes``, ``bucket_bytes``, ``bf16``, ``state_dtype``, ``seed``,
            ``max_grad_norm``, ``states_on``, ``grads_on``, ``clip_global_norm`` and
            ``grad_scaler``, as in :class:`Adam`.
            ``state_dtype`` is that of the momentum buffer, which is float32 for 16-bit parameters;
            ``"4bit"`` is for two moments, Adam's.

    A parameter has the state ``momentum_buffer`` where there is momentum, and ``step`` where
    numbers are rounded at random or ``dampening`` is not 0, which the first step leaves out.

    Raises:
        OSError, TypeError, ValueError, RuntimeError: as :class:`Adam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        in_backward: bool = False,
        **modes: Any,
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "foreach": foreach,
            "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        self._take_options(options, in_backward=in_backward, **modes)
        super().__init__(params, **options)
        self._begin(in_backward)
