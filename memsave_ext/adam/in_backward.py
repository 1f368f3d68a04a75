"""What an optimizer has for steps in backward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import clip_guard, modes, owners
from .dtensor import is_dtensor


class InBackward(torch.optim.Optimizer):
    """Methods of :class:`~memsave_ext.Adam`; ``_stepper`` does what they say."""

    _in_backward = False
    _clip_global_norm: float | None = None
    _pauses = 0  # blocks that have been entered
    _grad_scaler: torch.amp.GradScaler | None = None
    _stepper: Any
    _reductions: list[Any]  # of DistributedDataParallel modules
    _accumulate_when: Callable[[], object] | None = None
    _folds_when = False

    @property
    def clip_global_norm(self) -> float | None:
        """The norm that all gradients together are clipped to in :meth:`step`; None: not."""
        return self._clip_global_norm

    @clip_global_norm.setter
    def clip_global_norm(self, norm: float | None) -> None:
        if norm is not None:
            modes.check_norm("clip_global_norm", norm)
            if self._in_backward:
                raise ValueError(
                    "clip_global_norm needs all gradients, which in_backward=True frees as they "
                    "arrive: give it when the optimizer is made, call remove_hooks() first, or use "
                    "norm_pass()"
                )
            modes.refuse_two_norms(self.__dict__.get("param_groups", []))
        self._clip_global_norm = norm

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """That of the training loop. It can be set later, before training, as where a trainer makes
        it; a copied or unpickled optimizer is to be given one again."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        groups: list[dict[str, Any]] = self.__dict__.get("param_groups", [])
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        if scaler is not None:
            if self.__dict__.get("defaults", {}).get("differentiable"):
                raise ValueError(
                    "differentiable=True, which is torch's implementation, has no grad_scaler"
                )
            self._refuse_dtensors("grad_scaler", [p for g in groups for p in g["params"]])
            self._count_on_device(groups)
        self._grad_scaler = scaler
        self._choose_unscaling()

    def _count_on_device(self, groups: list[dict[str, Any]]) -> None:
        """Whether a step is made is known there: so is how many have been."""
        for group in groups:
            if not group.get("capturable") and not group.get("foreach"):
                group["fused"] = True
            for param in group["params"]:
                if state := self.state.get(param):
                    state["step"] = state["step"].to(param.device, torch.float32)

    def _make_stepper(self) -> None:
        raise NotImplementedError

    @property
    def in_backward(self) -> bool:
        """Whether parameters are stepped in backward."""
        return self._in_backward

    @property
    def grad_norm(self) -> Tensor | None:
        """Of all gradients in the last step, before they were clipped: a float32 scalar. None where
        neither ``clip_global_norm`` nor :meth:`norm_pass` has measured it."""
        norm: Tensor | None = self._stepper.grad_norm()
        return norm

    @contextlib.contextmanager
    def accumulate(self, fold: bool = False) -> Iterator[None]:
        """Let gradients add up in ``.grad`` inside the block.

        Around all but the last backward of a step. The last one then steps with the sum, as with
        one backward over the whole batch; a parameter that it does not reach is stepped by
        :meth:`step`.

        Args:
            fold: add them to the moments instead, at once, so that there is no memory of gradients
                at all. The first moment is exact. The second needs the square of the sum, and gets
                it from the first, of which meanwhile only 16 bits of the old value are kept, as of
                the second's: off by some percent of Adam's step at most. States of float32 or
                float64 only. :meth:`zero_grad` does not take back what has been folded.

        Raises:
            ValueError: ``fold`` without ``in_backward``, or with what needs the sum of gradients
                before they are folded: a grad_scaler, max_grad_norm, clip_global_norm; or with
                another state_dtype.
        """
        modes.check_bool("fold", fold)
        if fold:
            self._check_foldable()
        self._stepper.accumulate(True, fold)
        try:
            yield
        finally:
            self._stepper.accumulate(False, fold)

    @contextlib.contextmanager
    def paused(self, *, keep: bool = False) -> Iterator[None]:
        """Step nothing in the backwards inside the block: of losses that are not to train this.

        Around the generator's step of a GAN for the discriminator's optimizer, say::

            with opt_d.paused():
                loss_g(discriminator(generator(z))).backward()

        For backwards of all threads, as :meth:`accumulate`.

        Args:
            keep: leave gradients in ``.grad``, to which later ones are added. They are dropped
                otherwise, each as it arrives, and what was in ``.grad`` before is there after.

        Raises:
            RuntimeError: ``keep`` after :meth:`norm_pass`; from :meth:`step` inside.
        """
        modes.check_bool("keep", keep)
        params = [p for g in self.param_groups for p in g["params"]]
        self._stepper.pause(True, keep)
        self._pauses += 1
        before: list[Tensor | None] = []
        if not keep:
            for param in params:
                before.append(param.grad)
                param.grad = None
        try:
            yield
        finally:
            for param, grad in zip(params, before, strict=not keep):
                param.grad = grad
            self._pauses -= 1
            self._stepper.pause(False, keep)

    def _check_not_paused(self) -> None:
        if self._pauses:
            raise RuntimeError("Adam: step() inside of paused(), where nothing is stepped")

    def accumulate_when(
        self, condition: Callable[[], object] | None, *, fold: bool = False
    ) -> None:
        """As :meth:`accumulate`, where a trainer runs the loop: decided by each backward.

        Once, before training::

            opt.accumulate_when(lambda: not accelerator.sync_gradients)

        A copied or unpickled optimizer is to be told again.

        Args:
            condition: called when the first gradient of a backward arrives; true where the backward
                is not the last of its step. None: no condition any more.
            fold: as in :meth:`accumulate`.

        Raises:
            TypeError: ``condition`` is neither callable nor None.
            ValueError: as from :meth:`accumulate`; ``fold`` after :meth:`attach`.
        """
        if condition is not None and not callable(condition):
            raise TypeError(
                "accumulate_when: condition must be a function without arguments, or None, got "
                f"{type(condition).__name__}"
            )
        modes.check_bool("fold", fold)
        if condition is not None and fold:
            self._check_foldable()
            self._refuse_folding_before_reduction(bool(self._reductions))
        self._accumulate_when = condition
        self._folds_when = condition is not None and fold
        self._stepper.ask(condition is not None)

    def _on_gradients(self) -> str:
        """What a backward does with its gradients: "step", "fold" or "keep" them."""
        if self._accumulate_when is None or not self._accumulate_when():
            return "step"
        if not self._folds_when:
            return "keep"
        self._check_foldable()
        return "fold"

    @staticmethod
    def _refuse_folding_before_reduction(refused: bool) -> None:
        if refused:
            raise ValueError(
                "accumulate_when(fold=True) cannot be combined with attach(): gradients of one "
                "process, which DistributedDataParallel has not reduced, would be folded. Use "
                "fold=False."
            )

    def _check_foldable(self) -> None:
        def refuse(other: str, way_out: str) -> None:
            raise ValueError(f"accumulate(fold=True) cannot be combined with {other}: {way_out}")

        if self.clip_global_norm is not None:
            refuse("clip_global_norm", "the norm is that of whole gradients. Use accumulate().")
        if not self._in_backward:
            refuse("in_backward=False", "gradients are folded in backward. Use accumulate().")
        if self.grad_scaler is not None:
            refuse("grad_scaler", "an infinity would stay in the moments. Use accumulate().")
        for group in self.param_groups:
            if group.get("max_grad_norm") is not None:
                refuse("max_grad_norm", "the norm is that of whole gradients. Use accumulate().")
            if (dtype := modes.of_group(group, "state_dtype")) is not None:
                refuse(f"state_dtype={dtype!r}", "folding takes the bits of a float32 state.")

    @contextlib.contextmanager
    def norm_pass(self, max_norm: float) -> Iterator[None]:
        """Measure the norm of all gradients, and drop them, so that the next backward is clipped.

        Exact, without the memory of all gradients, for the time of a second backward::

            with opt.norm_pass(max_norm=1.0):
                loss.backward(retain_graph=True)
            loss.backward()                        # clipped by the norm of all
            opt.step()

        Instead of ``retain_graph`` the forward can be run again. :attr:`grad_norm` is the norm.

        Raises:
            ValueError: not ``in_backward``, or with ``clip_global_norm`` or ``max_grad_norm``;
                DTensors.
            RuntimeError: gradients are being accumulated, or were stepped already.
        """
        modes.check_norm("max_norm", max_norm)
        if self.clip_global_norm is not None:
            raise ValueError(
                "norm_pass() cannot be combined with clip_global_norm, which clips in one backward "
                "and keeps the gradients: leave one of them out"
            )
        if not self._in_backward:
            raise ValueError("norm_pass() is for in_backward=True: use clip_global_norm=")
        modes.refuse_two_norms(self.param_groups)
        params = [p for g in self.param_groups for p in g["params"]]
        self._refuse_dtensors("norm_pass()", params)
        self._stepper.begin_norm_pass()
        finished = False
        try:
            yield
            finished = True
        finally:
            self._stepper.end_norm_pass(max_norm if finished else None)

    @staticmethod
    def _refuse_dtensors(what: str, params: Any) -> None:
        if any(is_dtensor(param) for param in modes.listed(params)):
            raise ValueError(
                f"{what} would look at each process's part of DTensors alone: use torch's "
                "clip_grad_norm_ or GradScaler.unscale_ and an optimizer without in_backward"
            )

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

    def _choose_unscaling(self) -> None:
        """Whether torch.amp.GradScaler leaves it to :meth:`step`, as for torch's fused Adam."""
        self._step_supports_amp_scaling = self._in_backward or self._grad_scaler is not None

    def _check_scaler(self) -> bool:
        """Whether gradients in ``.grad`` have been unscaled. ``GradScaler.step`` sets grad_scale
        around this call, to None where they have."""
        if not hasattr(self, "grad_scale"):
            return False
        if self.grad_scaler is None:
            raise RuntimeError(
                "Adam: GradScaler.step() for an optimizer that has stepped in backward, with "
                "gradients multiplied by the scale. Hand it over before training: "
                f"{type(self).__name__}(..., in_backward=True, grad_scaler=scaler), or "
                "opt.grad_scaler = scaler where a trainer has made it (trainer.accelerator.scaler, "
                "trainer.precision_plugin.scaler)."
            )
        return self.grad_scale is None

    def _report_to_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """What ``scaler.update()`` adapts the scale by."""
        found = self._stepper.found() or [torch.zeros_like(scaler._get_scale_async())]  # type: ignore[arg-type]
        # GradScaler has no public way: this is what its unscale_() fills.
        state = scaler._per_optimizer_states[id(self)]
        state["found_inf_per_device"] = {tensor.device: tensor for tensor in found}


def _reference_counts(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors]
