"""Counts what holds memory in training: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..shared.dtensor import local_tensor
from ..shared.tensors import dense_parts, plain_tensors, storage_of
from ..store.mapped import in_memory, is_mapped

KINDS = ("parameters", "buffers", "gradients", "optimizer")


@dataclass(frozen=True)
class Amount:
    """How many elements tensors have, and how many bytes of memory."""

    elements: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.elements + other.elements, self.bytes + other.bytes)


@dataclass(frozen=True)
class Holding:
    """The memory that is held at one moment, each storage counted once.

    Attributes:
        by_dtype: for each of ``KINDS``, amounts by dtype (``"float32"``).
        by_module: for the dotted name of each module that has anything of its own (``""`` is the
            model itself), amounts by kind. A tensor of several modules counts for the first.
    """

    by_dtype: dict[str, dict[str, Amount]]
    by_module: dict[str, dict[str, Amount]]

    @property
    def parameters(self) -> Amount:
        return self._sum("parameters")

    @property
    def buffers(self) -> Amount:
        return self._sum("buffers")

    @property
    def gradients(self) -> Amount:
        return self._sum("gradients")

    @property
    def optimizer(self) -> Amount:
        return self._sum("optimizer")

    @property
    def bytes(self) -> int:
        """The bytes of all kinds together."""
        return sum(self._sum(kind).bytes for kind in KINDS)

    def at_depth(self, depth: int | None) -> dict[str, dict[str, Amount]]:
        """Returns :attr:`by_module` with modules nested deeper than ``depth`` names added to the
        module above them: 0 gives the whole model under ``""``, 1 its children, None every module.

        Raises:
            ValueError: ``depth`` is neither None nor an int of at least 0.
        """
        if depth is not None and (not isinstance(depth, int) or depth < 0):
            raise ValueError(f"depth must be None or an int of at least 0, got {depth!r}")
        cut: dict[str, dict[str, Amount]] = {}
        for name, amounts in self.by_module.items():
            row = cut.setdefault(".".join(name.split(".")[:depth]), {})
            for kind, amount in amounts.items():
                row[kind] = row.get(kind, Amount()) + amount
        return cut

    def _sum(self, kind: str) -> Amount:
        return sum(self.by_dtype.get(kind, {}).values(), Amount())


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter and where the model has it."""

    param: nn.Parameter
    held: Tensor  # the parameter or, where the model is taken to be converted, that on "meta"
    module: str  # dotted name of the first module that has it
    name: str  # dotted name of the parameter
    sparse: bool  # whether its gradients are sparse

    @property
    def gradient(self) -> Amount:
        """That of this process's part; of a sparse one nothing, as its rows depend on the batch."""
        count = 0 if self.sparse else local_tensor(self.held).numel()
        return Amount(count, count * self.held.itemsize)


@dataclass
class Inventory:
    """A model's parameters and buffers."""

    slots: dict[int, Slot] = field(default_factory=dict)  # by the parameter's id
    uses: list[list[Slot]] = field(default_factory=list)  # each module's parameters, in order
    buffers: list[tuple[str, Tensor]] = field(default_factory=list)  # module, tensor

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        inventory = cls()
        for module_name, module in model.named_modules():
            sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
            used: dict[int, Slot] = {}
            for name, param in module._parameters.items():
                if param is None:
                    continue
                dotted = f"{module_name}.{name}" if module_name else name
                _check_initialized(dotted, param)
                slot = Slot(param, param, module_name, dotted, sparse)
                used[id(param)] = inventory.slots.setdefault(id(param), slot)
            inventory.uses.append(list(used.values()))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    _check_initialized(f"{module_name}.{name}", buffer)
                    inventory.buffers.append((module_name, buffer))
        return inventory

    def converted(self, dtype: torch.dtype) -> Inventory:
        """Returns what there is once the model is converted to a floating-point dtype."""
        slots = {
            key: replace(slot, held=_converted(slot.held, dtype))
            for key, slot in self.slots.items()
        }
        uses = [[slots[id(slot.param)] for slot in used] for used in self.uses]
        buffers = [(module, _converted(buffer, dtype)) for module, buffer in self.buffers]
        return Inventory(slots, uses, buffers)

    @property
    def trained(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.param.requires_grad]

    @functools.cached_property
    def entries(self) -> list[Entry]:
        """What the parameters and buffers hold."""
        return self._tally().entries()

    def holding(self, optimizer: torch.optim.Optimizer | None) -> Holding:
        """Returns what is held now."""
        tally = self._tally()
        for slot in self.slots.values():
            if slot.param.grad is not None:
                tally.add("gradients", slot.module, slot.param.grad)
        for param, state in ({} if optimizer is None else optimizer.state).items():
            slot_of_param = self.slots.get(id(param))
            module = "" if slot_of_param is None else slot_of_param.module
            tally.add("optimizer", module, in_memory(plain_tensors(state)))
        return holding_of(tally.entries())

    def _tally(self) -> Tally:
        tally = Tally()
        for slot in self.slots.values():
            if not is_mapped(slot.held):
                tally.add("parameters", slot.module, slot.held)
        for module, buffer in self.buffers:
            tally.add("buffers", module, buffer)
        return tally


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor on the meta device, without gaps between its elements, as a conversion makes
    it; the tensor itself where it is not converted."""
    if tensor.dtype == dtype or not tensor.is_floating_point() or tensor.layout != torch.strided:
        return tensor
    local = local_tensor(tensor)
    meta = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return torch.empty_like(meta, dtype=dtype)


def _check_initialized(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"model has no shape for {name} yet: it has a lazy module, which learns its shapes in "
            "its first forward: run one first"
        )


class Entry(NamedTuple):
    kind: str
    module: str
    dtype: torch.dtype
    amount: Amount


@dataclass
class _Storage:
    first: int  # index of the entry of its first tensor
    left: int  # bytes that are not yet counted for a tensor
    seen: set[object] = field(default_factory=set)  # the views that were counted


class Tally:
    """Adds up the memory of tensors, each storage once.

    Tensors must stay alive until it is asked for, as storages are told apart by address.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._storages: dict[object, _Storage] = {}

    def add(self, kind: str, module: str, value: object) -> None:
        """Adds the part of the memory of the tensors in ``value`` that was not counted before."""
        for part in itertools.chain.from_iterable(map(dense_parts, plain_tensors(value))):
            key, size = storage_of(part)
            storage = self._storages.setdefault(key, _Storage(len(self._entries), size))
            view = (part.storage_offset(), part.shape, part.stride(), part.dtype)
            if view in storage.seen:
                continue
            count = min(part.numel(), storage.left // part.element_size())
            amount = Amount(count, count * part.element_size())
            storage.left -= amount.bytes
            storage.seen.add(view)
            self._entries.append(Entry(kind, module, part.dtype, amount))

    def entries(self) -> list[Entry]:
        """Returns what was added. Bytes of a storage outside all tensors go to its first."""
        entries = list(self._entries)
        for storage in self._storages.values():
            first = entries[storage.first]
            entries[storage.first] = first._replace(amount=first.amount + Amount(0, storage.left))
        return entries


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Returns parameters, buffers, gradients and states of the optimizer, as they are now."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    states = [] if optimizer is None else tree_leaves(list(optimizer.state.values()))
    tensors = [t for t in states if isinstance(t, Tensor)]
    return [*model.parameters(), *model.buffers(), *grads, *tensors]


def holding_of(entries: Iterable[Entry]) -> Holding:
    """Returns the sum of entries."""
    by_dtype: dict[str, dict[str, Amount]] = {kind: {} for kind in KINDS}
    by_module: dict[str, dict[str, Amount]] = {}
    for kind, module, dtype, amount in entries:
        dtypes, kinds = by_dtype[kind], by_module.setdefault(module, {})
        name = str(dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, Amount()) + amount
        kinds[kind] = kinds.get(kind, Amount()) + amount
    return Holding(by_dtype, by_module)
