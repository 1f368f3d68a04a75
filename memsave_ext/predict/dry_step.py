"""A training step without a forward: the gradients that backward holds, the states and temporaries
of any optimizer's step."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..adam.dtensor import local_tensor
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


def meta_parameter(slot: Slot) -> nn.Parameter:
    """Returns a parameter on the meta device, like the part that this process has of the slot's.

    It has a gradient if it requires one.

    Raises:
        ValueError: the parameter is sparse.
    """
    if slot.param.layout != torch.strided:
        raise ValueError(f"parameter {slot.name} is of layout {slot.param.layout}")
    local = local_tensor(slot.held)
    meta = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    made = nn.Parameter(meta, requires_grad=slot.param.requires_grad)
    if made.requires_grad:
        made.grad = _sparse_like(meta) if slot.sparse else torch.empty_like(meta)
    return made


def _sparse_like(meta: Tensor) -> Tensor:
    rows = torch.empty(1, 0, dtype=torch.int64, device="meta")
    values = meta.new_empty(0, *meta.shape[1:])
    return torch.sparse_coo_tensor(
        rows, values, meta.shape, is_coalesced=True, check_invariants=False
    )


class DryStep(NamedTuple):
    state: dict[Any, Any]  # the optimizer's state after the step
    temporaries: int  # the most bytes that were live besides the state


def step(
    kind: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    *,
    foreach: bool,
) -> DryStep:
    """Steps a new optimizer twice: the first step makes state, the second is like all later ones.

    Values that Python reads from tensors are all 1. Hooks are not called.

    Args:
        kind: the optimizer's class.
        defaults: its options; it is constructed with those that it takes.
        groups: param_groups whose parameters are on the meta device and have gradients.
        foreach: whether to use torch's implementation for lists of tensors instead of its loop.

    Raises:
        Exception: whatever the optimizer raises.
    """
    switched = dict.fromkeys(SWITCHES, False) | {"foreach": foreach}

    def options(group: dict[str, Any]) -> dict[str, Any]:
        return {
            name: switched[name] if name in switched else _without_tensors(value)
            for name, value in group.items()
        }

    known = [t for g in groups for p in g["params"] for t in (p, p.grad) if t is not None]
    meter = _Meter(known)
    with meter:
        optimizer = construct(kind, [options(group) for group in groups], options(defaults))
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        for _ in range(2):
            step(optimizer)
    return DryStep(dict(optimizer.state), meter.peak - meter.live)


def _without_tensors(value: Any) -> Any:
    """Returns an option with 0.5 in place of tensors of one number, which may be on a device.

    Their values change no size.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return 0.5
    if type(value) is tuple:
        return tuple(map(_without_tensors, value))
    return value


class _Meter(TorchDispatchMode):
    """Counts the bytes of tensors that operators make on the meta device: live and peak."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = known  # kept alive, so that no other storage gets their addresses
        self._storages: dict[int, weakref.ref[torch.UntypedStorage] | None] = {
            part.untyped_storage()._cdata: None for part in known if part.layout == torch.strided
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_meta and leaf.layout == torch.strided:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._storages:
            return

        def freed(_: object) -> None:
            del self._storages[address]
            self.live -= size

        self._storages[address] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
