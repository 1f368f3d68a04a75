"""A training step without a forward, on fake tensors: the gradients that are held in it, the states
and temporaries of any optimizer."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adam.own_optimizer import step_of
from ..fakes.mode import fakes, new_mode
from ..fakes.storages import WORKSPACE, Storages
from ..shared.dtensor import local_tensor
from .batch import construct
from .holdings import Entry, Inventory, Slot

Live = Counter[Slot]  # how many gradient tensors of each parameter are held
# Called with the stand-ins of parameters, by the parameters' ids; returns an optimizer of them.
Make = Callable[[Mapping[int, nn.Parameter]], Optimizer]
SWITCHES = ("foreach", "fused", "capturable")  # choose how torch computes, not what


def entries_of(live: Live) -> list[Entry]:
    return [
        Entry("gradients", slot.module, slot.held.dtype, slot.gradient)
        for slot in live.elements()
        if not slot.sparse
    ]


def stand_in(slot: Slot, device: str = "cpu") -> nn.Parameter:
    """Returns a parameter on a device, like the part that this process has of the slot's.

    Where fake tensors are made, it is one.

    Raises:
        ValueError: the parameter is sparse.
    """
    if slot.param.layout != torch.strided:
        raise ValueError(
            f"parameter {slot.name} has the layout {slot.param.layout}, and only dense ones can be "
            "predicted"
        )
    local = local_tensor(slot.held)
    like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=device)
    return nn.Parameter(like, requires_grad=slot.param.requires_grad)


def gradient_of(slot: Slot, made: Tensor) -> Tensor:
    """Returns a new gradient of a stand-in."""
    like = made.detach()
    if not slot.sparse:
        return torch.empty_like(like)
    rows = torch.empty(1, 0, dtype=torch.int64, device=like.device)
    values = like.new_empty(0, *like.shape[1:])
    return torch.sparse_coo_tensor(
        rows, values, like.shape, is_coalesced=True, check_invariants=False
    )


class FootprintStep(NamedTuple):
    state: list[tuple[Slot | None, Any]]  # after the step: of each parameter, and of none
    gradients: Live  # at the worst moment
    temporaries: int  # bytes of what else there is then, that is gone after the step


def step(inventory: Inventory, make: Make | None) -> FootprintStep:
    """Steps on fake tensors, twice: the first step makes states, the second is like all later ones.

    Backward goes through the modules in reverse order, one module's own parameters at a time. What
    an optimizer does in backward, it does here. A further contribution to a gradient needs two more
    tensors, itself and the new sum, as in autograd's backward of ``nn.Linear``.

    Values that Python reads from tensors are those of predictions. Hooks of steps are not called.

    Args:
        inventory: the model's parameters.
        make: makes the optimizer; None: there is none.

    Raises:
        Exception: whatever the optimizer raises.
    """
    meter = _Meter()
    with torch.inference_mode(False), torch.enable_grad(), fakes(new_mode()), meter.storages:
        made = {key: stand_in(slot) for key, slot in inventory.slots.items()}
        optimizer = None if make is None else make(made)
        kind: Any = type(optimizer)
        for _ in range(2):
            for param in made.values():
                param.grad = None
            meter.changes.clear()
            _backward(inventory, made, meter)
            if optimizer is not None:
                step_of(kind)(optimizer)
        live, temporaries = meter.worst()
    slot_of: dict[Any, Slot] = {made[key]: slot for key, slot in inventory.slots.items()}
    states = () if optimizer is None else optimizer.state.items()
    state = [(slot_of.get(key), value) for key, value in states]
    return FootprintStep(state, live, temporaries)


def of_kind(
    kind: type[Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
    switch: str,
) -> Make:
    """Returns what makes an optimizer of a class.

    Args:
        kind: the class.
        defaults: its options; it is constructed with those that it takes.
        groups: its groups, with the parameters that are stood in for.
        switch: which of ``SWITCHES`` is on; another text for none of them.
    """

    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: name == switch if name in SWITCHES else _without_tensors(value)
            for name, value in given.items()
            if name != "params"
        }

    def make(made: Mapping[int, nn.Parameter]) -> Optimizer:
        of_groups = [
            {**options(group), "params": [made[id(param)] for param in group["params"]]}
            for group in groups
        ]
        return construct(kind, of_groups, options(defaults))

    return make


def _without_tensors(value: Any) -> Any:
    """Returns an option with 0.5 in place of tensors of one number, which may be on a device.

    Their values change no size.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return 0.5
    if type(value) is tuple:
        return tuple(map(_without_tensors, value))
    return value


class _Meter:
    """Notes the bytes of the fake tensors that are made and freed inside of :attr:`storages`, but
    not what kernels make for themselves.

    Attributes:
        gradient_of: the slot of which gradients are made now.
        sums: those of which autograd makes sums next.
        held: the first contributions to these, to which autograd then adds nothing in place.
        changes: of memory, since it was cleared: of which slot's gradients, None for other memory,
            and by how many bytes.
    """

    def __init__(self) -> None:
        self.gradient_of: Slot | None = None
        self.sums: deque[Slot] = deque()
        self.held: dict[Slot, Tensor] = {}
        self.changes: list[tuple[Slot | None, int]] = []
        self._known: dict[int, tuple[Slot | None, int]] = {}
        device = torch.device("cpu")
        self.storages = Storages(self._allocated, self._freed, lambda *_: None, device)

    def _allocated(self, number: int, size: int) -> None:
        if number == WORKSPACE:
            return
        slot = self.gradient_of
        if slot is None and self.sums:
            slot = self.sums.popleft()
            del self.held[slot]
        self._known[number] = slot, size
        self.changes.append((slot, size))

    def _freed(self, number: int) -> None:
        if number in self._known:
            slot, size = self._known.pop(number)
            self.changes.append((slot, -size))

    def worst(self) -> tuple[Live, int]:
        """Returns the gradients of the moment with the most bytes, and the bytes of what else there
        is then, beyond what there is now."""
        live: Live = Counter()
        if not self.changes:
            return live, 0
        bytes_at = list(itertools.accumulate(change for _, change in self.changes))
        moment = max(range(len(bytes_at)), key=bytes_at.__getitem__)
        others = 0
        for slot, change in self.changes[: moment + 1]:
            if slot is None:
                others += change
            else:
                live[slot] += 1 if change > 0 else -1
        return +live, others - sum(change for slot, change in self.changes if slot is None)


class _Module(torch.autograd.Function):
    """A module of which nothing is known but its parameters: backward makes their gradients.

    Some of these are the first of two or more contributions, some the second.
    """

    @staticmethod
    def forward(
        ctx: Any,
        before: Tensor,
        meter: _Meter,
        used: Sequence[tuple[Slot, bool, bool]],
        *made: Tensor,
    ) -> Tensor:
        ctx.meter, ctx.used, ctx.made = meter, used, made
        return torch.empty_like(before)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        meter, gradients = ctx.meter, []
        meter.sums.clear()
        for (slot, first, second), made in zip(ctx.used, ctx.made, strict=True):
            meter.gradient_of = slot
            gradients.append(gradient_of(slot, made))
            if first:
                meter.held[slot] = gradients[-1].detach()
            elif second and not slot.sparse:
                meter.sums.append(slot)
        meter.gradient_of = None
        return *grads, None, None, *gradients


def _backward(inventory: Inventory, made: Mapping[int, nn.Parameter], meter: _Meter) -> None:
    """Runs a backward through the modules, which makes the gradients of their parameters."""
    # On the meta device it takes no memory that would count.
    through = torch.empty((), device="meta", requires_grad=True)
    # Of a linear layer's parameters the bias has its gradient first.
    uses = [[s for s in reversed(used) if s.param.requires_grad] for used in inventory.uses]
    count = Counter(slot for used in uses for slot in used)
    later = +count  # of the modules that backward has been at before
    for used in filter(None, uses):
        later.subtract(used)
        of_slots = [(slot, later[slot] == 0 < count[slot] - 1, later[slot] == 1) for slot in used]
        params = (made[id(slot.param)] for slot in used)
        through = _Module.apply(through, meter, of_slots, *params)
    if through.grad_fn is not None:
        through.backward()
