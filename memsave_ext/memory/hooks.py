"""Hooks that tell a tracker what a training step is doing and what its memory belongs to."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adam.elsewhere import buffers_of
from ..elsewhere.gradients import nbytes_elsewhere
from ..shared.modules import Modules, not_compiled
from ..shared.tensors import dense_parts, plain_tensors
from ..store.kept import SMALLEST
from ..store.mapped import in_memory, is_mapped, nbytes_mapped
from .events import CATEGORIES, GRADIENTS, OPTIMIZER_STATES, PARAMETERS
from .tracker import Tracker

# Tensors by their id, each with the number of its name.
Numbered: TypeAlias = dict[int, tuple[Tensor, int]]


class Names:
    """Numbers texts; ``texts`` is indexed by the number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


def with_step_hooks(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer whose ``step()`` runs hooks: of a wrapper that is no optimizer but by
    name, as some Lookaheads, the one inside."""
    while "_optimizer_step_pre_hooks" not in optimizer.__dict__:
        inside = (v for v in optimizer.__dict__.values() if isinstance(v, Optimizer))
        if (found := next(inside, None)) is None:
            break
        optimizer = found
    return optimizer


# What torch has around the step() of each class of optimizers, where it calls the hooks.
_AROUND_STEP = Optimizer.profile_hook_step(with_step_hooks).__code__


def in_inner_step(optimizer: Optimizer) -> bool:
    """Whether a step hook is called for the ``step()`` of a base class, which that of the
    optimizer's class calls: torch calls the hooks for both."""
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _AROUND_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


class Hooks:
    """The hooks of one tracker on a model and its optimizers, neither of which it keeps alive.

    A training step ends with the step of the last of ``optimizers`` or, without optimizers, where
    the next forward of ``model`` begins.

    Attributes:
        elsewhere: by category, the most bytes that lay elsewhere when it was looked: parameters and
            gradients before each step of an optimizer, its states after it.
    """

    def __init__(
        self,
        tracker: Tracker,
        model: nn.Module | None,
        modules: Modules,
        optimizers: Sequence[Optimizer],
        names: Names,
    ) -> None:
        self._tracker = tracker
        self._modules = modules
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._names = names
        found = _owned(model, "_parameters"), _owned(model, "_buffers")
        self._parameters, self._buffers = (
            [(weakref.ref(module), key, names.number(name)) for module, key, name in owned]
            for owned in found
        )
        self.elsewhere: dict[str, int] = {}
        self._forwards = 0
        self._calls = threading.local()  # its `numbers`: of the modules that run, outermost first

    def label(self) -> None:
        """Labels all parameters, buffers, gradients and optimizer states that there are now."""
        params = self._label_parameters()
        self._label_gradients(params)
        self._look_elsewhere(params)
        for optimizer in self._present_optimizers():
            self._label_states(optimizer, params)
        self._look_at_states()

    def install(self) -> ExitStack:
        """Registers all hooks, or none if it raises; closing what is returned removes them."""
        with ExitStack() as stack:
            self._modules.watch(stack, self._begin_call, self._end_call)
            for p, number in self._numbered_parameters().values():
                if p.requires_grad and p.is_leaf:
                    hook = p.register_post_accumulate_grad_hook(self._gradient_hook(number))
                    stack.callback(hook.remove)
            optimizers = self._present_optimizers()
            for optimizer in optimizers:
                self._watch_optimizer(stack, optimizer, optimizer is optimizers[-1])
            return stack.pop_all()

    @not_compiled
    def _begin_call(self, number: int) -> None:
        calls = self._calls.__dict__.setdefault("numbers", [])
        if not calls:
            self._begin_forward(number)
        calls.append(number)
        self._tracker.enter_module(number)

    @not_compiled
    def _end_call(self) -> None:
        self._tracker.exit_module(self._calls.numbers.pop())

    def _begin_forward(self, number: int) -> None:
        """``number``: the outermost module, which is not necessarily the model."""
        self._tracker.look()
        if number == 0 and torch._C._current_graph_task_id() == -1:
            if self._forwards and not self._optimizers:
                self._label_parameters()
                self._tracker.end_step()
            self._forwards += 1

    def _gradient_hook(self, number: int) -> Callable[[Tensor], None]:
        label = self._tracker.label

        @not_compiled
        def hook(param: Tensor) -> None:
            if param.grad is not None:
                tensors = _parts(_values(param.grad))
                label(tensors, GRADIENTS, [number] * len(tensors))

        # A gradient that exists in parts alone may go without it (csrc/adam/hook.h).
        hook._memsave_ext_watches = True  # type: ignore[attr-defined]
        return hook

    def _watch_optimizer(self, stack: ExitStack, optimizer: Optimizer, last: bool) -> None:
        @not_compiled
        def before(stepped: Optimizer, arguments: Any, names: Any) -> Any:
            if in_inner_step(stepped):
                return None
            params = self._label_parameters()  # which a step may have replaced
            self._label_gradients(params)
            self._look_elsewhere(params)
            self._tracker.begin_optimizer()
            # torch takes what is returned in place of the arguments of step().
            return self._with_closures([*arguments], {**names})

        hooked = with_step_hooks(optimizer)
        watched = weakref.ref(optimizer)

        @not_compiled
        def after(stepped: Optimizer, *_: Any) -> None:
            if in_inner_step(stepped):
                return
            params = self._numbered_parameters()
            self._label_states(stepped, params)
            wrapper = watched()
            if wrapper is not None and wrapper is not stepped:
                self._label_states(wrapper, params)
            self._look_at_states()
            self._tracker.end_optimizer(last)

        stack.callback(hooked.register_step_pre_hook(before).remove)
        stack.callback(hooked.register_step_post_hook(after).remove)

    def _with_closures(self, arguments: list[Any], names: dict[str, Any]) -> Any:
        """Returns arguments of ``step()`` whose closure ends the step where it raises, as no hook
        is called then; None where there is no closure."""

        def watched(closure: Callable[[], Any]) -> Callable[[], Any]:
            @functools.wraps(closure)
            def run() -> Any:
                try:
                    return closure()
                except BaseException:
                    self._tracker.end_optimizer(False)
                    raise

            return run

        if len(arguments) > 1 and callable(arguments[1]):  # behind the optimizer
            arguments[1] = watched(arguments[1])
        elif callable(names.get("closure")):
            names["closure"] = watched(names["closure"])
        else:
            return None
        return tuple(arguments), names

    def _present_optimizers(self) -> list[Optimizer]:
        found = (optimizer() for optimizer in self._optimizers)
        return [optimizer for optimizer in found if optimizer is not None]

    def _numbered_parameters(self) -> Numbered:
        """The present parameters of the model and the optimizers.

        They are looked up, as weak references to them would forbid ``torch.utils.swap_tensors``.
        """
        params = _present(self._parameters, "_parameters")
        for optimizer in self._present_optimizers():
            for g, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    if id(p) not in params:
                        params[id(p)] = p, self._names.number(f"param_groups[{g}][{i}]")
        return params

    def _label_parameters(self) -> Numbered:
        """Labels parameters and buffers, and returns the parameters."""
        params = self._numbered_parameters()
        buffers = _present(self._buffers, "_buffers")
        self._label(PARAMETERS, [*params.values(), *buffers.values()])
        return params

    def _label_gradients(self, params: Numbered) -> None:
        self._label(GRADIENTS, _gradients(params))

    def _label_states(self, optimizer: Optimizer, params: Numbered) -> None:
        names = {key: self._names.texts[number] + " " for key, (_, number) in params.items()}
        self._label(
            OPTIMIZER_STATES,
            [
                (value, self._names.number(f"{names.get(id(p), '')}{key}"))
                for p, state in optimizer.state.items()
                for key, value in (state.items() if isinstance(state, dict) else ())
            ],
        )
        number = self._names.number("buffer of states_on")
        buffers = [(buffer, number) for buffer in buffers_of(optimizer)]
        self._label(OPTIMIZER_STATES, buffers)

    def _look_elsewhere(self, params: Numbered) -> None:
        self._note_elsewhere(PARAMETERS, nbytes_mapped(param for param, _ in params.values()))
        grads = (grad for grad, _ in _gradients(params))
        self._note_elsewhere(GRADIENTS, nbytes_elsewhere(grads))

    def _look_at_states(self) -> None:
        """Of all optimizers together, each tensor once: one may wrap another."""
        found = {
            id(tensor): (tensor, param)
            for optimizer in self._present_optimizers()
            for each in (optimizer, with_step_hooks(optimizer))
            for param, state in each.state.items()
            for tensor in plain_tensors(state)
        }
        nbytes = sum(t.nbytes for t, param in found.values() if _is_elsewhere(t, param))
        self._note_elsewhere(OPTIMIZER_STATES, nbytes)

    def _note_elsewhere(self, category: int, nbytes: int) -> None:
        if nbytes > self.elsewhere.get(CATEGORIES[category], 0):
            self.elsewhere[CATEGORIES[category]] = nbytes

    def _label(self, category: int, owners: Iterable[tuple[Any, int]]) -> None:
        tensors, names = [], []
        for value, name in owners:
            here = in_memory(_parts(value))
            tensors += here
            names += [name] * len(here)
        self._tracker.label(tensors, category, names)


def _parts(value: Any) -> list[Tensor]:
    """Returns the tensors with memory of their own in a value, of sparse ones what they are of."""
    return [part for tensor in plain_tensors(value) for part in dense_parts(tensor)]


def _gradients(params: Numbered) -> list[tuple[Tensor, int]]:
    """Returns what is in ``.grad`` now, with its parameter's number."""
    leaves = ((p, number) for p, number in params.values() if p.is_leaf or p.retains_grad)
    return [(_values(p.grad), number) for p, number in leaves if p.grad is not None]


def _values(grad: Tensor) -> Tensor:
    """Returns a gradient, of a sparse one the values: the indices may be the batch's."""
    return grad._values() if grad.layout == torch.sparse_coo else grad


def _is_elsewhere(state: Tensor, param: Any) -> bool:
    """Whether it lies in a file or, of a parameter on CUDA, in the host's memory. Optimizers have
    states under other keys than parameters, too."""
    if is_mapped(state):
        return True
    is_far = isinstance(param, Tensor) and state.device.type != param.device.type
    return is_far and state.nbytes >= SMALLEST


def _owned(model: nn.Module | None, kind: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Yields each module of the model that owns tensors of a kind, its key and its full name."""
    for prefix, module in model.named_modules() if model is not None else ():
        for key in getattr(module, kind).keys():  # noqa: SIM118, a ScriptModule's is no dict
            yield module, key, f"{prefix}.{key}" if prefix else key


def _present(owned: Sequence[tuple[weakref.ref[nn.Module], str, int]], kind: str) -> Numbered:
    """Returns what the modules own now."""
    found: Numbered = {}
    for module, key, number in owned:
        tensors: Mapping[str, Tensor | None] = getattr(module(), kind, {})
        tensor = tensors[key] if key in tensors else None  # noqa: SIM401, as above
        if tensor is not None:
            found.setdefault(id(tensor), (tensor, number))
    return found
