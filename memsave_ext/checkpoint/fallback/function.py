"""``CheckpointFunction.apply`` and its autograd node."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._leaves import hold_accumulators
from .. import errors
from .graph import check_not_computed_from_listed, find_unlisted, sequence_number
from .outside import OutsideTensors, cuda_devices, observed_reads, tensors_in
from .stepped import Pending
from .surroundings import (
    AutocastState,
    Surroundings,
    any_has_drawn,
    forward_record_scope,
    uncached_autocast,
)


class CallSite(NamedTuple):
    """A line of Python code that calls CheckpointFunction.apply."""

    code: CodeType
    instruction: int
    line: int

    @staticmethod
    def of(frame: FrameType) -> CallSite:
        return CallSite(frame.f_code, frame.f_lasti, frame.f_lineno)


class Result:
    """What a function returned: a tensor, or a tuple or list of tensors and anything else."""

    def __init__(self, value: Any) -> None:
        self._kind = type(value) if isinstance(value, (tuple, list)) else None
        self.elements: list[Any] = [value] if self._kind is None else list(value)

    def rebuild(self, elements: list[Any]) -> Any:
        """The same kind of tuple or list, with these elements."""
        if self._kind is None:
            return elements[0]
        # A named tuple takes its fields one by one.
        make: Callable[[list[Any]], Any] = getattr(self._kind, "_make", self._kind)
        return make(elements)


def call(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Result:
    return Result(function(*inputs))


def is_differentiable(element: Any) -> bool:
    return isinstance(element, Tensor) and (element.is_floating_point() or element.is_complex())


def as_type(alias: Tensor, kind: type[Tensor]) -> Tensor:
    """``alias`` as an object of the subclass ``kind``; a Parameter's alias is a plain Tensor."""
    if type(alias) is kind or issubclass(kind, torch.nn.Parameter):
        return alias
    return alias.as_subclass(kind)


def check_outputs(outputs: Sequence[Any]) -> None:
    for i, output in enumerate(outputs):
        if _holds_tensor(output):
            raise errors.output_holds_tensors(i, output)


def _holds_tensor(output: Any) -> bool:
    """Of containers: a tensor itself holds none."""
    return not isinstance(output, Tensor) and any(True for _ in tensors_in(output))


def alias_of(output: Tensor, inputs: Sequence[Tensor], outputs: Sequence[Any]) -> Tensor:
    """Where memory of an output has a history that the region does not see, it is a view, which
    torch refuses to change in place."""
    has_other_history = (
        output.requires_grad
        or any(output is other for other in inputs)
        or sum(output is other for other in outputs) > 1
        or (output._is_view() and _shares_base(output))
    )
    with torch.no_grad():
        return output.view_as(output) if has_other_history else output.detach()


def _shares_base(view: Tensor) -> bool:
    """Whether anybody but this view keeps what it is a view of."""
    return _references_to_base(view) > _references_of_nobody()


@functools.cache
def _references_of_nobody() -> int:
    """How many references torch itself keeps to a view's base; this differs between versions."""
    return _references_to_base(torch.ones(2, device="cpu")[1:])


def _references_to_base(view: Tensor) -> int:
    base = view._base
    assert base is not None
    uses: int = base._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(base) + uses


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
        ctx.surroundings.rng.add(ctx.outside.note([forward.function]))
        ctx.surroundings.rng.keep(ctx.outside.devices | cuda_devices(tensors))
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
        ctx.outside.leave_out_changes_of_forward([forward.function])
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
            if ctx.needs_input_grad[i + 1] and tensor.requires_grad:  # not frozen since
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
    changed, generators = ctx.outside.find_changed([ctx.call.function])
    others = ctx.surroundings.rng.others(generators)
    with (
        ctx.surroundings.restored(),
        forward_record_scope(ctx.forward_record, replaying=True),
        observed_reads(changed, ctx.pending) as observer,
    ):
        elements = call(ctx.call.function, arguments).elements
    if observer.reads:
        raise errors.function_outside_changed(observer.reads)
    if any_has_drawn(others):
        raise errors.other_generator(None)
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


def checkpoint_apply(*args: Any) -> Any:
    errors.check_arguments(*args)
    function, n, *tensors = args
    if torch._C._are_functorch_transforms_active():
        raise errors.inside_transform()
    site = CallSite.of(sys._getframe(1))
    if not torch.is_grad_enabled():
        with torch.no_grad(), uncached_autocast(AutocastState.capture()):
            return function(*tensors[:n])
    if not any(t.requires_grad for t in tensors):
        return _call_and_look(function, tensors[:n], site)
    forward = Forward(function, n, site)
    nodes = hold_accumulators(tensors)
    outputs = Node.apply(forward, *tensors)
    del nodes
    assert forward.result is not None
    # Only tensors pass through torch's Function; the rest of the result travels beside it.
    elements, forward.result.elements = forward.result.elements, []
    for position, output in zip(forward.positions, outputs, strict=True):
        elements[position] = as_type(output, type(elements[position]))
    return forward.result.rebuild(elements)


def _call_and_look(function: Callable[..., Any], inputs: list[Tensor], site: CallSite) -> Any:
    """Where no listed tensor needs a gradient, no backward looks for unlisted ones: look here."""
    mark = sequence_number()
    with uncached_autocast(AutocastState.capture()):
        result = call(function, inputs)
    check_outputs(result.elements)
    roots = [e for e in result.elements if isinstance(e, Tensor) and e.requires_grad]
    errors.warn_unlisted(*site, find_unlisted(roots, (), mark))
    return result.rebuild(
        [e.detach() if isinstance(e, Tensor) and e.requires_grad else e for e in result.elements]
    )
