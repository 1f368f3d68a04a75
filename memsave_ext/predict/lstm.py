"""What oneDNN's LSTM on the CPU makes for itself: a workspace from forward to backward, copies.

The sizes are those of oneDNN's ``rnn_utils``, as measured: rows of numbers are padded, and each
part of the workspace fills pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PAGE = 4096
_LINE = 64  # bytes that rows of numbers are padded to
_FLOAT = 4
_GATES = 4


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Returns the result of an operator with the workspace that a fake kernel leaves empty."""
    if func is not torch.ops.aten.mkldnn_rnn_layer.default:
        return result
    x, hidden = args[0], args[10]
    *outputs, workspace = result
    return (*outputs, workspace.new_empty(_workspace(x, hidden)))


def of_forward(args: tuple[Any, ...]) -> int:
    """Bytes of the scratch and the copies of weights, beside the result."""
    x, *weights = args[:3]
    hidden, size = args[10], x.element_size()
    copies = sum(_packed(weight, size) for weight in weights)
    return int(copies + _GATES * hidden * size) + _scratch(x, hidden)


def of_backward(args: tuple[Any, ...]) -> int:
    """Bytes of the scratch, the copies of weights and gradients in the kernel's own layout, beside
    the result."""
    x, *weights = args[:3]
    outputs, grads, hidden = args[7:10], args[10:13], args[15]
    size = x.element_size()
    made = sum(_gradient(g, y) for g, y in zip(grads, outputs, strict=True))
    for weight in weights:
        rows, columns = weight.shape
        if size < _FLOAT or _row(columns, size) != columns * size:
            made += int(rows) * _row(columns, size)
        made += _packed(weight, _FLOAT)
    biases = _GATES * hidden * (size + _FLOAT)
    return int(made + biases) + _scratch(x, hidden)


def _gradient(grad: Tensor | None, output: Tensor) -> int:
    """Bytes of zeros where there is none, and of copies that are contiguous and in float32."""
    plain = grad is not None and grad.is_contiguous()
    widened = output.numel() * _FLOAT if output.element_size() < _FLOAT else 0
    return (0 if plain else output.nbytes) + widened


def _workspace(x: Tensor, hidden: int) -> int:
    """Bytes of gates, states and the gradients of states, of each step in time."""
    steps, rows = x.shape[:2]  # also of a batch that comes first, which torch transposes
    size, widest = x.element_size(), max(x.shape[2], hidden)
    later = 2 * (steps + 1) * rows  # with the states before the first step, of input and output
    parts = (
        steps * rows * _row(_GATES * hidden, size),
        later * _row(widest, size),
        steps * rows * _row(hidden, size),
        later * hidden * size,
        *(2 * [later * _row(widest, _FLOAT)]),
        later * hidden * _FLOAT,
    )
    return sum(map(_in_pages, parts))


def _scratch(x: Tensor, hidden: int) -> int:
    """Bytes of the sums before the gates: of all steps in time, or of one where they are widened
    from a narrow dtype; and about those of a step's states."""
    steps, rows = x.shape[:2]
    if x.element_size() < _FLOAT:
        steps = 1
    gates = steps * rows * _row(_GATES * hidden, _FLOAT)
    return _in_pages(gates) + 2 * _in_pages(rows * hidden * _FLOAT)


def _packed(weight: Tensor, size: int) -> int:
    """Bytes of a weight's copy, transposed to rows of all gates."""
    gates, columns = weight.shape
    return int(columns) * _row(gates, size)


def _row(count: int, size: int) -> int:
    """Bytes of a padded row. One of a multiple of 256 numbers is padded by a line more, so that
    rows are not at the same place of the caches."""
    per_line = _LINE // size
    padded = -(-count // per_line) * per_line
    return (padded + per_line if padded % 256 == 0 else padded) * size


def _in_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
