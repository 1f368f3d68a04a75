"""What a budget is of: the device's memory, and what counts that lived before a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .. import _parts
from ..adam import stepper
from ..adam.elsewhere import buffers_of
from ..adam.owners import alive_optimizers, optimizers_of
from ..shared.budgets import Budget, read_budget
from ..shared.checks import check_bool
from ..shared.device_memory import check_counts, device_memory
from ..shared.modules import device_of, first_parameter, modules_of, parameters_of
from ..shared.tensors import bytes_held, plain_tensors
from ..store.mapped import any_mapped, in_memory
from .limit import Lived
from .recorder import Recorder

_NEEDS = {
    "optimizer": "only with a budget are the optimizer's states counted",
    "strict": "it says what happens to a step that needs more than the budget",
}
_CUDA = torch.device("cuda")  # in a prediction no device is made of this name


def bytes_of_device(who: str, budget: Budget, device: torch.device) -> int:
    """Returns the bytes that a part of a device's memory is now.

    Raises:
        RuntimeError: the device's memory is not known.
    """
    native = _parts.native("remat")
    if native is not None and native.remat_is_predicted_for_cuda():
        device = _CUDA  # where fake tensors are, their step is not
    try:
        memory = device_memory(device)
    except RuntimeError as error:
        raise RuntimeError(
            f"{who}: budget={budget.given!r} is a part of the device's memory, and {error}; pass "
            "bytes, such as '8GB'"
        ) from error
    return max(int(budget.of_device * (memory.free if budget.of_free else memory.limit)), 1)


def check_arguments(
    budget: object, optimizer: object, strict: object, retry: object
) -> Budget | None:
    """Returns the budget; raises TypeError or ValueError where one is wrong or needs another."""
    check_bool("remat: strict", strict)
    check_bool("remat: retry", retry)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if optimizers is not None and not (
        isinstance(optimizers, (list, tuple)) and all(isinstance(o, Optimizer) for o in optimizers)
    ):
        raise TypeError(
            "remat: optimizer must be a torch.optim.Optimizer, a list of them or None, got "
            f"{type(optimizer).__name__}"
        )
    if budget is None:
        for name, value in (("optimizer", optimizer), ("strict", strict or None)):
            if value is not None:
                raise ValueError(
                    f"remat: {name} needs a budget: {_NEEDS[name]}. Pass one, such as budget='8GB' "
                    f"or budget=0.5 (a share of the activations), or leave {name} out"
                )
        return None
    read = read_budget("remat", budget, shares=True)
    check_support(read)
    return read


def check_support(budget: Budget | None) -> None:
    """Raises RuntimeError where there is a budget, and nothing counts what is allocated."""
    if budget is None:
        return
    if torch.cuda.is_initialized():
        check_counts("remat: budget", torch.device("cuda"))
    if _parts.native("remat") is None:
        raise RuntimeError(
            "remat: a budget needs the native part of memsave_ext, which is not in use here "
            f"({_parts.why_not('remat')}). Without a budget, remat keeps everything there."
        )


def check_ahead(ahead: object) -> None:
    """Raises TypeError or ValueError where it is neither a bool nor a positive number."""
    if not isinstance(ahead, (bool, int, float)):
        raise TypeError(
            "remat: ahead must be a bool, or a number of seconds that planning a step on fake "
            f"tensors may take, got {type(ahead).__name__}"
        )
    if not isinstance(ahead, bool) and not ahead > 0:
        raise ValueError(
            f"remat: ahead must be a bool or a positive number of seconds, got {ahead!r}"
        )


def counted_device(model: nn.Module | None) -> torch.device:
    """Returns the device whose memory counts: the model's, or CUDA's present one if it is used.

    What is on the meta device has no memory: accelerate keeps parameters there between forwards.
    """
    if model is None and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cpu") if model is None else device_of(model)
    return torch.device("cpu") if device.type == "meta" else device


def _parameters_in(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Those of a module and all in it, which is the first of ``parts``, each once."""
    if "_former_parameters" in parts[0].__dict__:
        found = (p for part in parts for p in parameters_of(part))
        return list({id(p): p for p in found}.values())
    # Most are no replicas, and this is done in every step.
    own = (p for part in parts for p in part._parameters.values())
    return list({id(p): p for p in own if p is not None}.values())


# Of the modules that blocks have counted first, by what becomes of their gradients.
_numbers: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
_next_number = count(1)
# By the first module that a block without a model has called: what it has called besides, by id.
_called_after: WeakKeyDictionary[nn.Module, WeakValueDictionary[int, nn.Module]]
_called_after = WeakKeyDictionary()


def number_of(model: nn.Module) -> int:
    """By which the native part knows whose a step is. An optimizer that takes gradients in backward
    makes other steps of a model than one that does not."""
    param = first_parameter(model)
    owner = None if param is None else stepper.owner(param)
    becomes = "keep" if owner is None else owner._stepper.intake()
    if (numbers := _numbers.get(model)) is None:
        numbers = _numbers[model] = {}
    if (number := numbers.get(becomes)) is None:
        number = numbers[becomes] = next(_next_number)
    return number


class LivedBefore:
    """Counts the parameters, buffers, gradients and states of the modules that a block calls.

    Plans are chosen when the block has called the first. So what such blocks have called after it
    before is counted then, too.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module | None,
        optimizer: Optimizer | Iterable[Optimizer] | None,
    ) -> None:
        self._recorder = recorder
        self._model = model
        self._optimizers = (
            () if optimizer is None else
            (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
        )  # fmt: skip
        self._thread = threading.get_ident()
        self._seen: set[int] = set()
        self._added: list[ReferenceType[nn.Module]] = []
        self._later: WeakValueDictionary[int, nn.Module] | None = None  # in _called_after

    def install(self) -> Callable[[], None] | None:
        """Counts the model now, or every module when it is called, until what is returned is."""
        if self._model is not None:
            self._add(self._model)
            return None

        def called(module: nn.Module, _: Any) -> None:
            if id(module) in self._seen or threading.get_ident() != self._thread:
                return
            self._add(module)
            if self._later is not None:
                self._later[id(module)] = module
                return
            self._later = _called_after.setdefault(module, WeakValueDictionary())
            for reference in self._later.valuerefs():
                other = reference()
                if other is not None and id(other) not in self._seen:
                    self._add(other)

        return torch.nn.modules.module.register_module_forward_pre_hook(called).remove

    def _add(self, module: nn.Module) -> None:
        if not self._added:
            self._recorder.of_model(number_of(module))
        self._added.append(ref(module))
        if self._model is not None and self._count_model(module):
            return
        parts = modules_of(module)
        self._seen.update(map(id, parts))
        params = _parameters_in(parts)
        buffers = [b for part in parts for b in part._buffers.values() if b is not None]
        grads: list[Tensor] = []
        awaited: list[Tensor] = []
        for p in params:
            # Of others torch warns where their .grad is read: backward leaves none in them.
            if p.is_leaf or p.retains_grad:
                grad = p.grad
                if grad is not None:
                    grads.append(grad)
                elif p.requires_grad and not is_lazy(p):
                    awaited.append(p)
        counted = [*in_memory(_plain([*params, *buffers])), *self._states(params)]
        self._recorder.count(counted, _plain(grads), sum(t.nbytes for t in _plain(awaited)))

    def _count_model(self, module: nn.Module) -> bool:
        """Counts a model of plain tensors natively, where a step has little else to do."""
        # All of this package's: a state is found by its parameter.
        optimizers = dict.fromkeys((*self._optimizers, *alive_optimizers()))
        if any(g.get("states_on") for o in optimizers for g in o.param_groups):
            return False
        if any_mapped(module.parameters()):
            return False
        return self._recorder.count_model(module, [o.state for o in optimizers])

    def lived(self) -> Lived:
        """Returns what the parameters, buffers and states of the modules take now."""
        modules = [module for reference in self._added if (module := reference()) is not None]
        each = (p for module in modules for p in _parameters_in(modules_of(module)))
        params = list({id(p): p for p in each}.values())
        states = self._states(params)
        wide = [t for t in states if t.is_floating_point() and t.itemsize >= 4 and t.numel() > 1]
        buffers = [b for module in modules for b in module.buffers()]
        seen: set[object] = set()
        return Lived(
            parameters=bytes_held(in_memory(params), seen),
            buffers=bytes_held(buffers, seen),
            states=bytes_held(states, seen),
            wide_states=bytes_held(wide),
        )

    def _states(self, params: Sequence[Tensor]) -> list[Tensor]:
        """What optimizers have in memory for these parameters."""
        optimizers = dict.fromkeys((*self._optimizers, *optimizers_of(params)))
        states = (o.state[p] for o in optimizers for p in params if p in o.state)
        buffers = (buffer for optimizer in optimizers for buffer in buffers_of(optimizer))
        return [*in_memory(_plain(states)), *buffers]


def _plain(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if type(value) in (Tensor, nn.Parameter):  # nearly all of them: no generator for these
            found.append(value)
        else:
            found.extend(plain_tensors(value))
    return found
