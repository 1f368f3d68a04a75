"""Parameters that are stepped in backward, and a loss of them."""

import torch
from torch import nn

import memsave_ext as ms


def make(count=3, size=10, **options):
    torch.manual_seed(5)
    params = [nn.Parameter(torch.randn(size)) for _ in range(count)]
    return params, ms.Adam(params, lr=0.1, in_backward=True, **options)


def values(params):
    return [p.detach().clone() for p in params]


def loss(params):
    return sum((p * (i + 1)).sum() for i, p in enumerate(params))
