"""Random programs of operations, for comparing a checkpointed run with a plain one."""

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefghijk"), st.integers(0, 20), st.integers(0, 20)),
    min_size=1,
    max_size=10,
)


def build(steps, outputs, nest, weight):
    """A function of three (3, 4) tensors and a weight. ``nest(f, *tensors)`` runs regions."""

    def apply_op(op, x, y):
        if op == "a":
            return x + y
        if op == "b":
            return x * y
        if op == "c":
            return x.sin()
        if op == "d":
            return F.dropout(x, 0.5)
        if op == "e":  # in place, on a tensor nobody saved
            return (x + 1).mul_(y)
        if op == "f":
            return x.t().contiguous().t()[:, :].clone()
        if op == "g":
            return nest(lambda p, q: F.dropout(p * q.cos(), 0.3), x, y)
        if op == "h":
            return torch.cat([x[:1], y[1:]])
        if op == "i":  # two levels down, with a parameter only the closure knows
            return nest(lambda p: nest(lambda q: (q * weight).tanh(), p) * p, x)
        if op == "j":
            return F.rrelu(x, training=True)
        view = (x * 1)[1:]
        return torch.cat([view.mul_(2).exp(), y[:1]])

    def function(*values):
        values = [*values, weight]
        for op, i, j in steps:
            values.append(apply_op(op, values[i % len(values)], values[j % len(values)]))
        return tuple(values[-outputs:])

    return function


def tensors(dtype=torch.float32):
    """Three inputs, of which the second needs no gradient, and the weight."""
    values = [torch.linspace(0, 2, 12, dtype=dtype).reshape(3, 4) for _ in range(3)]
    weight = torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4).requires_grad_()
    return [v.requires_grad_(i != 1) for i, v in enumerate(values)], weight


def gradients(outputs, tensors, **kwargs):
    outputs = [o for o in outputs if o.requires_grad]
    if not outputs:
        return [None] * len(tensors)
    weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape) for o in outputs]
    return torch.autograd.grad(outputs, tensors, weights, allow_unused=True, **kwargs)
