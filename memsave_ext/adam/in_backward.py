"""What an optimizer has for steps in backward."""

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
        """Step the parameters of a DistributedDataParallel module when they have been reduced.

        Once, before training; the optimizer can be older or younger than ``ddp``. Accumulate with
        ``with ddp.no_sync(), opt.accumulate():``. FSDP2 needs no call.

        Args:
            ddp: the ``torch.nn.parallel.DistributedDataParallel``.
            hook, state: a communication hook to reduce with, as for ``ddp.register_comm_hook``,
                for instance one that compresses; torch's all-reduce otherwise.

        Raises:
            TypeError: ``ddp`` is something else.
            ValueError: not ``in_backward``, or no parameter of ``ddp`` is in this optimizer.
            RuntimeError: ``ddp`` has a communication hook.
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
        """Give the parameters back as they were; the optimizer goes on as an ordinary one."""
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
        """No parameter has had a gradient: are they still those of a model?"""
        params = [p for g in self.param_groups for p in g["params"]]
        (in_a_list,) = _reference_counts([torch.empty(0)])
        for param, count in zip(params, _reference_counts(params), strict=True):
            if count > in_a_list + 1 + (param in self.state):  # one more for the group's list
                return
        raise RuntimeError(
            "Adam: no parameter has received a gradient, and nothing but the optimizer refers to "
            "them: the model has other ones by now, as after load_state_dict(assign=True). Make "
            "the optimizer anew, and load_state_dict() this one's state_dict() into it."
        )


def _reference_counts(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors]
