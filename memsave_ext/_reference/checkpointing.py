"""CheckpointFunction in Python: a torch.autograd.Function around the recompute."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import unlisted
from .outside import OutsideTensors, ReadObserver, mutation_message
from .stepped import PendingRegion
from .surroundings import AutocastState, Surroundings, is_recomputing, uncached_autocast
from .tape import tape_scope

__all__ = ["checkpoint_apply", "is_recomputing"]

_hook_lock = threading.RLock()


def checkpoint_apply(*args: Any) -> Any:
    call, inputs, parameters = _parse(args, unlisted.CallSite.of(sys._getframe(1)))
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "CheckpointFunction does not work inside torch.func transforms (grad, vjp, jvp, vmap): "
            "they trace the function themselves. Call the function directly there."
        )
    differentiable = any(t.requires_grad for t in (*inputs, *parameters))
    if torch.is_grad_enabled() and differentiable:
        outputs = _Region.apply(call, *inputs, *parameters)
        # Only tensors pass through torch's Function; the rest of the result travels in the call.
        for position, output in zip(call.positions, outputs, strict=True):
            call.elements[position] = _as_type(output, type(call.elements[position]))
        return _rebuild(call)
    if torch.is_grad_enabled():
        return _call_and_look(call, inputs)
    with torch.no_grad(), uncached_autocast(AutocastState.capture()):
        return call.function(*inputs)


@dataclass
class _Call:
    function: Callable[..., Any]
    n: int
    site: unlisted.CallSite
    thread: int = field(default_factory=threading.get_ident)
    kind: type | None = None  # of the sequence the function returned, None for a single value
    elements: list[Any] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of the differentiable ones

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        result = self.function(*inputs)
        self.kind = type(result) if isinstance(result, (tuple, list)) else None
        return [result] if self.kind is None else list(result)


def _rebuild(call: _Call) -> Any:
    elements, call.elements = call.elements, []
    if call.kind is None:
        return elements[0]
    make: Callable[[list[Any]], Any] = getattr(call.kind, "_make", call.kind)
    return make(elements)


def _parse(
    args: tuple[Any, ...], site: unlisted.CallSite
) -> tuple[_Call, tuple[Tensor, ...], tuple[Tensor, ...]]:
    name = "CheckpointFunction.apply"
    if len(args) < 2:
        raise TypeError(
            f"{name}(function, n, *args): expected a function and the number n of its inputs, "
            f"got {len(args)} arguments"
        )
    function, n, *rest = args
    if not callable(function):
        raise TypeError(f"{name}: function must be callable, got {type(function).__name__}")
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"{name}: n must be an int, got {type(n).__name__}")
    if not 0 <= n <= len(rest):
        raise ValueError(
            f"{name}: n must be between 0 and {len(rest)}, the number of tensors that follow it, "
            f"got {n}"
        )
    for i, arg in enumerate(rest):
        if not isinstance(arg, Tensor):
            role = f"input {i}" if i < n else f"parameter {i - n}"
            raise TypeError(
                f"{name}: args[{i}] ({role}) must be a torch.Tensor, got {type(arg).__name__}. "
                "Pass tensors one by one, other values through a closure."
            )
    return _Call(function, n, site), tuple(rest[:n]), tuple(rest[n:])


def _call_and_look(call: _Call, inputs: tuple[Tensor, ...]) -> Any:
    """Nothing listed needs a gradient: no backward will ever look, so the forward does."""
    mark = unlisted.sequence_number()
    with uncached_autocast(AutocastState.capture()):
        elements = call.run(inputs)
    roots = [e for e in elements if isinstance(e, Tensor) and e.requires_grad]
    if roots:
        unlisted.look(roots, (), mark, call.site)
    call.elements = [
        e.detach() if isinstance(e, Tensor) and e.requires_grad else e for e in elements
    ]
    return _rebuild(call)


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, parameters = tensors[: call.n], tensors[call.n :]
        versions = [t._version for t in inputs]
        ctx.surroundings = Surroundings.capture()
        ctx.tape = {}
        ctx.outside = OutsideTensors()
        ctx.outside.note([call.function])
        with (
            uncached_autocast(ctx.surroundings.autocast),
            tape_scope(ctx.tape, replaying=False),
        ):
            call.elements = call.run(inputs)
        _check_outputs(call.elements)
        for i, (tensor, version) in enumerate(zip(inputs, versions, strict=True)):
            if tensor._version != version:
                raise RuntimeError(
                    f"CheckpointFunction.apply: the function changes input {i} in place, so that "
                    "it could not be run again from it. Clone the input inside the function first."
                )
        ctx.outside.leave_out_own_changes([call.function])
        outputs: list[Tensor] = []
        for i, element in enumerate(call.elements):
            if isinstance(element, Tensor) and (
                element.is_floating_point() or element.is_complex()
            ):
                call.positions.append(i)
                has_other_history = (
                    element.requires_grad
                    or any(element is other for other in inputs)
                    or sum(element is other for other in call.elements) > 1
                    or (element._is_view() and _shares_base(element))
                )
                # Views of others' memory: torch refuses to change them in place.
                with torch.no_grad():
                    outputs.append(
                        element.view_as(element) if has_other_history else element.detach()
                    )
        ctx.call, ctx.size = call, len(call.elements)
        ctx.pending = PendingRegion()
        ctx.save_for_backward(*inputs)
        # Apart from the inputs: a hook such as save_on_cpu would copy parameters for nothing.
        ctx.parameters = [(t, t._version) for t in parameters]
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        _check_parameters(ctx.parameters)
        parameters = [tensor for tensor, _ in ctx.parameters]
        results: list[Tensor | None] = [None] * (len(inputs) + len(parameters))
        if all(grad is None for grad in grads):
            return (None, *results)
        arguments = [_as_type(t.detach(), type(t)).requires_grad_(t.requires_grad) for t in inputs]
        mark = unlisted.sequence_number()
        changed = ctx.outside.find_changed([ctx.call.function])
        observe = bool(changed) or ctx.pending.any_stepped()
        observer = ReadObserver(changed, ctx.pending) if observe else None
        with (
            ctx.surroundings.restored(),
            tape_scope(ctx.tape, replaying=True),
            observer or contextlib.nullcontext(),
        ):
            elements = ctx.call.run(arguments)
        if observer is not None and observer.reads:
            from ..checkpointing.errors import CheckpointError  # imports this module

            raise CheckpointError(mutation_message(observer.reads))
        roots, root_grads = _roots(ctx, elements, grads)
        del elements

        tensors = [*arguments, *parameters]
        wanted: dict[Tensor, int] = {}  # a tensor listed twice gets its gradient once
        for i, tensor in enumerate(tensors):
            if ctx.needs_input_grad[i + 1]:
                wanted.setdefault(tensor, i)
        if roots and wanted:
            unlisted.check_not_computed_from_listed(parameters)
            if threading.get_ident() == ctx.call.thread:
                unlisted.look(roots, tensors, mark, ctx.call.site)
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
        raise RuntimeError(
            "CheckpointFunction does not support double backward: its gradients have no graph. Use "
            "memsave_ext.checkpoint or torch.utils.checkpoint.checkpoint(use_reentrant=False)."
        )


def _roots(
    ctx: Any, elements: list[Any], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    again = "The function must do the same each time it is called."
    if len(elements) != ctx.size:
        raise RuntimeError(
            f"CheckpointFunction: the recompute returned {len(elements)} outputs, the forward "
            f"{ctx.size}. {again}"
        )
    roots: list[Tensor] = []
    root_grads: list[Tensor] = []
    for i, grad in zip(ctx.call.positions, grads, strict=True):
        if grad is None:
            continue
        output = elements[i]
        if not isinstance(output, Tensor):
            raise RuntimeError(
                f"CheckpointFunction: output {i} of the recompute is not a tensor, in the forward "
                f"it was. {again}"
            )
        if output.shape != grad.shape:
            raise RuntimeError(
                f"CheckpointFunction: output {i} of the recompute has shape {list(output.shape)}, "
                f"in the forward it had {list(grad.shape)}. {again}"
            )
        if output.requires_grad:
            roots.append(output)
            root_grads.append(grad)
    return roots, root_grads


def _check_outputs(elements: list[Any]) -> None:
    for i, element in enumerate(elements):
        if _holds_tensor(element):
            raise TypeError(
                f"CheckpointFunction.apply: output {i} is a {type(element).__name__} that holds "
                "tensors, which would get no gradient. Return a tensor or a flat tuple of tensors, "
                "or use memsave_ext.checkpoint."
            )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return False
    return any(isinstance(item, Tensor) or _holds_tensor(item) for item in value)


def _check_parameters(parameters: list[tuple[Tensor, int]]) -> None:
    for i, (tensor, version) in enumerate(parameters):
        if tensor._version != version:
            raise RuntimeError(
                f"CheckpointFunction: parameter {i} (shape {list(tensor.shape)}, dtype "
                f"{str(tensor.dtype).removeprefix('torch.')}) has been modified by an inplace "
                f"operation: it is at version {tensor._version}, the forward used version "
                f"{version}. A recompute would differentiate another function; change parameters "
                "after backward."
            )


def _as_type(alias: Tensor, kind: type[Tensor]) -> Tensor:
    """An alias of a tensor of a subclass, which it is not by itself. A Parameter's is a Tensor."""
    if type(alias) is kind or issubclass(kind, torch.nn.Parameter):
        return alias
    return alias.as_subclass(kind)


def _references_to_base(view: Tensor) -> int:
    base = view._base
    assert base is not None
    uses: int = base._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(base) + uses


@functools.cache
def _references_of_nobody() -> int:
    """To the base of a view that nobody else keeps: torch's own, which differ between versions."""
    return _references_to_base(torch.ones(2)[1:])


def _shares_base(view: Tensor) -> bool:
    """Whether anybody but this view keeps what it is a view of."""
    return _references_to_base(view) > _references_of_nobody()


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
