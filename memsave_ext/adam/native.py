"""What the optimizers of this package share: its own options, and steps by its kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import modes
from .rules import rule_of
from .saving import Saving
from .step_in_backward import BUCKET_BYTES, SMALL_BYTES


class Native(Saving):
    """Methods of :class:`~memsave_ext.Adam`, :class:`SGD` and :class:`Lion`."""

    def _take_options(
        self,
        options: dict[str, Any],
        *,
        in_backward: bool = False,
        small_bytes: int = SMALL_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        bf16: str | None = None,
        state_dtype: torch.dtype | str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        clip_global_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Checks and keeps all options before the optimizer is made. ``options``: the rule's."""
        modes.check_bool("in_backward", in_backward)
        modes.check_options(options)
        modes.check_ranges(options)
        if in_backward and options.get("differentiable"):
            raise ValueError(
                "differentiable=True cannot be combined with in_backward=True: a step in backward "
                "has no graph. Leave one of them out."
            )
        modes.check_bytes("small_bytes", small_bytes)
        modes.check_bytes("bucket_bytes", bucket_bytes)
        self._small_bytes, self._bucket_bytes = small_bytes, bucket_bytes
        self.clip_global_norm, self.grad_scaler = clip_global_norm, grad_scaler
        given: dict[str, Any] = {
            "bf16": bf16, "state_dtype": state_dtype, "seed": seed, "max_grad_norm": max_grad_norm
        }  # fmt: skip
        self._modes = {name: v for name, v in given.items() if v != modes.DEFAULTS[name]}
        if options.get("differentiable"):
            ours = {"clip_global_norm": clip_global_norm, "grad_scaler": grad_scaler}
            modes.refuse_differentiable(self._modes | ours)

    def _begin(self, in_backward: bool, stacklevel: int) -> None:
        """Makes the stepper and attaches it, after the optimizer is made.

        ``stacklevel``: from the constructor that calls this one to the user's line.
        """
        self._make_stepper()
        if in_backward and self.clip_global_norm is None:
            self._attach(p for g in self.param_groups for p in g["params"])
            self._in_backward = True
        elif in_backward:
            warnings.warn(
                "memsave_ext: clip_global_norm needs all gradients, so that in_backward=True steps "
                "nothing in backward: leave in_backward out, or use max_grad_norm or norm_pass() "
                "in place of clip_global_norm",
                UserWarning,
                stacklevel=stacklevel + 1,
            )
        self._choose_unscaling()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "params" in param_group:
            params = param_group["params"]
            if not isinstance(params, (Tensor, set)):  # torch refuses a set
                param_group["params"] = list(params)  # it is read more than once
            for name, value in self._modes.items():
                param_group.setdefault(name, value)
            modes.refuse_twice(param_group["params"])
            modes.refuse_options_of_others(param_group, self.defaults, type(self).__name__)
            complete = {**self.defaults, **param_group}
            modes.check_options(complete)
            modes.check_ranges(complete)
            modes.check_group(param_group, rule_of(complete))
            if self.clip_global_norm is not None:
                modes.refuse_two_norms([param_group])
        super().add_param_group(param_group)
        if self._in_backward:
            try:
                self._attach(self.param_groups[-1]["params"])
            except BaseException:
                del self.param_groups[-1]
                raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; with ``in_backward``, close the step.

        Args:
            closure: evaluates the model again, runs backward and returns the loss. With
                ``in_backward`` its backward steps, and this call closes the step.

        Returns:
            What ``closure`` returned.
        """
        self._check_step(closure)
        if self.defaults.get("differentiable"):
            return super().step(closure)
        return self._close_step(closure)
