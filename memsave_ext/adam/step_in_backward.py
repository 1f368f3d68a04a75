"""The optimizer's methods for steps in backward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import clip_guard, modes, owners
from .accumulation import Accumulation
from .stepper import Stepper

SMALL_BYTES = 1 << 16
BUCKET_BYTES = 1 << 20


class InBackward(Accumulation):
    """Methods of :class:`~memsave_ext.Adam`."""

    _small_bytes = SMALL_BYTES
    _bucket_bytes = BUCKET_BYTES
    _steps_by_own = False  # whether the parameters are stepped by another package's step()
    _stepping_thread: int | None = None  # the one that is in such a step()

    def _make_stepper(self) -> None:
        owners.note_optimizer(self)
        self._stepper = Stepper(self, self._small_bytes, self._bucket_bytes, self._steps_by_own)
        self._reductions = []

    @property
    def in_backward(self) -> bool:
        """Whether parameters are stepped in backward."""
        return self._in_backward

    def attach(self, ddp: Any, hook: Any = None, state: Any = None) -> None:
        """Step a DistributedDataParallel module's parameters when their gradients are reduced.

        Call it once, before training; the optimizer can be made before or after ``ddp``. Accumulate
        gradients with ``with ddp.no_sync(), opt.accumulate():``. FSDP2 does not need this call.

        Args:
            ddp: the ``torch.nn.parallel.DistributedDataParallel``.
            hook, state: a communication hook that reduces the gradients, as for
                ``ddp.register_comm_hook``, for instance one that compresses; by default torch's
                all-reduce.

        Raises:
            TypeError: ``ddp`` is something else.
            ValueError: not ``in_backward``; no parameter of ``ddp`` is in this optimizer; after
                ``accumulate_when(fold=True)``.
            RuntimeError: ``ddp`` has a communication hook, or is attached to another optimizer.
        """
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                "ddp must be a torch.nn.parallel.DistributedDataParallel, got "
                f"{type(ddp).__name__}. FSDP2's parameters need no attach()."
            )
        if not self._in_backward:
            clips = ", which clip_global_norm has switched off" if self.clip_global_norm else ""
            raise ValueError(
                f"attach() is for in_backward=True{clips}: without it step() finds reduced "
                "gradients"
            )
        ours = {id(p) for g in self.param_groups for p in g["params"]}
        params: list[Tensor] = [p for p in ddp.parameters() if id(p) in ours]
        if not params:
            raise ValueError("ddp has no parameter that is in this optimizer")
        self._refuse_folding_before_reduction(self._folds_when)
        from .ddp import attach

        self._reductions.append(attach(self, ddp, params, hook, state))

    def remove_hooks(self) -> None:
        """Stop stepping in backward: remove all hooks and go on as an ordinary optimizer."""
        for reduction in self._reductions:
            reduction.detach()
        self._reductions.clear()
        self._stepper.detach()
        self._in_backward = False
        self._choose_unscaling()

    def zero_grad(self, set_to_none: bool = True) -> None:
        modes.check_bool("set_to_none", set_to_none)
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        self._stepper.zero_grad(set_to_none)

    def _check_step(self, closure: object) -> None:
        """Raises where step() cannot be called now, or with this closure."""
        if self._pauses:
            raise RuntimeError("memsave_ext: step() inside of paused(), where nothing is stepped")
        if closure is not None and not callable(closure):
            raise TypeError(
                "closure must be a function without arguments, or None, got "
                f"{type(closure).__name__}"
            )

    def _close_step(self, closure: Callable[[], Any] | None) -> Any:
        """Steps what has a gradient, closes the step and returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward and (lost := self._stepper.lost()):
            self._attach(lost)
            warnings.warn(
                f"memsave_ext: {len(lost)} parameters had lost their hook (their tensors were "
                "swapped, or something else took its place). It is attached again; this step is "
                "made from what is in .grad.",
                RuntimeWarning,
                stacklevel=4,
            )
        unscaled = self._check_scaler()
        if not self._stepper.step(self.clip_global_norm or 0.0, unscaled) and self._in_backward:
            self._check_not_orphaned()
        if self.grad_scaler is not None and self.grad_scaler.is_enabled():
            self._report_to_scaler(self.grad_scaler)
        return loss

    def _attach(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        for param in params:
            if not param.is_leaf:
                raise ValueError("in_backward=True: can't step a non-leaf Tensor in backward")
        owners.refuse_taken(self, params)
        self._stepper.attach(params)
        clip_guard.watch(self)

    def _check_not_orphaned(self) -> None:
        """Raises RuntimeError where only the optimizer still refers to its parameters.

        Called where no parameter has received a gradient.
        """
        params = [p for g in self.param_groups for p in g["params"]]
        (in_a_list,) = _reference_counts([torch.empty(0)])
        for param, count in zip(params, _reference_counts(params), strict=True):
            # The group's list refers to it once more, and so does the state.
            if count > in_a_list + 1 + (param in self.state):
                return
        raise RuntimeError(
            "memsave_ext: no parameter has received a gradient, and nothing but the optimizer "
            "refers to them: the model has other ones by now, as after "
            "load_state_dict(assign=True). Make the optimizer anew, and load_state_dict() this "
            "one's state_dict() into it."
        )


def _reference_counts(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors]
