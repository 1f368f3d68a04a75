"""The classes of optimizers that are stepped in backward by their own step()."""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import modes, own_step
from .step_in_backward import InBackward


class OwnStep(InBackward):
    """Methods of an optimizer that :func:`~memsave_ext.in_backward` has taken."""

    _own: Any  # the class that the optimizer had
    _own_step: Any  # its step()
    _view: Any  # that of its views
    _steps_by_own = True
    _clips_each = True  # whether max_grad_norm in a group is ours, and not the optimizer's
    _counts: tuple[str, ...] = ()  # options of groups that a step changes, as a count of steps
    _counted: dict[int, dict[str, Any]]  # groups that have been stepped in the open step

    def _begin(self, max_grad_norm: float | None, scaler: torch.amp.GradScaler | None) -> None:
        self._clips_each = "max_grad_norm" not in self.defaults
        if max_grad_norm is not None:
            if not self._clips_each:
                raise ValueError(f"{type(self).__name__} has its own max_grad_norm: set that one")
            self.defaults = {**self.defaults, "max_grad_norm": max_grad_norm}
            for group in self.param_groups:
                group.setdefault("max_grad_norm", max_grad_norm)
        for group in self.param_groups:
            modes.refuse_twice(group["params"])
        self._make_stepper()
        self._counted = {}
        self._patch_step_function()
        self._renew_counter()
        self._attach(p for group in self.param_groups for p in group["params"])
        self._in_backward = True
        self.grad_scaler = scaler

    def _take_group(self, group: dict[str, Any]) -> None:
        """Prepares a group that was added."""
        modes.refuse_twice(group["params"])
        if self._in_backward:
            self._attach(group["params"])

    def _step_by_own(
        self,
        params: list[Tensor],
        numbers: list[int],
        scalars: tuple[Tensor | None, ...] | None,
    ) -> None:
        """Steps parameters of these groups with the gradients in ``.grad``; for ``_stepper``."""
        groups = self.param_groups
        if len(params) == 1 and scalars is None and not self._counts:  # most often: cheap
            group = groups[numbers[0]]
            if not self._clips_each or group.get("max_grad_norm") is None:
                self._run_own_step([{**group, "params": params}])
                return
        norms = [groups[n].get("max_grad_norm") if self._clips_each else None for n in numbers]
        if scalars is not None or any(norm is not None for norm in norms):
            used = own_step.scale(params, norms, scalars or (None,) * 4)
            left = [(p, n) for p, n, use in zip(params, numbers, used, strict=True) if use]
            if not left:
                return
            params, numbers = [p for p, _ in left], [n for _, n in left]
        chosen = own_step.restricted(groups, params, numbers, self._counts)
        self._run_own_step(list(chosen.values()))
        if self._counts:
            self._counted.update(chosen)

    def _run_own_step(self, groups: list[dict[str, Any]]) -> None:
        self._stepping_thread = threading.get_ident()
        try:
            self._own_step(own_step.view(self._view, self.__dict__, groups))
        finally:
            self._stepping_thread = None

    def _count_step(self) -> None:
        """Takes over what the step has counted in each group.

        Its parameters all began from the same count, as if they had been stepped together.
        """
        counted, self._counted = self._counted, {}
        for number, group in enumerate(self.param_groups):
            if number in counted:
                after = counted[number]
                group.update({name: after[name] for name in self._counts if name in after})
            elif self.grad_scaler is None:
                self._run_own_step([group])  # nothing has a gradient: its steps are counted

    def _count_on_device(self, groups: list[dict[str, Any]]) -> None:
        """Its own step counts where it does: whether to skip is read before it."""

    def _check_foldable(self) -> None:
        raise ValueError(
            "accumulate(fold=True) is for memsave_ext's Adam: this optimizer's own step() needs "
            "whole gradients. Use accumulate()."
        )

    def _renew_counter(self) -> None:
        """Has the schedulers that there are already count calls of this class's step()."""
        if "step" not in self.__dict__:
            return
        reference: Callable[[], Any] = weakref.ref(self)

        @functools.wraps(type(self).step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            optimizer = reference()
            optimizer._opt_called = True
            return type(optimizer).step(optimizer, *args, **kwargs)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.__dict__["step"] = counted


@functools.cache
def class_of(own: Any) -> type[OwnStep]:
    """Returns the class of optimizers that had the class ``own``.

    ``own`` is its first base, so that an object can change from one to the other.
    """

    class Taken(own, OwnStep):  # type: ignore[misc]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            self._check_step(closure)
            loss = self._close_step(closure)
            if self._counts:
                self._count_step()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            modes.check_bool("set_to_none", set_to_none)
            super().zero_grad(set_to_none)
            self._stepper.zero_grad(False)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            try:
                self._take_group(self.param_groups[-1])
            except BaseException:
                del self.param_groups[-1]
                raise

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._stepper.begin_loading()
            super().load_state_dict(state_dict)
            self._stepper.end_loading()
            self._counted = {}

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced: Any = super().__reduce_ex__(protocol)
            function, args, *rest = reduced
            if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
                raise TypeError(f"in_backward: {own.__name__} has its own way to be copied")
            return (_new, (own, *args[1:]), *rest)

        def __getstate__(self) -> dict[str, Any]:
            names = ("_in_backward", "_small_bytes", "_bucket_bytes", "_clips_each", "_counts")
            return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

        def __setstate__(self, state: dict[str, Any]) -> None:
            old_groups = self.__dict__.get("param_groups")
            super().__setstate__(state)
            if old_groups is not None:  # load_state_dict() calls it, and may lack the norm
                modes.keep(old_groups, self.param_groups, scaled=False)
                return
            self._make_stepper()
            self._counted = {}
            if self._in_backward:
                self._attach(p for group in self.param_groups for p in group["params"])
            self._choose_unscaling()

    Taken._own, Taken._view = own, own_step.view_class(own)
    Taken._own_step = staticmethod(own_step.step_of(own))
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Taken, name, getattr(own, name))
    return Taken


def _new(own: Any) -> Any:
    return object.__new__(class_of(own))
