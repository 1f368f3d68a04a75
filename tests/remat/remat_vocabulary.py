"""More statements of random programs: what a recorder can trip over. See stress/vocabulary.py.

``block()`` is a block, or nothing in the plain program; "plain" programs have no regions either.
"""

import contextlib
import copy

import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.autograd import Function

BLOCKS = {
    "block": "with block():\n    {v} = ({x} * {y}).sin().exp()",
    "block_in_block": (
        "with block():\n    a = {x}.sin()\n    with block():\n        b = (a * {y}).tanh()\n"
        "    {v} = (a * b).exp()"
    ),
    "block_of_region": (
        "with block():\n    {v} = ms.checkpoint(lambda t: (t * w0).sin().tanh(), {x}).sin()"
    ),
    "region_of_block": (
        "def f(t):\n    with block():\n        return (t.sin() * w0).tanh()\n"
        "{v} = ms.checkpoint(f, {x}).sin()"
    ),
    "torchs_region_of_block": (
        "def f(t):\n    with block():\n        return (t.sin() * w0).tanh()\n"
        "{v} = cp.checkpoint(f, {x}, use_reentrant=False).sin()"
    ),
    "block_of_torchs_region": (
        "with block():\n    {v} = cp.checkpoint(lambda t: (t * w0).sin().tanh(), {x}, "
        "use_reentrant=False).sin()"
    ),
    "offload_in_block": (
        "with block(), torch.autograd.graph.save_on_cpu():\n    {v} = ({x}.sin() * {y}).tanh()"
    ),
    "block_in_offload": (
        "with torch.autograd.graph.save_on_cpu(), block():\n    {v} = ({x}.sin() * {y}).tanh()"
    ),
    "left_by_exception": (
        "try:\n    with block():\n        a = {x}.sin()\n        raise Boom('left')\n"
        "except Boom:\n    {v} = (a * {y}).tanh()"
    ),
    "generator": (
        "@contextlib.contextmanager\ndef g():\n    with block():\n        yield\n"
        "try:\n    with g():\n        a = {x}.sin()\n        b = (a * w0).tanh()\n"
        "        raise Boom('left')\nexcept Boom:\n    {v} = (a * b).sin()"
    ),
    "autocast_block": (
        "with torch.autocast('cpu', torch.bfloat16), block():\n    a = {x} @ w2\n"
        "{v} = (a.sin().to(DTYPE) @ w2).tanh()"
    ),
    "backward_in_block": (
        "with block():\n    a = torch.autograd.grad(({x} * w0).sin().sum(), w0, "
        "create_graph=True)[0]\n    {v} = ({x} * a).sin()"
    ),
}
MODES = {
    "autocast_switch": (
        "with torch.autocast('cpu', torch.bfloat16):\n    a = {x} @ w2\n"
        "    with torch.autocast('cpu', enabled=False):\n"
        "        b = (a.to(DTYPE) @ w2).sin()\n    c = (a @ w2).tanh()\n{v} = (b + c).to(DTYPE)"
    ),
    "no_grad_write": (
        "a = {x} * 2\nb = a.tanh()\nwith torch.no_grad():\n    a.mul_(0.5)\n"
        "{v} = b * (a + {y}).sin()"
    ),
    "grad_in_no_grad": (
        "with torch.no_grad():\n    a = {x}.cos()\n    with torch.enable_grad():\n"
        "        b = {x}.sin() * a\n{v} = (a * b).tanh()"
    ),
    "inference": (
        "with torch.inference_mode():\n    a = torch.full((4, 3), 0.5, dtype=DTYPE)\n"
        "{v} = ({x} * a.clone()).sin()"
    ),
    "detach_": "a = {x} * 1\na.detach_()\n{v} = (a * w0).sin()",
    "thread": "a = []\nin_thread(lambda: a.append({x}.sin() * {y}))\n{v} = a[0].tanh()",
    "dual": (
        "with fwAD.dual_level():\n    a = fwAD.make_dual({x}, {y}.detach() * 1)\n"
        "    b, c = fwAD.unpack_dual((a.sin() * a).tanh())\n    {v} = b * c"
    ),
    "vmap": "{v} = torch.vmap(lambda row: row.sin().tanh() * row)({x})",
    "two_vmaps": (
        "{v} = torch.vmap(torch.vmap(lambda t, u: t.sin() * u, in_dims=(0, None)))({x}, {y}[:, 0])"
    ),
    "deepcopy": "{v} = ({x} * copy.deepcopy(m{k})(x1).detach()).sin()",
}
WRITES = {
    "view_write": "{v} = {x} * 1\n{v}.view(2, 6)[:, ::2].sigmoid_()",
    "transposed_write": (
        "{v} = {x} * {y}\na = {v}.t()\na[1].mul_(a[0].detach() * 1)\nb = a.diagonal()\n"
        "b.tanh_()\n{v} = {v}.sin() * {v}"
    ),
    "unsafe_chunk": (
        "a, b = ({x} * 1).unsafe_chunk(2)\na.sigmoid_()\n{v} = torch.cat([a, b.sin()]) * {y}"
    ),
    "strided_write": "{v} = {x} * 1\n{v}.as_strided((2, 2), (3, 1), 1).mul_(2)\n{v} = {v}.sin()",
    "index_put": "{v} = {x} * 1\n{v}[torch.tensor([0, 2])] = {y}[1:3].sin()\n{v} = {v}.sin()",
    "masked_fill": "{v} = ({x} * 1).masked_fill_({x} > 0, 0.5)\n{v} = ({v} * {y}).sin()",
    "index_add": (
        "{v} = torch.zeros_like({x}).index_add_(0, torch.tensor([0, 1, 0, 3]), {x}.sin())"
    ),
    "out": (
        "a = torch.empty(4, 3, dtype=DTYPE)\nwith torch.no_grad():\n"
        "    torch.add({x}, {y}, out=a)\n"
        "{v} = {x} * a\n{v} = {v}.sin() + a.cos() * {y}"
    ),
    "foreach": (
        "a = torch._foreach_mul([{x}, {y}], 2.0)\ntorch._foreach_add_(a, 1.0)\n"
        "{v} = a[0].sin() * a[1]"
    ),
    "accumulate": (
        "a = torch.zeros(4, 3, dtype=DTYPE)\nfor i in range(3):\n    a += {x}[i]\n"
        "    a = a * {y}.sin()\n{v} = a.tanh()"
    ),
    "relu_": "{v} = ({x} + {y}).mul_(2).relu_().sin()",
    "filled": "{v} = torch.empty_like({x}).copy_({x}).sin() * {y}",
    "resized_slices": (
        "a = torch.zeros(8, 3, dtype=DTYPE)\na[::2] = {x}.sin()\na[1::2] = {y}.tanh()\n"
        "{v} = a.sin()[2:6]"
    ),
    "data": "a = {x} * 1\nb = (a + w0).sin()\na.data.mul_(2)\n{v} = b * (a + {y}).cos()",
}
FUNCTIONS = {
    "attribute": "{v} = Attribute.apply({x}.sin(), {y}.tanh()) * {x}",
    "dirty": "{v} = Dirty.apply({x} * 1).sin() * {y}",
    "two": "a, {v} = Two.apply({x}.sin())\n{v} = {v} * a",
    "in_forward": "{v} = Inner.apply({x}.sin()).tanh() * {y}",
    "replaced_grad": (
        "{v} = {x} * 1\n{v}.requires_grad and {v}.register_hook(lambda g: g.sin() * 2)"
    ),
    "node_prehook": (
        "{v} = {x}.sin() * {y}\n"
        "{v}.grad_fn is not None and {v}.grad_fn.register_prehook(lambda g: (g[0] * 2,))"
    ),
    "hook_reads": (
        "{v} = {x}.sin()\n{v}.requires_grad and {v}.register_hook(lambda g, t={y}: g * t.detach())"
    ),
    "module_hook": "{v} = hooked(m{k})({x})",
}
SHAPES = {
    "unbind": "{v} = torch.stack([row.sin() * row for row in {x}.unbind(0)])",
    "complex": "{v} = torch.view_as_real(torch.complex({x}, {y}).conj() * 2j).sin().sum(-1)",
    "own_generator": (
        "a = torch.Generator().manual_seed(3)\n"
        "{v} = ({x} * torch.rand(4, 3, dtype=DTYPE, generator=a)).sin()"
    ),
    "attention": (
        "a, b = {x}[None, None], {y}[None, None]\n"
        "{v} = F.scaled_dot_product_attention(a, b, a)[0, 0]"
    ),
    "embedding": "{v} = F.embedding(torch.tensor([3, 1, 0, 0]), {x}).sin()",
    "sorted": "{v} = ({x}.sort(0).values * {y}.cumsum(0)).tanh()",
    "most": "{v} = {x}.max(0, keepdim=True).values.expand(4, 3) * {y}.sin()",
    "einsum": "{v} = torch.einsum('ij,ik,kj->ij', {x}, {y}, w2).tanh()",
    "lstm": "{v} = lstm({x}, ({y}.sin(), {x} * {y}))[0]",
    "pool": "{v} = F.max_pool1d({x}[None], 3, 1, 1)[0].sin() + F.avg_pool1d({y}[None], 3, 1, 1)[0]",
    "group_norm": "{v} = F.group_norm({x}[None].mT.contiguous(), 3)[0].mT.sin() * {y}",
    "loss": "{v} = {x} * F.mse_loss({x}.sin(), {y}.tanh()) + F.gelu({y})",
    "to": "{v} = ({x}.float().sin() * {y}.half()).to(DTYPE).tanh()",
    "empty_part": "{v} = torch.cat([{x}[:0].sin(), {x}.sin(), {y}[4:].exp()]) * {y}",
}
# Torch refuses these inside of hooks that are on its stack, as the fallback's are.
TRANSFORMS = {
    "func_grad": "{v} = ({x} * torch.func.grad(lambda t: (t.sin() * 2).sum())({y})).tanh()",
    "per_row": (
        "{v} = torch.vmap(torch.func.grad(lambda t, u: (t.sin() * u).sum()))({x}, {y}).tanh()"
    ),
    "jacrev": "{v} = torch.func.jacrev(lambda t: (t.sin() * w0).sum(1))({x}).sum(0).tanh()",
    "jvp": "{v} = torch.func.jvp(lambda t: (t.sin() * t).tanh(), ({x},), ({y},))[1].sin()",
}
MORE = {**BLOCKS, **MODES, **WRITES, **FUNCTIONS, **SHAPES, **TRANSFORMS}


class Attribute(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        ctx.y = y.detach() * 2  # not saved
        return x * ctx.y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.y, grad * x * 2


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Two(Function):
    @staticmethod
    def forward(ctx, x):
        a, b = x.sin(), x * 2
        ctx.save_for_backward(a, b, x)
        return a, b

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        a, b, x = ctx.saved_tensors
        return grad_a * x.cos() + grad_b * 2 + 0 * a * b


class Inner(Function):
    """With a graph of its own inside."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = (inner.sin() * inner).tanh()
        ctx.graph = inner, out
        return out.detach() * 1

    @staticmethod
    def backward(ctx, grad):
        inner, out = ctx.graph
        return torch.autograd.grad(out, inner, grad, retain_graph=True)[0]


def hooked(module):
    """A module with hooks for one call."""

    def call(x):
        handles = [
            module.register_forward_pre_hook(lambda m, args: (args[0].sin(),)),
            module.register_forward_hook(lambda m, args, out: out.tanh() * args[0]),
        ]
        try:
            return module(x)
        finally:
            for handle in handles:
                handle.remove()

    return call


def names(dtype, block):
    """What these statements see besides."""
    torch.manual_seed(5)
    return {
        "block": block, "contextlib": contextlib, "copy": copy, "fwAD": fwAD, "hooked": hooked,
        "Attribute": Attribute, "Dirty": Dirty, "Two": Two, "Inner": Inner,
        "lstm": nn.LSTMCell(3, 3, dtype=dtype),
    }  # fmt: skip
