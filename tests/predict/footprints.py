"""A model of every kind of parameter, and the memory that it and its optimizer hold."""

import torch
from torch import nn

from memsave_ext.predict.holdings import KINDS, Amount, Inventory

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make_model(dtype=FP32, device="cpu"):
    """Blocks of 8-bit states that are whole and not, too few elements for them, another order of
    memory, gaps, a scalar, buffers, something frozen and a module without anything."""
    model = nn.Sequential(
        nn.Linear(70, 75, device=device),
        nn.ReLU(),
        nn.BatchNorm1d(7, device=device),
        nn.Conv2d(16, 32, 3, device=device).to(memory_format=torch.channels_last),
        nn.ModuleDict({"inner": nn.Linear(3, 5, device=device)}),
    )
    model.gaps = nn.Parameter(torch.randn(80, 120, device=device)[:, :60])
    model.scale = nn.Parameter(torch.ones((), device=device))
    model[4]["inner"].bias.requires_grad_(False)
    return model.to(dtype)


def backward(params):
    sum((param * torch.ones_like(param)).sum().double() for param in params).backward()


def train(model, optimizer, steps=2):
    for _ in range(steps):
        backward([p for p in model.parameters() if p.requires_grad])
        optimizer.step()
        optimizer.zero_grad()


def now(model, optimizer=None):
    return Inventory.of(model).holding(optimizer)  # footprint().now, without its predictions


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def check_sums(holding):
    """Modules and dtypes are two views of the same."""
    for kind in KINDS:
        of_modules = sum((row.get(kind, Amount()) for row in holding.by_module.values()), Amount())
        assert of_modules == sum(holding.by_dtype[kind].values(), Amount())
        assert getattr(holding, kind) == of_modules
        whole = holding.at_depth(0).get("", {}).get(kind, Amount())
        assert whole == of_modules
    assert holding.bytes == sum(getattr(holding, kind).bytes for kind in KINDS)
