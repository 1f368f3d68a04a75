"""Functions that act on rows, whole, in plain pieces and in chunks."""

import torch
from helpers import assert_equal
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms


class MLP(nn.Module):
    def __init__(self, width=6, hidden=24, dropout=0.0, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.to(dtype)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


def in_pieces(function, *tensors, chunks, dim=0):
    """What ``chunks`` stands for, in plain torch: results of tensors or tuples of tensors."""
    cut = zip(*(t.tensor_split(min(chunks, t.size(dim)), dim) for t in tensors), strict=True)
    results = [function(*piece) for piece in cut]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts, dim) for parts in zip(*results, strict=True))
    return torch.cat(results, dim)


def chunked(function, *tensors, chunks, dim=0, **options):
    return ms.checkpoint(function, *tensors, chunks=chunks, chunk_dim=dim, **options)


def gradients(out, tensors, **options):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad(out, tensors, weight, allow_unused=True, **options)


def as_pieces(program, tensors, **options):
    """``program(run)`` of chunks and of plain pieces: the same bits, random numbers included."""
    results = []
    for run in (in_pieces, chunked):
        torch.manual_seed(1)
        out = program(run)
        results.append((out, torch.rand(2), *gradients(out, tensors, **options)))
    assert_equal(*results)
    return results[1]


STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefghijk"), st.integers(0, 20), st.integers(0, 20)),
    min_size=1,
    max_size=8,
)
DRAWING = "fj"  # steps with random numbers, which depend on the pieces


def build(steps, outputs, nest, leaves, computed):
    """A function of rows, of two (N, 4) tensors. ``nest(f, *tensors)`` runs regions; ``leaves`` and
    ``computed``, of shapes (4, 4) and (4,), are reached through the closure."""
    square, row = leaves

    def apply_step(op, x, y):
        if op == "a":
            return x + y
        if op == "b":
            return (x * y).sin()
        if op == "c":
            return F.linear(x, square, row)
        if op == "d":
            return x @ computed
        if op == "e":
            return F.layer_norm(x, (4,), row)
        if op == "f":
            return F.dropout(x, 0.4)
        if op == "g":
            return nest(lambda p, q: (p * q.cos()) @ square, x, y)
        if op == "h":
            return (x + 1).mul_(y)
        if op == "i":
            return torch.cat([x[:, :1], y.softmax(1)[:, 1:]], 1)
        if op == "j":
            return nest(lambda p: nest(lambda q: F.dropout(q * row, 0.2), p) * p, x)
        return (x.t() * row.sum()).t().tanh()

    def function(x, y):
        values = [x, y]
        for op, i, j in steps:
            values.append(apply_step(op, values[i % len(values)], values[j % len(values)]))
        return tuple(values[-outputs:])

    return function


def tensors(rows, dtype):
    """Two inputs, of which the second needs no gradient, two leaves, and one that is computed."""
    x, y = (torch.randn(rows, 4, dtype=dtype) for _ in range(2))
    leaves = [torch.randn(4, 4, dtype=dtype), torch.randn(4, dtype=dtype)]
    for tensor in (x, *leaves):
        tensor.requires_grad_()
    return x, y, leaves, leaves[0].sin() * 0.5
