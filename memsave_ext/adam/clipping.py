"""Clips all gradients of an optimizer by their global norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import modes


class Clipping(torch.optim.Optimizer):
    """Methods of :class:`~memsave_ext.Adam`, carried out by ``_stepper``."""

    _in_backward = False
    _clip_global_norm: float | None = None
    _stepper: Any

    @property
    def clip_global_norm(self) -> float | None:
        """The global norm that :meth:`step` clips all gradients to; None: no clipping."""
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
    def grad_norm(self) -> Tensor | None:
        """The global norm of the last step's gradients before clipping, a float32 scalar.

        None where neither ``clip_global_norm`` nor :meth:`norm_pass` has measured it.
        """
        norm: Tensor | None = self._stepper.grad_norm()
        return norm

    @contextlib.contextmanager
    def norm_pass(self, max_norm: float) -> Iterator[None]:
        """Measure the global norm and drop the gradients, so that the next backward can clip.

        This clips exactly without keeping all gradients, at the cost of a second backward::

            with opt.norm_pass(max_norm=1.0):
                loss.backward(retain_graph=True)
            loss.backward()                        # clipped by the norm of all
            opt.step()

        Instead of ``retain_graph`` the forward can be run again. :attr:`grad_norm` is the norm.

        Raises:
            ValueError: without ``in_backward``; with ``clip_global_norm`` or ``max_grad_norm``.
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
        self._stepper.begin_norm_pass()
        finished = False
        try:
            yield
            finished = True
        finally:
            self._stepper.end_norm_pass(max_norm if finished else None)
