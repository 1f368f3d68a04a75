"""Whole models in blocks against plain autograd: the same bits, also under data parallelism."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from remat_programs import grads_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import memsave_ext as ms


class Block(nn.Module):
    """Of a transformer; ``post``: norms after the residuals, as in BERT."""

    def __init__(self, width=32, dropout=0.1, post=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.post = nn.Dropout(dropout), post

    def attend(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = self.dropout((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1))
        return self.dropout(self.out((scores @ v).transpose(1, 2).flatten(2)))

    def forward(self, x):
        parts = self.attend, lambda x: self.dropout(self.down(F.gelu(self.up(x))))
        for part, norm in zip(parts, self.norms, strict=True):
            x = norm(x + part(x)) if self.post else x + part(norm(x))
        return x


class Transformer(nn.Module):
    """GPT or BERT, with the head tied to the embedding."""

    def __init__(self, post):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(post=post) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 1, 32))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(32, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


class Residual(nn.Module):
    """ResNet's block, whose ReLUs are in place."""

    def __init__(self, norm, width):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms, self.relu = nn.ModuleList(norm(width) for _ in range(2)), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norms[0](self.convs[0](x)))
        y = self.norms[1](self.convs[1](y))
        y += x
        return self.relu(y)


class Unet(nn.Module):
    """Two levels, with skips."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.inner = Residual(norm, 8), Residual(norm, 16)
        self.down, self.up = nn.Conv2d(8, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        skip = self.first(x)
        x = self.inner(F.max_pool2d(self.down(skip), 1))
        return self.last(torch.cat([skip, self.up(x)], 1))


class Branching(nn.Module):
    """What runs depends on the data."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x)) if x.sum() > 0 else torch.tanh(layer(-x)) * x.norm()
            while x.abs().max() > 1:
                x = x / 2
        return x


def resnet(norm):
    return nn.Sequential(nn.Conv2d(3, 8, 3), Residual(norm, 8), Residual(norm, 8))


TOKENS = torch.arange(48).view(3, 16) % 64
MODELS = {
    "gpt": (lambda: Transformer(post=False), TOKENS),
    "bert": (lambda: Transformer(post=True), TOKENS),
    "vit": (Vit, torch.ones(2, 3, 16, 16).cumsum(2) / 16),
    "resnet": (lambda: resnet(nn.BatchNorm2d), torch.ones(4, 3, 8, 8).cumsum(3) / 8),
    "resnet, ours": (lambda: resnet(ms.BatchNorm2d), torch.ones(4, 3, 8, 8).cumsum(3) / 8),
    "unet": (lambda: Unet(nn.BatchNorm2d), torch.ones(2, 8, 16, 16).cumsum(2) / 16),
    "unet, ours": (lambda: Unet(ms.BatchNorm2d), torch.ones(2, 8, 16, 16).cumsum(2) / 16),
    "branching": (Branching, torch.ones(8, 16).cumsum(1) / 16),
}


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, everything):
    build, x = MODELS[name]
    torch.manual_seed(0)
    model = build()
    expected, _ = grads_of(model, (x,))
    actual, block = grads_of(model, (x,), everything)
    assert all(map(torch.equal, expected, actual))
    if everything:
        assert block.figures().dropped_bytes > 0


def test_dropout_masks_are_not_kept():
    x = torch.randn(256, 256, requires_grad=True)
    with ms.remat() as r:
        loss = F.dropout(x, 0.3).sum()
    figures = r.figures()
    assert (figures.kept_bytes, figures.dropped_bytes) == (0, x.nbytes)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def train(model, rank, blocks):
    """Gradients of two steps, each on this rank's part of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ms.remat_module(model, _everything=True) if blocks else None
    grads = []
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(TOKENS[rank : rank + 2] + step).square().mean().backward()
        for p in model.parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            grads.append(grad.clone())
        optimizer.step()
    if handle is not None:
        assert handle.figures().dropped_bytes > 0
    return grads


def same_with_and_without(wrap):
    rank, results = dist.get_rank(), []
    for blocks in (False, True):
        torch.manual_seed(0)
        results.append(train(wrap(Transformer(post=True)), rank, blocks))
    return all(map(torch.equal, *results))


def under_ddp():
    return same_with_and_without(nn.parallel.DistributedDataParallel)


def under_fsdp(reshards=True):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model):
        for block in model.blocks:
            for part in (block.qkv, block.norms[1], block):
                fully_shard(part, mesh=mesh, reshard_after_forward=reshards)
        return fully_shard(model, mesh=mesh, reshard_after_forward=reshards)

    return same_with_and_without(shard)


@pytest.mark.parametrize("world", [1, 2])
def test_data_parallel(world):
    results = run_ranks(world, [under_ddp, under_fsdp])
    assert results == {"under_ddp": [True] * world, "under_fsdp": [True] * world}
