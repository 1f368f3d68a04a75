"""Counts what holds memory in training: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..shared.tensors import plain_tensors

KINDS = ("parameters", "buffers", "gradients", "optimizer")
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


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
    module: str  # dotted name of the first module that has it
    name: str  # dotted name of the parameter
    sparse: bool  # whether its gradients are sparse


@dataclass
class Inventory:
    """A model's parameters and buffers."""

    slots: dict[int, Slot] = field(default_factory=dict)  # by the parameter's id
    uses: list[list[Slot]] = field(default_factory=list)  # each module's own parameters, in order
    buffers: list[tuple[str, Tensor]] = field(default_factory=list)  # module, tensor

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        inventory = cls()
        for module_name, module in model.named_modules():
            sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
            own: dict[int, Slot] = {}
            for name, param in module._parameters.items():
                if param is None:
                    continue
                dotted = f"{module_name}.{name}" if module_name else name
                _check_initialized(dotted, param)
                slot = Slot(param, module_name, dotted, sparse)
                own[id(param)] = inventory.slots.setdefault(id(param), slot)
            inventory.uses.append(list(own.values()))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    _check_initialized(f"{module_name}.{name}", buffer)
                    inventory.buffers.append((module_name, buffer))
        return inventory

    @property
    def trained(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.param.requires_grad]

    def holding(self, optimizer: torch.optim.Optimizer | None) -> Holding:
        """Returns what is held now."""
        tally = Tally()
        for slot in self.slots.values():
            tally.add_tensors("parameters", slot.module, slot.param)
        for module, buffer in self.buffers:
            tally.add_tensors("buffers", module, buffer)
        for slot in self.slots.values():
            if slot.param.grad is not None:
                tally.add_tensors("gradients", slot.module, slot.param.grad)
        for param, state in ({} if optimizer is None else optimizer.state).items():
            slot_of_param = self.slots.get(id(param))
            module = "" if slot_of_param is None else slot_of_param.module
            tally.add_tensors("optimizer", module, state)
        return tally.holding()


def _check_initialized(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"model has no shape for {name} yet, which a lazy module learns in its first forward: "
            "run one first"
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
    """Adds up a :class:`Holding`.

    Tensors must stay alive until it is asked for, as storages are told apart by address.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._storages: dict[object, _Storage] = {}

    def add(self, *entries: Entry) -> None:
        self._entries += entries

    def add_tensors(self, kind: str, module: str, value: object) -> None:
        """Adds the part of the memory of the tensors in ``value`` that was not counted before."""
        for part in itertools.chain.from_iterable(map(_dense, plain_tensors(value))):
            key, size = _storage(part)
            storage = self._storages.setdefault(key, _Storage(len(self._entries), size))
            view = (part.storage_offset(), part.shape, part.stride(), part.dtype)
            if view in storage.seen:
                continue
            count = min(part.numel(), storage.left // part.element_size())
            amount = Amount(count, count * part.element_size())
            storage.left -= amount.bytes
            storage.seen.add(view)
            self.add(Entry(kind, module, part.dtype, amount))

    def entries(self) -> list[Entry]:
        """Returns what was added. Bytes of a storage outside all tensors go to its first."""
        entries = list(self._entries)
        for storage in self._storages.values():
            first = entries[storage.first]
            entries[storage.first] = first._replace(amount=first.amount + Amount(0, storage.left))
        return entries

    def holding(self) -> Holding:
        by_dtype: dict[str, dict[str, Amount]] = {kind: {} for kind in KINDS}
        by_module: dict[str, dict[str, Amount]] = {}
        for kind, module, dtype, amount in self.entries():
            of_kind, of_module = by_dtype[kind], by_module.setdefault(module, {})
            name = str(dtype).removeprefix("torch.")
            of_kind[name] = of_kind.get(name, Amount()) + amount
            of_module[kind] = of_module.get(kind, Amount()) + amount
        return Holding(by_dtype, by_module)


def _dense(tensor: Tensor) -> list[Tensor]:
    """Returns the tensor, or the indices and values of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if (indices := _COMPRESSED.get(tensor.layout)) is not None:
        return [*(getattr(tensor, name)() for name in indices), tensor.values()]
    return [tensor]


def _storage(tensor: Tensor) -> tuple[object, int]:
    """Returns what identifies the tensor's storage, and how many bytes it has."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # its backend keeps memory without a storage
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage._cdata, storage.nbytes()
