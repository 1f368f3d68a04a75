"""The autograd node behind ``CheckpointFunction``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .call import CallSite, Result, as_type, call, is_differentiable
from .forward_record import forward_record_scope
from .graph import check_not_computed_from_listed, find_unlisted, sequence_number
from .outputs import alias_of, check_outputs
from .outside import OutsideTensors, observed_reads
from .stepped import Pending
from .surroundings import Surroundings, uncached_autocast

_hook_lock = threading.RLock()


@dataclass
class Forward:
    """What goes into a node beside tensors, and what comes out."""

    function: Callable[..., Any]
    n: int
    site: CallSite
    thread: int = field(default_factory=threading.get_ident)
    result: Result | None = None
    positions: list[int] = field(default_factory=list)  # of differentiable elements of the result


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, parameters = tensors[: forward.n], tensors[forward.n :]
        versions = [t._version for t in inputs]
        ctx.surroundings = Surroundings.capture()
        ctx.forward_record = {}
        ctx.outside = OutsideTensors()
        ctx.outside.note([forward.function])
        with (
            uncached_autocast(ctx.surroundings.autocast),
            forward_record_scope(ctx.forward_record, replaying=False),
        ):
            forward.result = call(forward.function, inputs)
        elements = forward.result.elements
        check_outputs(elements)
        for i, (tensor, version) in enumerate(zip(inputs, versions, strict=True)):
            if tensor._version != version:
                raise errors.input_changed(i)
        ctx.outside.leave_out_own_changes([forward.function])
        forward.positions = [i for i, element in enumerate(elements) if is_differentiable(element)]
        ctx.call, ctx.size = forward, len(elements)
        ctx.pending = Pending()
        ctx.save_for_backward(*inputs)
        # Apart from the inputs: a hook such as save_on_cpu would copy parameters for nothing.
        ctx.parameters = [(t, t._version) for t in parameters]
        ctx.set_materialize_grads(False)
        return tuple(alias_of(elements[i], inputs, elements) for i in forward.positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        for i, (parameter, version) in enumerate(ctx.parameters):
            if parameter._version != version:
                raise errors.parameter_changed(i, parameter, version)
        parameters = [parameter for parameter, _ in ctx.parameters]
        results: list[Tensor | None] = [None] * (len(inputs) + len(parameters))
        if all(grad is None for grad in grads):
            return (None, *results)
        arguments = [as_type(t.detach(), type(t)).requires_grad_(t.requires_grad) for t in inputs]
        mark = sequence_number()
        roots, root_grads = _roots(ctx, _recompute(ctx, arguments), grads)

        tensors = [*arguments, *parameters]
        wanted: dict[Tensor, int] = {}  # a tensor listed twice gets its gradient once
        for i, tensor in enumerate(tensors):
            if ctx.needs_input_grad[i + 1]:
                wanted.setdefault(tensor, i)
        if roots and wanted:
            check_not_computed_from_listed(parameters)
            if threading.get_ident() == ctx.call.thread:
                site: CallSite = ctx.call.site
                errors.warn_unlisted(*site, find_unlisted(roots, tensors, mark))
            with _silent_tensor_hooks(parameters):
                captured = torch.autograd.grad(roots, [*wanted], root_grads, allow_unused=True)
            for i, grad in zip(wanted.values(), captured, strict=True):
                results[i] = grad
        if torch.is_grad_enabled():
            live = [i for i, grad in enumerate(results) if grad is not None]
            sources = [*(g for g in grads if g is not None), *inputs, *parameters]
            refusing = _NoDoubleBackward.apply(len(live), *(results[i] for i in live), *sources)
            for i, grad in zip(live, refusing, strict=True):
                results[i] = grad
        return (None, *results)


class _NoDoubleBackward(torch.autograd.Function):
    """Hands gradients through and raises when they are differentiated again."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(errors.DOUBLE_BACKWARD)


def _recompute(ctx: Any, arguments: Sequence[Tensor]) -> list[Any]:
    changed = ctx.outside.find_changed([ctx.call.function])
    with (
        ctx.surroundings.restored(),
        forward_record_scope(ctx.forward_record, replaying=True),
        observed_reads(changed, ctx.pending) as observer,
    ):
        elements = call(ctx.call.function, arguments).elements
    if observer.reads:
        raise errors.function_outside_changed(observer.reads)
    return elements


def _roots(
    ctx: Any, elements: list[Any], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a gradient arrived for, and these gradients."""
    if len(elements) != ctx.size:
        raise errors.other_number_of_outputs(len(elements), ctx.size)
    roots: list[Tensor] = []
    root_grads: list[Tensor] = []
    for i, grad in zip(ctx.call.positions, grads, strict=True):
        if grad is None:
            continue
        output = elements[i]
        if not isinstance(output, Tensor):
            raise errors.output_is_no_tensor(i)
        if output.shape != grad.shape:
            raise errors.output_of_other_shape(i, output, grad)
        if output.requires_grad:
            roots.append(output)
            root_grads.append(grad)
    return roots, root_grads


@contextlib.contextmanager
def _silent_tensor_hooks(tensors: list[Tensor]) -> Iterator[None]:
    """Keep hooks of the listed tensors quiet: they run when the outer graph reaches the tensor."""
    hooked = [t for t in tensors if t._backward_hooks or t.retains_grad]
    if not hooked:
        yield
        return
    with _hook_lock:
        before = [(t, dict(t._backward_hooks or {}), t.grad) for t in hooked]
        for tensor in hooked:
            if tensor._backward_hooks:
                tensor._backward_hooks.clear()
        try:
            yield
        finally:
            for tensor, hooks, grad in before:
                if hooks and tensor._backward_hooks is not None:
                    tensor._backward_hooks.update(hooks)
                if tensor.retains_grad:
                    tensor.grad = grad
