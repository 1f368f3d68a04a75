"""Plans a module's step before its first one: its forward and a backward run on fake tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import DataParallel, functional
from torch.nn.modules.module import _WrappedHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves

from .. import _parts
from ..adam import stepper
from ..adam.dtensor import is_dtensor
from ..adam.native import Native
from ..adam.place import Place
from ..adam.states import make_state
from ..fakes.cuda import as_on_cuda
from ..fakes.mode import (
    as_before,
    fake_of,
    fakes,
    like,
    loss_in,
    only_value,
    replaced,
    transformers_as_in_steps,
    uncompiled,
)
from ..fakes.storages import Storages
from .budget import LivedBefore
from .recorder import Budget, make_recorder

_MOST_SHAPES = 2048  # of a module's arguments, until forgotten ones are left out
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "_forward_hooks_always_called",
)
_LIBRARIES = ("torch", "transformers")  # their hooks take part in what a model computes
Forward = Callable[..., Any]  # of a module, which is its first argument


class Ahead:
    """The steps of a module that were planned before they ran, by the shapes of its arguments."""

    def __init__(self) -> None:
        # The hash by which the native part knows the step, or why it cannot be planned.
        self._steps: dict[Any, int | str] = {}
        self._lock = threading.Lock()  # replicas of the module run in threads

    def plan(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        forward: Forward,
    ) -> str | None:
        """Plans a step with such arguments, unless one is known. Returns why it cannot."""
        native: Any = _parts.native("remat")
        signature = _signature(module, args, kwargs, device)
        with self._lock:
            known = self._steps.get(signature)
            # The native part forgets some for others.
            if known is None or (isinstance(known, int) and not native.remat_knows(device, known)):
                if len(self._steps) >= _MOST_SHAPES:
                    steps = self._steps.items()
                    self._steps = {
                        shape: step
                        for shape, step in steps
                        if isinstance(step, int) and native.remat_knows(device, step)
                    }
                known = self._steps[signature] = _run(module, args, kwargs, device, forward)
        return known if isinstance(known, str) else None


_of_modules: WeakKeyDictionary[nn.Module, Ahead] = WeakKeyDictionary()


def ahead_of(module: nn.Module) -> Ahead:
    return _of_modules.setdefault(module, Ahead())


def _signature(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """Returns what tells steps apart without running them; equal ones may differ in the values."""
    leaves, structure = tree_flatten((args, kwargs))
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else None
    return (module.training, dtype, structure, *map(_described, leaves))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, (int, float, str, type(None))) else type(leaf)


def _obstacle(native: Any, module: nn.Module, device: torch.device) -> str | None:
    """Returns why a module cannot run on fake tensors, as far as that is known before."""
    if device.type not in ("cpu", "cuda"):
        return f"steps on {device.type} are not planned ahead"
    if any(isinstance(part, (DataParallel, DistributedDataParallel)) for part in module.modules()):
        return "a part of the model is wrapped for several processes or replicas"
    if any(is_dtensor(p) for p in module.parameters()):
        return "parameters are sharded, and only their processes know what is gathered"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "it runs under a mode of torch, which would see the fake tensors"
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None or not native.remat_may_run_ahead():
        return "hooks on saved tensors are in place, which would see the fake tensors"
    return None


def _run(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    forward: Forward,
) -> int | str:
    """Runs a step of a copy of the module on fake tensors, and lets the native part plan it.

    Returns its hash, or a clause that says why it could not run.
    """
    native: Any = _parts.native("remat")
    reason = _obstacle(native, module, device)
    if reason is not None:
        return reason
    told = native.RematFakes(fake_of, lambda _: None, False)
    storages = Storages(told.allocated, told.freed, told.ran, torch.device(device.type))
    try:
        values = _values((args, kwargs))
        with ExitStack() as stack:
            stack.enter_context(as_before())
            if device.type == "cuda":
                stack.enter_context(as_on_cuda())
            stack.enter_context(fakes())
            stack.enter_context(storages)
            stack.enter_context(uncompiled())
            stack.enter_context(transformers_as_in_steps(storages.has_known_values))
            copied, fake_args, fake_kwargs = _copied(module, args, kwargs, values, storages)
            told.enter()
            stack.callback(told.leave)
            _step(copied, forward, fake_args, fake_kwargs)
            del copied, fake_args, fake_kwargs
        hash_of_operators: int | None = told.expect(device)
    except Exception as error:  # the model's own code may raise anything on fake tensors
        return f"it cannot run on fake tensors: {type(error).__name__}: {error}"
    return "it has saved nothing" if hash_of_operators is None else hash_of_operators


def _step(
    module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Runs a step that keeps everything, as a block records it."""
    recorder = make_recorder(False, Budget(2**62, 0.0, False), torch.device("cpu"))
    with ExitStack() as stack:
        stack.callback(recorder.undo_open)
        recorder.open()
        LivedBefore(recorder, module, None).install(stack)  # type: ignore[arg-type]
        output = forward(module, *args, **kwargs)
    _backward_of(output)


def _copied(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: dict[int, Any],
    storages: Storages,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns a copy with fake tensors, which share memory where those of the module do.

    What its forward writes into the module or its arguments stays in the copy. Only the hooks of
    libraries come along: a user's may write elsewhere. ``values`` are those of :func:`_values`.
    """
    thread, deepcopy = threading.get_ident(), Tensor.__deepcopy__
    memory: dict[int, torch.UntypedStorage] = {}
    fakes: dict[int, Tensor] = {}

    def copied(self: Tensor, memo: dict[int, Any]) -> Any:
        if threading.get_ident() != thread or isinstance(self, FakeTensor):
            return deepcopy(self, memo)
        if id(self) not in fakes:
            made = fakes[id(self)] = _fake_like(self, memory)
            if id(self) in values:
                storages.note_value(made, values[id(self)])
        return fakes[id(self)]

    with replaced(Tensor, "__deepcopy__", copied), replaced(nn.Parameter, "__deepcopy__", copied):
        made, args, kwargs = copy.deepcopy((module, args, kwargs))
    for part in made.modules():
        for name in _HOOKS:
            hooks = getattr(part, name)
            for key in [key for key, hook in hooks.items() if not _is_of_library(hook)]:
                del hooks[key]
    for param in module.parameters():
        fake = fakes[id(param)]
        if param.grad is not None:
            fake.grad = like(param.grad)
        elif param.requires_grad and (owner := stepper.owner(param)) is not None:
            _step_in_backward(fake, param, owner)
    return made, args, kwargs


def _fake_like(tensor: Tensor, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    """``memory`` has what stands for storages that were seen before, by their ids."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return like(tensor)
    storage = tensor.untyped_storage()
    if storage._cdata not in memory:
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        memory[storage._cdata] = made.untyped_storage()
    geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return made.set_(memory[storage._cdata], *geometry).requires_grad_(tensor.requires_grad)


def _is_of_library(hook: Any) -> bool:
    function = hook.hook if isinstance(hook, _WrappedHook) else hook
    origin = getattr(function, "__module__", None) or type(function).__module__
    return origin.partition(".")[0] in _LIBRARIES


def _values(arguments: Any) -> dict[int, Any]:
    """Returns the value of each tensor of whole numbers whose elements all have the same, by its
    id: a model may leave out a mask that hides nothing."""
    tensors = (t for t in tree_leaves(arguments) if isinstance(t, Tensor))
    return {id(t): value for t in tensors if (value := only_value(t)) is not None}


def _step_in_backward(fake: Tensor, param: Tensor, owner: Any) -> None:
    """Lets a fake parameter's gradient go in backward, for a state if there is none yet."""
    intake = owner._stepper.intake()
    if intake in ("keep", "sum"):
        return
    group = next(g for g in owner.param_groups if any(p is param for p in g["params"]))
    place: Place = group.get("states_on") or Place()
    makes_state = intake != "drop" and not owner.state.get(param)
    states: list[dict[str, Any]] = []

    def step(fake: Tensor) -> None:
        if makes_state and not states:
            made = _first_state(fake, group, owner)  # in memory while the parameter is stepped
            states.append({n: s for n, s in made.items() if not _lies_on(place, n, s, param)})
        fake.grad = None

    fake.register_post_accumulate_grad_hook(step)


def _first_state(fake: Tensor, group: dict[str, Any], owner: Any) -> dict[str, Any]:
    if isinstance(owner, Native):
        return make_state(fake, group)
    with suppress(Exception):  # others may look at values, of which there are none
        state: dict[str, Any] = owner._first_step_of(fake, group)
        return state
    return {}


def _lies_on(place: Place, name: str, state: Any, param: Tensor) -> bool:
    return isinstance(state, Tensor) and place.holds(name, state, param.device)


def _backward_of(output: Any) -> None:
    """Runs the backward of what a module has returned, from its loss if it has one.

    Otherwise from a cross-entropy of its results in float32, with room for a copy of those: that is
    as much memory as most losses need.
    """
    spare = []
    loss = loss_in(output)
    if loss is None:
        found = output.get("logits") if isinstance(output, Mapping) else None
        tensors = [t for t in tree_leaves(output if found is None else found) if _has_gradient(t)]
        losses = [_loss(t) for t in tensors]
        spare = [torch.empty(t.shape, dtype=torch.float32) for t in tensors]
        loss = torch.stack(losses).sum() if losses else None
    if loss is not None and loss.requires_grad:
        loss.backward()
    del spare


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _loss(result: Tensor) -> Tensor:
    if result.dim() < 2 or result.is_complex():
        return result.sum().float()
    rows = result.flatten(0, -2).float()
    return functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long))
