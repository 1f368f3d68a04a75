"""What the tests of batch norms share: modules, layouts, and every checkpoint there is."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import memsave_ext as ms

SHAPES = {"1d": (6, 4, 5), "2d": (3, 4, 5, 2), "3d": (2, 4, 3, 2, 2)}
OURS = {"1d": ms.BatchNorm1d, "2d": ms.BatchNorm2d, "3d": ms.BatchNorm3d}
TORCHS = {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}
LAYOUTS = ("contiguous", "channels_last", "strided")


def make(kind, **options):
    """Ours, torch's with the same random weight and bias, and an input."""
    ours, theirs = OURS[kind](4, **options), TORCHS[kind](4, **options)
    with torch.no_grad():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.copy_(p.uniform_(-1, 1))
    return ours, theirs, torch.randn(SHAPES[kind])


def in_layout(x, layout):
    if layout == "channels_last" and x.dim() in (4, 5):
        return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "strided":
        wide = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))
        return wide[..., ::2].copy_(x)
    return x.contiguous()


def assert_same_buffers(a, b):
    for (name, left), (_, right) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        assert torch.equal(left, right), name


def _no_recompute_of_convolutions():
    policy = torch_checkpoint.CheckpointPolicy

    def choose(context, operator, *args, **kwargs):
        saved = operator is torch.ops.aten.convolution.default
        return policy.MUST_SAVE if saved else policy.PREFER_RECOMPUTE

    return torch_checkpoint.create_selective_checkpoint_contexts(choose)


def _everything_saved():
    policy = torch_checkpoint.CheckpointPolicy
    return torch_checkpoint.create_selective_checkpoint_contexts(lambda *a, **k: policy.MUST_SAVE)


def non_reentrant(**options):
    def run(function, x, parameters):
        return torch_checkpoint.checkpoint(function, x, use_reentrant=False, **options)

    return run


def reentrant(function, x, parameters):
    return torch_checkpoint.checkpoint(function, x, use_reentrant=True)


def fairscale(function, x, parameters):
    checkpointing = pytest.importorskip("fairscale.nn.checkpoint")

    class Block(nn.Module):
        def forward(self, t):
            return function(t)

    return checkpointing.checkpoint_wrapper(Block())(x)


class Original(torch.autograd.Function):
    """As in the original repository: inputs, then parameters, in one Function."""

    @staticmethod
    def forward(ctx, function, n, *tensors):
        ctx.function, ctx.inputs, ctx.parameters = function, tensors[:n], tensors[n:]
        with torch.no_grad():
            return function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.inputs]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        wanted = [*inputs, *ctx.parameters]
        return None, None, *torch.autograd.grad(output, wanted, grads, allow_unused=True)


CHECKPOINTS = {
    "checkpoint": lambda f, x, p: ms.checkpoint(f, x),
    "checkpoint whole": lambda f, x, p: ms.checkpoint(f, x, early_stop=False),
    "CheckpointFunction": lambda f, x, p: ms.CheckpointFunction.apply(f, 1, x, *p),
    "non-reentrant": non_reentrant(),
    "non-reentrant whole": non_reentrant(early_stop=False),
    "non-reentrant context_fn": non_reentrant(context_fn=ms.count_once_contexts),
    "selective": non_reentrant(context_fn=_no_recompute_of_convolutions),
    "selective, all saved": non_reentrant(context_fn=_everything_saved),
    "reentrant": reentrant,
    "fairscale": fairscale,
    "original": lambda f, x, p: Original.apply(f, 1, x, *p),
}
if importlib.util.find_spec("fairscale") is None:
    del CHECKPOINTS["fairscale"]  # in a sample it would be skipped in another one's place
# What torch, or whoever wrote them, does not support there.
NO_DOUBLE_BACKWARD = {"CheckpointFunction", "reentrant", "fairscale", "original"}
NO_SECOND_BACKWARD = {"selective", "selective, all saved"}
# One of each kind of region; and those that are Functions of other people.
KINDS = "checkpoint", "CheckpointFunction", "non-reentrant", "non-reentrant context_fn", "reentrant"
FUNCTIONS = "reentrant", "fairscale", "original"
SAVED = "selective, all saved"  # recomputes nothing


def plain(function, x, parameters):
    return function(x)
