"""Plans a module's step before its first one: its forward and a backward run on fake tensors, in a
child process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import DataParallel, functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .. import _parts
from ..adam import stepper
from ..adam.native import Native
from ..adam.place import Place
from ..adam.states import make_state
from ..dry_run.child import ChildError, in_child
from ..dry_run.world import follow_libraries, on_fakes
from ..fakes.mode import fake_of, loss_in
from ..fakes.repeats import Learned, learn
from ..fakes.storages import Storages
from ..fakes.values import values_elsewhere
from ..shared.budgets import Budget
from ..shared.dtensor import is_dtensor
from .budget import LivedBefore
from .functions import tell
from .recorder import make_recorder

SECONDS = 10.0  # that a run may take, and for each parameter
_SECONDS_PER_PARAMETER = 0.05
_MOST_SHAPES = 2048  # of a module's arguments, until forgotten ones are left out
Forward = Callable[..., Any]  # of a module, which is its first argument


class Ahead:
    """The steps of a module that were planned before they ran, by the shapes of its arguments."""

    def __init__(self) -> None:
        # By a hash of what tells shapes apart: the hash by which the native part knows the step, or
        # why it cannot be planned.
        self._steps: dict[int, int | str] = {}

    def plan(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        forward: Forward,
        pure: tuple[type[Function], ...],
        seconds: float,
        model: int,
        reported: nn.Module | None,
    ) -> str | None:
        """Plans a step with such arguments, unless one is known. Returns why it cannot.

        ``pure``: Functions that are declared to be. ``seconds``: how long it may run, besides what
        its parameters take. ``model``: whose step it is; see :func:`.budget.number_of`.
        ``reported``: the model whose modules reports tell apart.
        """
        native: Any = _parts.native("remat")
        signature = _signature(module, args, kwargs, device)
        with _planning:
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
                with tell(pure) or nullcontext():
                    known = _run(module, args, kwargs, device, forward, seconds, model, reported)
                self._steps[signature] = known
        return known if isinstance(known, str) else None


_of_modules: WeakKeyDictionary[nn.Module, Ahead] = WeakKeyDictionary()
_planning: Any = threading.Lock()  # replicas of a module, which run in threads, wait for one plan
# A process that was forked while a thread planned does not have that thread.
os.register_at_fork(after_in_child=_planning._at_fork_reinit)


def ahead_of(module: nn.Module) -> Ahead:
    found = _of_modules.get(module)
    return _of_modules.setdefault(module, Ahead()) if found is None else found


def _signature(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> int:
    """Returns a hash of what tells steps apart without running them. Numbers and texts among the
    arguments do not: where one changes the step, what is recorded of it tells."""
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else None
    return hash((module.training, dtype, _described(args), _described(kwargs)))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        layout, is_nested = value.layout, value.is_nested
        strides = value.stride() if layout is torch.strided and not is_nested else None
        shape = None if is_nested else tuple(value.shape)
        return shape, strides, value.dtype, layout, value.requires_grad
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_described, value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (dict, Mapping)):  # nearly all are dictionaries: the other asks in Python
        return type(value), tuple([(str(key), _described(item)) for key, item in value.items()])
    leaves = tree_leaves(value)  # of a class that pytrees know
    is_leaf = len(leaves) == 1 and leaves[0] is value
    return type(value) if is_leaf else (type(value), tuple(map(_described, leaves)))


def _obstacle(native: Any, module: nn.Module, device: torch.device) -> str | None:
    """Returns why a module cannot run on fake tensors, as far as that is known before."""
    if device.type not in ("cpu", "cuda"):
        return f"steps on {device.type} cannot be planned before they have run"
    if isinstance(module, torch.jit.ScriptModule):
        return "the model is scripted"
    if any(isinstance(part, (DataParallel, DistributedDataParallel)) for part in module.modules()):
        return "a part of the model is wrapped in DataParallel or DistributedDataParallel"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return (
            "it runs under a dispatch or function mode of torch, which would see the fake tensors"
        )
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None or not native.remat_may_run_ahead():
        return "saved-tensor hooks are in place, which would see the fake tensors"
    return None


def _run(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    forward: Forward,
    seconds: float,
    model: int,
    reported: nn.Module | None,
) -> int | str:
    """Runs a step on fake tensors, and lets the native part plan it.

    Returns its hash, or a clause that says why it could not run.
    """
    native: Any = _parts.native("remat")
    reason = _obstacle(native, module, device)
    if reason is not None:
        return reason
    # In a child it would take long to import what runs collectives.
    name = "memsave_ext.fakes.collectives"
    collectives = import_module(name) if any(map(is_dtensor, module.parameters())) else None
    values = values_elsewhere((args, kwargs))

    def run() -> tuple[bytes | None, Learned]:
        return _step_on_fakes(module, args, kwargs, device, forward, values, collectives, reported)

    try:
        parameters = sum(1 for _ in module.parameters())
        step, learned = in_child(run, seconds + _SECONDS_PER_PARAMETER * parameters)
    except ChildError as error:
        return str(error)
    except Exception as error:  # the model's own code may raise anything on fake tensors
        return f"it cannot run on fake tensors: {type(error).__name__}: {error}"
    learn(learned)
    return (
        "on fake tensors it saved nothing for backward"
        if step is None
        else int(native.remat_expect(device, step, model))
    )


def _step_on_fakes(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    forward: Forward,
    values: list[tuple[Tensor, Any]],
    collectives: Any,
    reported: nn.Module | None,
) -> tuple[bytes | None, Learned]:
    """In a child: runs a step that keeps everything, as a block records it, and returns what the
    native part knows of it then, and what was learned of operators."""
    native: Any = _parts.native("remat")
    fakes = native.RematFakes(fake_of, lambda _: None, False)
    storages = Storages(
        fakes.allocated,
        fakes.freed,
        lambda seconds, _: fakes.ran(seconds),
        torch.device(device.type),
    )
    if collectives is not None:
        collectives.stay()
        storages.collective = collectives.run
    owners = [(p, stepper.owner(p)) for p in module.parameters() if p.requires_grad]
    with on_fakes(storages, device):
        follow_libraries(storages)
        for tensor, value in values:
            storages.note_value(tensor, value)
        for param, owner in owners:
            if owner is not None and param.grad is None:
                _step_in_backward(param, owner, device)
        fakes.enter()
        recorder = make_recorder(False, Budget(2**62, 2**62), False, torch.device("cpu"))
        if reported is not None:
            recorder.tell_modules(reported)
        with ExitStack() as stack:
            stack.callback(recorder.undo_open)
            recorder.open()
            LivedBefore(recorder, module, None).install()  # type: ignore[arg-type]
            output = forward(module, *args, **kwargs)
        fsdp_state = getattr(module, "_get_fsdp_state", None)
        if fsdp_state is not None:  # FSDP2's hook frees there what was gathered last
            output = fsdp_state()._post_forward(module, args, output)
        _backward_of(output)
        del output
    return fakes.take_step(), storages.repeats.learned()


def _step_in_backward(param: Tensor, owner: Any, device: torch.device) -> None:
    """Lets a fake parameter's gradient go in backward, for a state if there is none yet, or to
    where gradients lie."""
    intake = owner._stepper.intake()
    if intake in ("keep", "sum"):
        return
    group = next(g for g in owner.param_groups if any(p is param for p in g["params"]))
    place: Place = group.get("states_on") or Place()
    steps = intake != "drop" and owner.in_backward
    makes_state = steps and not owner.state.get(param)
    states: list[dict[str, Any]] = []

    def step(param: Tensor) -> None:
        if makes_state and not states:
            made = _first_state(param, group, owner)  # in memory while the parameter is stepped
            states.append({n: s for n, s in made.items() if not _lies_on(place, n, s, device)})
        param.grad = None

    param.register_post_accumulate_grad_hook(step)


def _first_state(param: Tensor, group: dict[str, Any], owner: Any) -> dict[str, Any]:
    if isinstance(owner, Native):
        return make_state(param, group)
    with suppress(Exception):  # others may look at values, of which there are none
        state: dict[str, Any] = owner._first_step_of(param, group)
        return state
    return {}


def _lies_on(place: Place, name: str, state: Any, device: torch.device) -> bool:
    return isinstance(state, Tensor) and place.holds(name, state, device)


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
        spare = [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in tensors]
        loss = torch.stack(losses).sum() if losses else None
    if loss is not None and loss.requires_grad:
        loss.backward()
    del spare


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _loss(result: Tensor) -> Tensor:
    if result.is_complex():
        return result.sum().abs().float()
    if result.dim() < 2:
        return result.float().square().mean()
    rows = result.flatten(0, -2).float()
    return functional.cross_entropy(
        rows, torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    )
