"""Backwards that are not the last of a step, or not of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from . import modes
from .loss_scaling import LossScaling


class Accumulation(LossScaling):
    """Methods of :class:`~memsave_ext.Adam`."""

    _pauses = 0  # blocks that have been entered
    _reductions: list[Any]  # of DistributedDataParallel modules
    _accumulate_when: Callable[[], object] | None = None
    _folds_when = False

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
