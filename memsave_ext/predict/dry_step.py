"""A training step without a forward: the gradients that backward holds, the states and temporaries
of any optimizer's step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..adam.dtensor import local_tensor
from ..fakes.mode import fakes, new_mode
from ..fakes.storages import WORKSPACE, Storages
from .batch import construct
from .holdings import Entry, Slot

Live = Counter[Slot]  # how many gradient tensors of each parameter are held
# Called with a parameter whose gradient is complete; returns those whose gradients are freed then.
Complete = Callable[[Slot], Iterable[Slot]]
SWITCHES = ("foreach", "fused", "capturable")  # choose how torch computes, not what


def bytes_of(live: Live) -> int:
    return sum(count * slot.gradient.bytes for slot, count in live.items())


def entries_of(live: Live) -> list[Entry]:
    return [
        Entry("gradients", slot.module, slot.held.dtype, slot.gradient)
        for slot in live.elements()
        if not slot.sparse
    ]


def most_in_backward(uses: Sequence[Sequence[Slot]], complete: Complete) -> Live:
    """Returns the gradients that are held when they need most, in a backward through the modules
    in reverse order, one module at a time.

    A parameter's gradient is complete when every module that has the parameter has contributed. A
    further contribution needs two more tensors, itself and the new sum, as in autograd's backward
    of ``nn.Linear``.

    Args:
        uses: the parameters of each module itself, in order.
        complete: called with each parameter whose gradient is complete; returns those whose
            gradients are freed then.
    """
    live: Live = Counter()
    most: Live = Counter()
    size = most_size = 0
    left = Counter(slot for used in uses for slot in used)

    def change(slots: Iterable[Slot], to: Callable[[int], int]) -> None:
        nonlocal size
        for slot in slots:
            size += (to(live[slot]) - live[slot]) * slot.gradient.bytes
            live[slot] = to(live[slot])

    for used in reversed(uses):
        made = [slot for slot in used if slot.param.requires_grad]
        change(made, lambda count: count + 2 if count else 1)
        if made and size >= most_size:
            most, most_size = +live, size
        change(made, lambda _: 1)
        left.subtract(made)
        for slot in reversed(made):
            if left[slot] == 0:
                change(complete(slot), lambda _: 0)
    return most


def keep(slot: Slot) -> Iterable[Slot]:
    """Frees no gradient in backward."""
    return ()


def in_buckets(stepped: Iterable[Slot], small: int, limit: int) -> Complete:
    """Frees the gradients of ``stepped`` when csrc/adam/backward.cpp does.

    That is at once or, for gradients of fewer than ``small`` bytes, when ``limit`` bytes of them
    have been collected on the device. Other parameters' gradients are kept.
    """
    has_optimizer = set(stepped)
    buckets: defaultdict[torch.device, list[Slot]] = defaultdict(list)
    filled: Counter[torch.device] = Counter()

    def complete(slot: Slot) -> Iterable[Slot]:
        if slot not in has_optimizer:
            return ()
        if (size := slot.gradient.bytes) >= small:
            return (slot,)
        device = slot.param.device
        buckets[device].append(slot)
        filled[device] += size
        if filled[device] < limit:
            return ()
        del filled[device]
        return buckets.pop(device)

    return complete


def stand_in(slot: Slot, device: str = "cpu") -> nn.Parameter:
    """Returns a parameter on a device, like the part that this process has of the slot's.

    It has a gradient if it requires one. Where fake tensors are made, it is one.

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
    made = nn.Parameter(like, requires_grad=slot.param.requires_grad)
    if made.requires_grad:
        made.grad = _sparse_like(like) if slot.sparse else torch.empty_like(like)
    return made


def _sparse_like(like: Tensor) -> Tensor:
    rows = torch.empty(1, 0, dtype=torch.int64, device=like.device)
    values = like.new_empty(0, *like.shape[1:])
    return torch.sparse_coo_tensor(
        rows, values, like.shape, is_coalesced=True, check_invariants=False
    )


class DryStep(NamedTuple):
    state: list[tuple[Slot | None, Any]]  # after the step: of each parameter, and of none
    temporaries: int  # the most bytes that were live besides the state


def step(
    kind: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[tuple[dict[str, Any], Sequence[Slot]]],
    switch: str,
) -> DryStep:
    """Steps a new optimizer twice on fake tensors: the first step makes state, the second is like
    all later ones.

    Values that Python reads from tensors are those of predictions. Hooks are not called.

    Args:
        kind: the optimizer's class.
        defaults: its options; it is constructed with those that it takes.
        groups: of each group its options and its parameters.
        switch: which of ``SWITCHES`` is on; another text for none of them.

    Raises:
        Exception: whatever the optimizer raises.
    """

    def options(given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: name == switch if name in SWITCHES else _without_tensors(value)
            for name, value in given.items()
        }

    slot_of: dict[Any, Slot] = {}
    meter = _Meter()
    with torch.inference_mode(False), fakes(new_mode()), meter.storages:
        made = []
        for given, slots in groups:
            params = [stand_in(slot) for slot in slots]
            slot_of.update(zip(params, slots, strict=True))
            made.append({**options(given), "params": params})
        optimizer = construct(kind, made, options(defaults))
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        gradients = [param.grad for group in made for param in group["params"]]
        for _ in range(2):
            step(optimizer)
        temporaries = meter.peak - meter.live
        del gradients  # which count as there, also where the step has let go of them
    state = [(slot_of.get(key), value) for key, value in optimizer.state.items()]
    return DryStep(state, temporaries)


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
    """Counts the bytes of the fake tensors that are made inside of :attr:`storages`, but not what
    kernels make for themselves."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        device = torch.device("cpu")
        self.storages = Storages(self._allocated, self._freed, lambda _: None, device)

    def _allocated(self, number: int, size: int) -> None:
        if number == WORKSPACE:
            return
        self._sizes[number] = size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freed(self, number: int) -> None:
        self.live -= self._sizes.pop(number, 0)
