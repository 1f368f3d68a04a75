"""Adam and AdamW."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch import Tensor

from .native import Native
from .step_in_backward import BUCKET_BYTES, SMALL_BYTES

_OPTIONS = inspect.signature(torch.optim.Adam).parameters  # those that torch's has


class Adam(Native, torch.optim.Adam):
    """Adam that steps in one native call, or in backward while gradients arrive.

    A drop-in for :class:`torch.optim.Adam`: it has the same arguments and ``param_groups``, and
    each can load the other's ``state_dict``. With ``in_backward=True`` the training loop stays as
    it is::

        opt = ms.Adam(model.parameters(), lr=3e-4, in_backward=True)
        loss.backward()        # updates each parameter when its gradient is complete, and frees it
        opt.step()             # closes the step; applies what is left in .grad
        opt.zero_grad()
        scheduler.step()       # param_groups are read at each backward

    FSDP2's parameters are stepped when their gradients have been reduced and scattered.
    DistributedDataParallel needs a call of :meth:`attach`.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch, and so are
            ``capturable`` and ``decoupled_weight_decay``. A tensor ``lr`` on CUDA is read on the
            device.
        in_backward: step in backward, each parameter once between two calls of :meth:`step`.
        small_bytes, bucket_bytes: gradients of fewer than ``small_bytes`` wait in ``.grad`` until
            ``bucket_bytes`` of them have arrived, or backward ends, and are stepped together.
        bf16: how bfloat16 parameters keep updates that are smaller than their precision:
            ``"stochastic"`` rounds at random, ``"split"`` keeps the lower half of a float32 in an
            int16, ``"split8"`` the next 8 bits in an int8. None rounds to nearest. The page on
            bfloat16 parameters describes all of them.
        state_dtype: the dtype of the moments: ``torch.bfloat16``, rounded at random, or, for
            parameters of 4096 elements or more, ``"8bit"`` or ``"4bit"``, in blocks of 256 or 128
            elements with a scale. None is float32, and float64 for float64 parameters.
        seed: the seed of random rounding.
        max_grad_norm: each parameter's gradient is clipped by its own norm to at most this one.
        states_on: where states of 64 KiB or more lie between steps: None, beside the parameters; a
            folder on Linux, in a file that ends with the process; or
            ``"cpu"``, for those of parameters on CUDA in pinned memory of the host; those of
            parameters on a CPU stay where they are. Each parameter's are fetched for its step.
        grads_on: where gradients of 64 KiB or more lie from the moment when they are complete until
            :meth:`step`, which fetches one after the other: None, in memory; a folder on Linux, or
            ``"cpu"``, which is for parameters on CUDA alone. Nothing is stepped in backward then,
            with ``in_backward`` or without it, and all that needs whole gradients is exact:
            ``clip_grad_norm_`` of torch and of trainers, ``clip_global_norm``, GradScaler, sums
            over any number of backwards. ``param.grad`` is a tensor as ever. Whoever uses it gets
            its values, and whoever takes a view of it has it in memory.
        clip_global_norm: clips all gradients together, exactly as ``clip_grad_norm_``. They are
            kept until :meth:`step`, so nothing is stepped in backward, and memory is saved with
            ``grads_on`` alone.
        grad_scaler: the ``torch.amp.GradScaler`` of the training loop, whose calls stay as they
            are. A parameter whose gradient is not finite is not stepped; the others are.
        foreach, fused: accepted; they only decide where ``state["step"]`` is with CUDA (on the
            device with ``fused`` or ``capturable``; a ``grad_scaler`` sets ``fused`` in groups
            with any ``foreach``).
        differentiable: runs torch's implementation; cannot be combined with ``in_backward``.

    bf16, state_dtype, seed, max_grad_norm and states_on can differ between param groups. The
    moments of float16 and bfloat16 parameters are float32 by default. A loaded state keeps its
    dtype. torch's states are converted to this optimizer's mode; those of another mode are refused,
    and must be saved with :meth:`to_fp32_state_dict` instead.

    Raises:
        OSError: no file can be made in ``states_on`` or ``grads_on``, or there is no room for the
            states.
        TypeError: an argument of the wrong type; an option of the whole optimizer in a param group.
        ValueError: an argument out of range; ``states_on`` or ``grads_on`` is no folder; a
            parameter in two groups; a parameter that another optimizer steps in backward;
            ``in_backward`` with ``differentiable``.
        RuntimeError: in backward: a second gradient for a parameter in one step outside of
            :meth:`accumulate`; a sparse gradient. From :meth:`step`: a backward raised after it had
            stepped some parameters, and neither :meth:`zero_grad` nor :meth:`load_state_dict` was
            called since.

    Warns:
        UserWarning: ``in_backward`` with ``clip_global_norm``, which steps nothing in backward.

    With ``in_backward`` torch's ``clip_grad_norm_`` and ``clip_grad_value_`` would find no
    gradients and clip nothing, so they raise for parameters that were stepped. Source: Kingma and
    Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101; 8-bit states: Dettmers
    et al. 2022, arXiv 2110.02861; 4-bit states: Li et al. 2023, arXiv 2309.01507.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        in_backward: bool = False,
        small_bytes: int = SMALL_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        bf16: str | None = None,
        state_dtype: torch.dtype | str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        states_on: str | os.PathLike[str] | None = None,
        grads_on: str | os.PathLike[str] | None = None,
        clip_global_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        for name in options:
            if name not in _OPTIONS:
                kind = type(self).__name__
                raise TypeError(f"{kind}.__init__() got an unexpected keyword argument {name!r}")
        self._take_options(
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
            | options,
            in_backward=in_backward,
            small_bytes=small_bytes,
            bucket_bytes=bucket_bytes,
            bf16=bf16,
            state_dtype=state_dtype,
            seed=seed,
            max_grad_norm=max_grad_norm,
            states_on=states_on,
            grads_on=grads_on,
            clip_global_norm=clip_global_norm,
            grad_scaler=grad_scaler,
        )
        if grad_scaler is not None and not options.get("capturable") and not options.get("foreach"):
            options.setdefault("fused", True)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._begin(in_backward)


class AdamW(Adam):
    """:class:`Adam` with decoupled weight decay; drop-in for :class:`torch.optim.AdamW`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if "decoupled_weight_decay" in options:
            raise TypeError("AdamW has no argument decoupled_weight_decay; Adam has")
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **options
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
