"""The optimizer's methods for steps in backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import clip_guard, owners
from .accumulation import Accumulation


class InBackward(Accumulation):
    """Methods of :class:`~memsave_ext.Adam`."""

    def _make_stepper(self) -> None:
        raise NotImplementedError

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
            "Adam: no parameter has received a gradient, and nothing but the optimizer refers to "
            "them: the model has other ones by now, as after load_state_dict(assign=True). Make "
            "the optimizer anew, and load_state_dict() this one's state_dict() into it."
        )


def _reference_counts(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors]
