"""Hooks that tell a tracker what a training step is doing and what its memory belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .account import CATEGORIES
from .tensors import plain_tensors

PARAMETERS, GRADIENTS, OPTIMIZER = (CATEGORIES.index(c) for c in CATEGORIES[:3])


class Told(Protocol):
    """The methods of a tracker that hooks call."""

    def enter_module(self, module: int) -> None: ...
    def exit_module(self, module: int) -> None: ...
    def inside_module(self) -> bool: ...
    def begin_optimizer(self) -> None: ...
    def end_optimizer(self, step: bool) -> None: ...
    def end_step(self) -> None: ...
    def label(self, tensors: list[Tensor], category: int, names: list[int]) -> None: ...


class Modules:
    """Numbers a model's modules; the model itself is number 0.

    ``modules``, ``names`` and ``parents`` are indexed by that number. A parent is the number of the
    module that holds it, -1 for the model. All three are empty without a model.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.parents: list[int] = []
        numbers: dict[str, int] = {}
        for name, module in model.named_modules() if model is not None else ():
            parent = name
            while parent and (parent == name or parent not in numbers):
                parent = parent.rpartition(".")[0]
            self.parents.append(numbers[parent] if name else -1)
            numbers[name] = len(self.names)
            self.names.append(name or type(module).__name__)
            self.modules.append(module)


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


class Hooks:
    """The hooks of one tracker on a model and its optimizers.

    A training step ends with the step of the last of ``optimizers`` or, without optimizers, where
    the next forward of ``model`` begins.
    """

    def __init__(
        self,
        tracker: Told,
        model: nn.Module | None,
        modules: Modules,
        optimizers: Sequence[Optimizer],
        names: Names,
    ) -> None:
        self._tracker = tracker
        self._model = model
        self._modules = modules
        self._optimizers = optimizers
        self._names = names
        self._params = dict(_named_parameters(model, optimizers))
        self._numbers = {p: names.number(name) for p, name in self._params.items()}
        self._forwards = 0

    def label(self) -> None:
        """Labels all parameters, buffers, gradients and optimizer states that there are now."""
        buffers = self._model.named_buffers() if self._model is not None else ()
        owners = [(p, self._numbers[p]) for p in self._params]
        owners += [(b, self._names.number(name)) for name, b in buffers]
        self._label(PARAMETERS, owners)
        self._label_gradients(self._params)
        for optimizer in self._optimizers:
            self._label_states(optimizer)

    def install(self) -> ExitStack:
        """Registers all hooks, or none if it raises; closing what is returned removes them."""
        with ExitStack() as stack:
            for number, module in enumerate(self._modules.modules):
                if not isinstance(module, torch.jit.ScriptModule):
                    self._watch_module(stack, number, module)
            for p, number in self._numbers.items():
                if p.requires_grad and p.is_leaf:
                    hook = p.register_post_accumulate_grad_hook(self._gradient_hook(number))
                    stack.callback(hook.remove)
            for optimizer in self._optimizers:
                self._watch_optimizer(stack, optimizer, optimizer is self._optimizers[-1])
            return stack.pop_all()

    def _watch_module(self, stack: ExitStack, number: int, module: nn.Module) -> None:
        enter, leave = self._tracker.enter_module, self._tracker.exit_module

        def before(_module: nn.Module, _args: Any) -> None:
            enter(number)

        def before_root(_module: nn.Module, _args: Any) -> None:
            if not self._tracker.inside_module() and torch._C._current_graph_task_id() == -1:
                if self._forwards and not self._optimizers:
                    self._tracker.end_step()
                self._forwards += 1
            enter(number)

        def after(_module: nn.Module, _args: Any, _result: Any) -> None:
            leave(number)

        first = before_root if module is self._model else before
        stack.callback(module.register_forward_pre_hook(first, prepend=True).remove)
        # always_call: also if the forward raises.
        stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _gradient_hook(self, number: int) -> Callable[[Tensor], None]:
        label = self._tracker.label

        def hook(param: Tensor) -> None:
            grad = param.grad
            if grad is not None:
                tensors = plain_tensors(grad)
                label(tensors, GRADIENTS, [number] * len(tensors))

        # A gradient that exists in parts alone may go without it (csrc/adam/hook.h).
        hook._memsave_ext_watches = True  # type: ignore[attr-defined]
        return hook

    def _watch_optimizer(self, stack: ExitStack, optimizer: Optimizer, last: bool) -> None:
        def before(*_: Any) -> None:
            self._label_gradients(self._params)
            self._tracker.begin_optimizer()

        def after(*_: Any) -> None:
            self._label_states(optimizer)
            self._tracker.end_optimizer(last)

        stack.callback(optimizer.register_step_pre_hook(before).remove)
        stack.callback(optimizer.register_step_post_hook(after).remove)

    def _label_gradients(self, params: Iterable[Tensor]) -> None:
        self._label(GRADIENTS, [(p.grad, self._numbers[p]) for p in params if p.grad is not None])

    def _label_states(self, optimizer: Optimizer) -> None:
        number, texts = self._names.number, self._names.texts
        self._label(
            OPTIMIZER,
            [
                (value, number(f"{texts[self._numbers[p]]} {key}" if p in self._numbers else key))
                for p, state in optimizer.state.items()
                for key, value in (state.items() if isinstance(state, dict) else ())
            ],
        )

    def _label(self, category: int, owners: Iterable[tuple[Any, int]]) -> None:
        tensors, names = [], []
        for value, name in owners:
            for tensor in plain_tensors(value):
                tensors.append(tensor)
                names.append(name)
        self._tracker.label(tensors, category, names)


def _named_parameters(
    model: nn.Module | None, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[Tensor, str]]:
    named: dict[Tensor, str] = {}
    for name, p in model.named_parameters() if model is not None else ():
        named[p] = name
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                named.setdefault(p, f"param_groups[{g}][{i}]")
    yield from named.items()
