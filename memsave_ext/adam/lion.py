"""Lion."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .native import Native


class Lion(Native):
    """Lion, that steps in one native call, or in backward while gradients arrive.

    The parameter moves by ``lr`` in the direction of the sign of ``beta1 * exp_avg + (1 - beta1) *
    grad``, and ``exp_avg`` is then averaged with ``beta2``. It keeps one moment; the authors take a
    learning rate 3 to 10 times smaller than AdamW's and a weight decay as many times larger. What
    is said of :class:`Adam` holds: ``in_backward``, ``grads_on``,
    ``accumulate()``, ``paused()``, ``attach()``.

    Args:
        params: parameters, or dicts of them with options.
        lr: the learning rate, by which every parameter moves. A tensor on CUDA is read on the
            device.
        betas: the weight of ``exp_avg`` in the direction, and in the average.
        weight_decay: decoupled, as AdamW's.
        maximize: maximize the objective.
        in_backward: step in backward, each parameter once between two calls of :meth:`step`.
        modes: ``small_bytes``, ``bucket_bytes``, ``bf16``, ``state_dtype``, ``seed``,
            ``max_grad_norm``, ``states_on``, ``grads_on``, ``clip_global_norm`` and
            ``grad_scaler``, as in :class:`Adam`.
            ``state_dtype="4bit"`` is for two moments, Adam's.

    Raises:
        OSError, TypeError, ValueError, RuntimeError: as :class:`Adam`.

    Source: Chen et al. 2023, arXiv 2302.06675.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        in_backward: bool = False,
        **modes: Any,
    ) -> None:
        options = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize
        }  # fmt: skip
        self._take_options(options, in_backward=in_backward, **modes)
        super().__init__(params, options)
        self._begin(in_backward)
