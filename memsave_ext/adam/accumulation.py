"""Gradient accumulation, and backwards that must not step the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from . import modes
from .loss_scaling import LossScaling
from .rules import rule_of


class Accumulation(LossScaling):
    """Methods of :class:`~memsave_ext.Adam`."""

    _pauses = 0  # how many paused() blocks are open
    _reductions: list[Any]  # one StepReduced for each attached DistributedDataParallel module
    _accumulate_when: Callable[[], object] | None = None
    _folds_when = False

    @contextlib.contextmanager
    def accumulate(self, fold: bool = False) -> Iterator[None]:
        """Let gradients add up in ``.grad`` inside the block.

        Put it around all but the last backward of a step. The last one then steps with the sum, as
        one backward over the whole batch would; :meth:`step` steps the parameters that the last
        backward does not reach.

        Args:
            fold: add each gradient to the moments at once instead, so that gradients take no memory
                at all. The first moment is exact. The second needs the square of the sum, which is
                derived from the first moment. Until then the old values of both moments are kept in
                16 bits each (with float32 states), so Adam's step is off by some percent at most.
                States must be float32 or float64. :meth:`zero_grad` does not take back what has
                been folded.

        Raises:
            ValueError: ``fold`` without ``in_backward``; with an option that needs whole gradients
                before they are folded: grad_scaler, max_grad_norm or clip_global_norm; or with a
                state_dtype other than float32.
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
        """Step nothing in the backwards inside the block, whose losses must not train this model.

        For example, the discriminator's optimizer is paused in the generator's step of a GAN::

            with opt_d.paused():
                loss_g(discriminator(generator(z))).backward()

        It applies to the backwards of all threads, as :meth:`accumulate` does.

        Args:
            keep: leave gradients in ``.grad``, to which later ones are added. Otherwise each
                gradient is dropped as it arrives, and ``.grad`` is restored when the block ends.

        Raises:
            RuntimeError: ``keep`` after :meth:`norm_pass`; :meth:`step` is called in the block.
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

    def accumulate_when(
        self, condition: Callable[[], object] | None, *, fold: bool = False
    ) -> None:
        """Accumulate where ``condition`` says so: :meth:`accumulate` for loops that a trainer runs.

        Call it once, before training::

            opt.accumulate_when(lambda: not accelerator.sync_gradients)

        A copied or unpickled optimizer has no condition; call this again.

        Args:
            condition: called when the first gradient of a backward arrives; returns true where the
                backward is not the last of its step. None removes the condition.
            fold: as in :meth:`accumulate`.

        Raises:
            TypeError: ``condition`` is neither callable nor None.
            ValueError: as in :meth:`accumulate`; ``fold`` after :meth:`attach`.
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
        """Returns what a backward does with its gradients: "step", "fold" or "keep"."""
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

        if not all(rule_of(group).folds for group in self.param_groups):
            refuse(type(self).__name__, "only Adam's moments take gradients up. Use accumulate().")
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
