"""What autograd does otherwise for fakes than in a step: sums and formulas of gradients.

For subclasses of tensors, as fakes are, it copies what it changes in place in a step. And some
formulas are others. Gradients of products are made of running products, while a step divides by the
factors, none of which is taken to be zero. Gradients of ``max()`` and ``min()`` of all elements
look for NaN by masks, which a step does on CUDA alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_COUNT = torch.int64.itemsize
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_ADD, _ADD_IN_PLACE = _aten.add.Tensor, _aten.add_.Tensor
_LOGICAL_AND = _aten.logical_and.default
# What formulas do in place to what they have just made.
_IN_PLACE = {
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar,
    _aten.put.default: _aten.put_.default,
    _LOGICAL_AND: _aten.logical_and_.default,
}


class Makers:
    """Knows which node of backward made a storage, and so what a step would change in place."""

    def __init__(self) -> None:
        self.recomputes = 0  # that run, of operators of a forward
        self._nodes: dict[int, int] = {}  # by the storage's address, the number of the node

    def made(self, storage: int, node: Any) -> None:
        if node is not None:
            self._nodes[storage] = node._sequence_nr()

    def forget(self, storage: int) -> None:
        self._nodes.pop(storage, None)

    def operator(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Returns the operator that a step runs where fakes run ``func``.

        Called by what the engine or another caller has called: the frame of that one is looked at.
        """
        if func is not _ADD and func not in _IN_PLACE:
            return func
        if self.recomputes or torch._C._current_graph_task_id() == -1:
            return func
        # Neither a hook nor a function's backward in Python.
        if sys._getframe(2).f_code is not _ENGINE:
            return func
        if func is _ADD:
            return _ADD_IN_PLACE if self._is_accumulated(*args) else func
        return _IN_PLACE[func] if self._is_changed(func, args) else func

    def _is_accumulated(self, a: Any, b: Any) -> bool:
        """Whether the engine adds a gradient to one that it alone holds."""
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return False  # a formula adds a number
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return False
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not _is_alone(a):
            return False
        # A formula's own sums are of what it made.
        return self._node_of(a, node_number()) != node_number()

    def _is_changed(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a gradient's formula has made the tensor and will not read it again."""
        if not _is_alone(args[0]) or self._node_of(args[0], None) != node_number():
            return False
        # A mask that is smaller than the result cannot become it.
        return func is not _LOGICAL_AND or bool(args[0].shape == args[1].shape)

    def _node_of(self, tensor: Tensor, default: int | None) -> int | None:
        return self._nodes.get(tensor.untyped_storage()._cdata, default)


def node_number() -> int | None:
    """Returns the number of the node that the engine evaluates, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _is_alone(tensor: Tensor) -> bool:
    """Whether the tensor is all of its memory, and no other has it."""
    storage = tensor.untyped_storage()
    # One reference is the tensor's and one that of the object here.
    return tensor.nbytes == storage.nbytes() and torch._C._storage_Use_Count(storage._cdata) == 2


def bytes_in_step(node: Any, on_cpu: bool) -> int | None:
    """Returns the bytes of what a step's formula makes at its worst moment, with its result; None
    if it is that of fakes."""
    name = node.name()
    formula = _FORMULAS.get(name) or (_FORMULAS_ON_CPU.get(name) if on_cpu else None)
    return formula(node) if formula else None


def _product(node: Any) -> int:
    x = node._saved_self
    conjugate = x.nbytes if x.dtype.is_complex else 0
    return int(max(2 * x.nbytes + conjugate, x.numel()))


def _product_along_a_dimension(node: Any) -> int:
    """The zeros are counted first."""
    numel = node._saved_self.numel()
    count = node._saved_result.numel() * _COUNT
    return int(numel + count + max(_product(node), numel * _COUNT))


def _running_product(node: Any) -> int:
    """A product with the gradient, reversed, its running sum, and that reversed."""
    x = node._saved_self
    return int(x.numel() + 4 * x.nbytes)


def _extreme(node: Any) -> int:
    """A mask, zeros, and the mask again as the numbers that are counted."""
    x = node._saved_self
    return int(x.numel() + x.nbytes + x.numel() * _COUNT)


_FORMULAS = {
    "ProdBackward0": _product,
    "ProdBackward1": _product_along_a_dimension,
    "CumprodBackward0": _running_product,
}
_FORMULAS_ON_CPU = dict.fromkeys(
    ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), _extreme
)
