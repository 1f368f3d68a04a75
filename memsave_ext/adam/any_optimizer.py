"""Any optimizer, stepped in backward by its own step()."""

from __future__ import annotations

import copyreg
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import modes, own_step
from .optimizer import Adam
from .step_in_backward import BUCKET_BYTES, SMALL_BYTES, InBackward


def in_backward(
    optimizer: Optimizer,
    *,
    small_bytes: int = SMALL_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    max_grad_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Have any optimizer step in backward, while gradients arrive, and free them.

    The training loop, schedulers and checkpoints stay as they are::

        opt = ms.in_backward(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
        loss.backward()        # updates each parameter when its gradient is complete, and frees it
        opt.step()             # closes the step; applies what is left in .grad
        opt.zero_grad()
        scheduler.step()

    Each parameter is stepped by the optimizer's own ``step()``, to the same bits: it runs with
    ``param_groups`` that have this parameter alone, or several small ones. The optimizer also gets
    what ``memsave_ext.Adam`` has for steps in backward: ``accumulate()``, ``accumulate_when()``,
    ``paused()``, ``norm_pass()``, ``grad_norm``, ``grad_scaler``, ``attach()`` for
    DistributedDataParallel, and ``remove_hooks()``, after which it is an ordinary one. Step hooks
    run once for each call of ``step()``.

    Args:
        optimizer: any that steps each parameter by itself. It may have states already.
        small_bytes, bucket_bytes: gradients of fewer than ``small_bytes`` wait in ``.grad`` until
            ``bucket_bytes`` of them have arrived, or backward ends, and are stepped together.
        max_grad_norm: clips each parameter's gradient to this norm, as torch's ``clip_grad_norm_``
            of it alone does; a param group may have its own.
        grad_scaler: the ``torch.amp.GradScaler`` of the training loop, whose calls stay as they
            are. A parameter whose gradient is not finite is not stepped; the others are.

    Returns:
        The same object. Its class is a subclass of what it was. A copy, or what is unpickled, is
        stepped in backward as well, and has no grad_scaler.

    Raises:
        TypeError: ``optimizer`` is no optimizer.
        ValueError: it cannot step a parameter by itself: it needs all gradients or a closure, as
            LBFGS, or counts steps for a whole group; it wraps another; it is stepped in backward
            already; ``differentiable=True``; another optimizer steps one of the parameters.
        RuntimeError: in backward: a second gradient for a parameter in one step outside of
            ``accumulate()``; a sparse gradient.
    """
    _check(optimizer)
    modes.check_bytes("small_bytes", small_bytes)
    modes.check_bytes("bucket_bytes", bucket_bytes)
    if max_grad_norm is not None:
        modes.check_norm("max_grad_norm", max_grad_norm)
    taken: Any = optimizer
    own: Any = type(optimizer)
    attributes = dict(optimizer.__dict__)
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        taken.__class__ = _class_of(own)
        taken._small_bytes, taken._bucket_bytes = small_bytes, bucket_bytes
        taken._begin(max_grad_norm, grad_scaler)
    except BaseException:
        if "_stepper" in taken.__dict__:
            taken._stepper.detach()
        taken.__class__, taken.__dict__ = own, attributes
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.pop("max_grad_norm", None)
            group.update(before)
        raise
    return taken


class OwnStep(InBackward):
    """An optimizer whose own class steps it in backward. The real class also derives from that."""

    _own: Any
    _view: Any
    _steps_by_own = True

    def _begin(self, max_grad_norm: float | None, scaler: torch.amp.GradScaler | None) -> None:
        if max_grad_norm is not None:
            self.defaults = {**self.defaults, "max_grad_norm": max_grad_norm}
            for group in self.param_groups:
                group.setdefault("max_grad_norm", max_grad_norm)
        own_step.refuse_dtensors_that_clip(self.param_groups)
        self._make_stepper()
        self._patch_step_function()
        self._renew_count()
        self._attach(p for group in self.param_groups for p in group["params"])
        self._in_backward = True
        self.grad_scaler = scaler

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Close the step: step every parameter that has a gradient left.

        Args:
            closure: evaluates the model again, runs backward, which steps, and returns the loss.

        Returns:
            What ``closure`` returned.
        """
        self._check_step(closure)
        return self._close_step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            own_step.refuse_dtensors_that_clip(self.param_groups)
            if self.grad_scaler is not None:
                self._refuse_dtensors("grad_scaler", self.param_groups[-1]["params"])
            if self._in_backward:
                self._attach(self.param_groups[-1]["params"])
        except BaseException:
            del self.param_groups[-1]
            raise

    def _step_by_own(
        self,
        params: list[Tensor],
        numbers: list[int],
        scalars: tuple[Tensor | None, ...] | None,
    ) -> None:
        """Steps parameters of these groups with the gradients in ``.grad``; for ``_stepper``."""
        groups = self.param_groups
        if scalars is not None or any(groups[n].get("max_grad_norm") is not None for n in numbers):
            of_params = (groups[number] for number in numbers)
            used = own_step.scale(params, of_params, scalars or (None,) * 4)
            chosen = [(p, n) for p, n, use in zip(params, numbers, used, strict=True) if use]
            if not chosen:
                return
            params, numbers = [p for p, _ in chosen], [n for _, n in chosen]
        groups = own_step.restricted(groups, params, numbers)
        self._stepping_thread = threading.get_ident()
        try:
            own_step.step_of(self._own)(own_step.view(self._view, self.__dict__, groups))
        finally:
            self._stepping_thread = None

    def _count_on_device(self, groups: list[dict[str, Any]]) -> None:
        """Its own step counts where it does: whether to skip is read before it."""

    def _check_foldable(self) -> None:
        raise ValueError(
            "accumulate(fold=True) is for memsave_ext's Adam: this optimizer's own step() needs "
            "whole gradients. Use accumulate()."
        )

    def _renew_count(self) -> None:
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            raise TypeError(f"in_backward: {self._own.__name__} has its own way to be copied")
        return (_new, (self._own, *args[1:]), *rest)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_in_backward", "_small_bytes", "_bucket_bytes")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        old_groups = self.__dict__.get("param_groups")
        super().__setstate__(state)
        if old_groups is not None:  # load_state_dict() calls it, and may lack the norm
            modes.keep(old_groups, self.param_groups, scaled=False)
        else:
            self._make_stepper()
            if self._in_backward:
                self._attach(p for group in self.param_groups for p in group["params"])
            self._choose_unscaling()


def _new(own: Any) -> Any:
    return object.__new__(_class_of(own))


def _check(optimizer: object) -> None:
    """Raises where the optimizer cannot be taken."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"in_backward: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    name, step = type(optimizer).__name__, optimizer.__dict__.get("step")
    if isinstance(optimizer, (Adam, OwnStep)):
        raise ValueError(
            f"in_backward: {name} is memsave_ext's or was taken by in_backward() already. Of "
            "memsave_ext's, make one with in_backward=True"
        )
    if any(isinstance(value, Optimizer) for value in optimizer.__dict__.values()):
        raise ValueError(f"in_backward: {name} wraps another optimizer: hand that one over first")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"in_backward: step() of this {name} has been replaced: call in_backward() before that"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "in_backward: differentiable=True needs a graph, which a step in backward has not"
        )
    own: Any = type(optimizer)
    _, *arguments = inspect.signature(own_step.step_of(own)).parameters.values()
    for argument in arguments:
        if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD:
            raise ValueError(
                f"in_backward: step() of {name} needs a {argument.name}, which a step of one "
                "parameter cannot have. Step it after backward"
            )
    own_step.refuse_group_steps(optimizer)


@functools.cache
def _class_of(own: Any) -> type[OwnStep]:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(
        own.__name__, (OwnStep, own), {**names, "_own": own, "_view": own_step.view_class(own)}
    )
