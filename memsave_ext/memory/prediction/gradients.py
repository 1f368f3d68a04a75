"""Which gradients a backward will have at once, and what they need."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...adam.dtensor import local_tensor
from .holdings import Amount, Entry, Slot

Live = Counter[Slot]  # gradients, and how many tensors of each
Complete = Callable[[Slot], Iterable[Slot]]


def dtype_of(tensor: Tensor, narrow: bool) -> torch.dtype:
    """Its own, or, where it is ``narrow``, what ``nn.Module.bfloat16()`` makes of it."""
    return torch.bfloat16 if narrow and tensor.is_floating_point() else tensor.dtype


def amount_of(tensor: Tensor, narrow: bool) -> Amount:
    """Of a dense tensor with the shape of what this process has of ``tensor``."""
    count = local_tensor(tensor).numel()
    return Amount(count, count * dtype_of(tensor, narrow).itemsize)


def gradient_bytes(slot: Slot, narrow: bool) -> int:
    """Nothing for sparse ones, whose rows are those that a batch needs."""
    return 0 if slot.sparse else amount_of(slot.param, narrow).bytes


def bytes_of(live: Live, narrow: bool) -> int:
    return sum(count * gradient_bytes(slot, narrow) for slot, count in live.items())


def entries_of(live: Live, narrow: bool) -> list[Entry]:
    return [
        Entry("gradients", slot.module, dtype_of(slot.param, narrow), amount)
        for slot, count in live.items()
        if not slot.sparse
        for amount in [amount_of(slot.param, narrow)] * count
    ]


def most_in_backward(uses: Sequence[Sequence[Slot]], complete: Complete, narrow: bool) -> Live:
    """The gradients that are there when they are most, in a backward through modules in reverse
    order, one module's at a time.

    A parameter's is complete when every module that has it has contributed. Each contribution is a
    tensor, and their sum another, as autograd's are of ``nn.Linear``.

    Args:
        uses: of each module, in order, its own parameters.
        complete: is called with each one that is, and says which are freed then.
    """
    live: Live = Counter()
    most: Live = Counter()
    size = most_size = 0
    left = Counter(slot for own in uses for slot in own)

    def change(slots: Iterable[Slot], to: Callable[[int], int]) -> None:
        nonlocal size
        for slot in slots:
            size += (to(live[slot]) - live[slot]) * gradient_bytes(slot, narrow)
            live[slot] = to(live[slot])

    for own in reversed(uses):
        made = [slot for slot in own if slot.param.requires_grad]
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
    """None is freed in backward."""
    return ()


def in_buckets(stepped: Iterable[Slot], small: int, limit: int, narrow: bool) -> Complete:
    """Those of ``stepped`` are freed as csrc/adam/backward.cpp does it: at once, or, with fewer
    bytes than ``small``, when ``limit`` bytes have come together."""
    of_optimizer = set(stepped)
    buckets: defaultdict[torch.device, list[Slot]] = defaultdict(list)
    filled: Counter[torch.device] = Counter()

    def complete(slot: Slot) -> Iterable[Slot]:
        if slot not in of_optimizer:
            return ()
        if (size := gradient_bytes(slot, narrow)) >= small:
            return (slot,)
        device = slot.param.device
        buckets[device].append(slot)
        filled[device] += size
        if filled[device] < limit:
            return ()
        del filled[device]
        return buckets.pop(device)

    return complete


def meta_parameter(slot: Slot, narrow: bool = False) -> nn.Parameter:
    """Like what this process has of it, on the meta device; with a gradient if it will have one.

    Raises:
        ValueError: a sparse parameter.
    """
    param = slot.param
    if param.layout != torch.strided:
        raise ValueError(f"parameter {slot.name} is of layout {param.layout}")
    local = local_tensor(param)
    meta = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    if (dtype := dtype_of(param, narrow)) != meta.dtype:
        meta = torch.empty_like(meta, dtype=dtype)  # without gaps, as a conversion leaves it
    made = nn.Parameter(meta, requires_grad=param.requires_grad)
    if param.requires_grad:
        made.grad = _sparse_like(meta) if slot.sparse else torch.empty_like(meta)
    return made


def _sparse_like(meta: Tensor) -> Tensor:
    rows = torch.empty(1, 0, dtype=torch.int64, device="meta")
    values = meta.new_empty(0, *meta.shape[1:])
    return torch.sparse_coo_tensor(
        rows, values, meta.shape, is_coalesced=True, check_invariants=False
    )
