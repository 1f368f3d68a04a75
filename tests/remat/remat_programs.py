"""Programs in blocks and without them, which must give the same bits."""

import contextlib

import numpy as np
import torch
from torch import nn

from memsave_ext import remat


def everything():
    return remat(_everything=True)


def layers(dropout=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout)),
        *(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh()),
    )
    return model, torch.randn(8, 16)


def bits(tensor):
    return None if tensor is None else tensor.detach().flatten().view(torch.uint8).numpy()


def check(program, drops=True):
    """``program`` is given what makes blocks; it returns tensors. ``drops``: whether something is;
    None: that may be."""
    results, blocks = [], []

    def make():
        blocks.append(everything())
        return blocks[-1]

    for block in (contextlib.nullcontext, make):
        torch.manual_seed(1)
        results.append([*map(bits, program(block)), bits(torch.get_rng_state())])
    for plain, ours in zip(*results, strict=True):
        assert np.array_equal(plain, ours)
    dropped = sum(block.figures().dropped_bytes for block in blocks)
    assert drops is None or (dropped > 0) == drops


def grads_of(model, inputs, everything=None):
    """Loss, gradients and buffers of a training step."""
    torch.manual_seed(3)
    model.zero_grad()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    block = None
    if everything is None:
        loss = model(*inputs).square().mean()
    else:
        with remat(_everything=everything) as block:
            loss = model(*inputs).square().mean()
    loss.backward()
    results = [loss.detach(), *(p.grad for p in model.parameters())]
    results += [b.clone() for b in model.buffers()]
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    return results, block
