"""A small model and its training loop, for optimizers that are compared with torch's."""

import torch
from torch import nn


def model(dtype=torch.float32, width=7):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, width), nn.Tanh(), nn.Linear(width, 1)
    )
    return net.to(dtype)


def train(net, optimizer, steps, start=0, after=lambda step: None):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 5, generator=generator).to(net[0].weight.dtype)
        optimizer.zero_grad()
        (net(x) - 3).square().mean().backward()
        optimizer.step()
        after(step)
