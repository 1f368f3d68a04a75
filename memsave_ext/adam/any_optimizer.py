"""Any optimizer, stepped in backward by its own step()."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch.optim import Optimizer

from . import modes, own_step_trial, owners
from .native import Native
from .own_optimizer import OwnStep, class_of, step_of
from .step_in_backward import BUCKET_BYTES, SMALL_BYTES


def in_backward(
    optimizer: Optimizer,
    *,
    small_bytes: int = SMALL_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    max_grad_norm: float | None = None,
    grads_on: str | os.PathLike[str] | None = None,
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
    ``paused()``, ``grad_norm``, ``grad_scaler``, ``attach()`` for
    DistributedDataParallel, and ``remove_hooks()``, after which it is an ordinary one. Step hooks
    run once for each call of ``step()``.

    Args:
        optimizer: any that steps each parameter by itself. It may have states already.
        small_bytes, bucket_bytes: gradients of fewer than ``small_bytes`` wait in ``.grad`` until
            ``bucket_bytes`` of them have arrived, or backward ends, and are stepped together.
        max_grad_norm: clips each parameter's gradient to this norm, as torch's ``clip_grad_norm_``
            of it alone does; a param group may have its own.
        grads_on: where gradients lie until ``step()``, as of ``memsave_ext.Adam``. Nothing is
            stepped in backward then; ``step()`` fetches them and steps one after the other.
        grad_scaler: the ``torch.amp.GradScaler`` of the training loop, whose calls stay as they
            are. A parameter whose gradient is not finite is not stepped; the others are.

    Returns:
        The same object. Its class is a subclass of what it was. A copy, or what is unpickled, is
        stepped in backward as well, and has no grad_scaler.

    Raises:
        OSError: no file can be made in ``grads_on``, or there is no room for the gradients.
        TypeError: ``optimizer`` is no optimizer.
        ValueError: it cannot step a parameter by itself: it needs all gradients or a closure, as
            LBFGS, or counts the steps of all groups together; it wraps another; it is stepped in
            backward already; ``differentiable=True``; another optimizer steps a parameter of it.
        RuntimeError: in backward: a second gradient for a parameter in one step outside of
            ``accumulate()``; a sparse gradient.
    """
    _check(optimizer)
    counts = own_step_trial.find_counts(optimizer)
    modes.check_bytes("small_bytes", small_bytes)
    modes.check_bytes("bucket_bytes", bucket_bytes)
    if max_grad_norm is not None:
        modes.check_norm("max_grad_norm", max_grad_norm)
    taken: Any = optimizer
    own: Any = type(optimizer)
    gradients = modes.gradients_of(grads_on, grad_scaler)
    attributes = dict(optimizer.__dict__)
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        taken.__class__ = class_of(own)
        taken._small_bytes, taken._bucket_bytes = small_bytes, bucket_bytes
        taken._counts = counts
        taken._begin(max_grad_norm, grad_scaler, gradients)
    except BaseException:
        if "_stepper" in taken.__dict__:
            owners.release(taken)
        taken.__class__, taken.__dict__ = own, attributes
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.pop("max_grad_norm", None)
            group.update(before)
        raise
    return taken


def _check(optimizer: object) -> None:
    """Raises where the optimizer cannot be taken."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"in_backward: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    name, step = type(optimizer).__name__, optimizer.__dict__.get("step")
    if isinstance(optimizer, (Native, OwnStep)):
        raise ValueError(
            f"in_backward: {name} is an optimizer of memsave_ext, or in_backward() was called for "
            "it already. Make an optimizer of memsave_ext with in_backward=True instead"
        )
    if any(isinstance(value, Optimizer) for value in optimizer.__dict__.values()):
        raise ValueError(
            f"in_backward: {name} wraps another optimizer: call in_backward() with the inner "
            "optimizer before it is wrapped"
        )
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"in_backward: step() of this {name} has been replaced by another function: call "
            "in_backward() before it is replaced"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "in_backward: differentiable=True is not supported: a step in backward has no autograd "
            "graph"
        )
    own: Any = type(optimizer)
    _, *arguments = inspect.signature(step_of(own)).parameters.values()
    for argument in arguments:
        if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD:
            raise ValueError(
                f"in_backward: step() of {name} needs the argument {argument.name}, which cannot "
                "be passed when a parameter is stepped in backward. Call its step() after backward "
                "instead"
            )
