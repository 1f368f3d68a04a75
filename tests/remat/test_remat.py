"""Values that are dropped and computed again, against plain autograd: the same bits."""

import threading

import pytest
import torch
from helpers import host_memory_grows
from remat_programs import grads_of
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms
from memsave_ext import remat


class Attention(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.dropout = nn.Linear(width, width), dropout

    def forward(self, x):
        b, t, width = x.shape
        q, k, v = (
            part.view(b, t, 4, width // 4).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.dropout(self.out(a.transpose(1, 2).reshape(b, t, width)), self.dropout)


class Mlp(nn.Module):
    def __init__(self, width, dropout, activation):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.dropout, self.activation = nn.Linear(4 * width, width), dropout, activation

    def forward(self, x):
        h = self.down(self.activation(self.up(self.norm(x))))
        return x + F.dropout(h, self.dropout)


class Dense(nn.Module):
    """Concatenations of all features so far, normalised."""

    def __init__(self, norm, layers=3):
        super().__init__()
        self.norms = nn.ModuleList(norm(8 * (i + 1)) for i in range(layers))
        self.convs = nn.ModuleList(
            nn.Conv2d(8 * (i + 1), 8, 3, padding=1, bias=False) for i in range(layers)
        )

    def forward(self, x):
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(norm(torch.cat(features, 1)).relu_()))
        return torch.cat(features, 1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)

    def forward(self, x):
        state = None
        for part in x.unbind(1):
            state = self.cell(part, state)
        return state[0]


class Experts(nn.Module):
    """Rows go to one of two layers, as a router says."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in "ab")

    def forward(self, x):
        rows = x.flatten(0, -2)
        scores = self.router(rows).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            index = (best == i).nonzero().squeeze(-1)
            out[index] = expert(rows[index]).tanh() * scores[index, i : i + 1]
        return out


def models():
    torch.manual_seed(0)
    sequence = torch.randn(4, 32, 64)
    image = torch.randn(4, 8, 16, 16)
    layers = [f for _ in range(2) for f in (Attention(64, 0.1), Mlp(64, 0.1, F.gelu))]
    yield "transformer", nn.Sequential(*layers), sequence
    yield "in place", nn.Sequential(Mlp(64, 0.1, lambda x: F.relu(x, inplace=True))), sequence
    yield "dense", Dense(nn.BatchNorm2d), image
    yield "dense, ours", Dense(ms.BatchNorm2d), image
    yield "dense, group norm", Dense(lambda c: nn.GroupNorm(4, c)), image
    yield "recurrent", Recurrent(), torch.randn(4, 12, 8)
    yield "lstm", nn.LSTM(64, 32, batch_first=True), sequence
    yield "experts", Experts(), torch.randn(4, 8, 16)
    tied = nn.Linear(64, 64)
    yield "tied", nn.Sequential(tied, nn.Tanh(), nn.LayerNorm(64), tied), sequence


class First(nn.Module):
    """A module that returns a tuple returns its first here."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        out = self.module(x)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", [name for name, *_ in models()])
def test_models(name, everything):
    model, x = next((First(m), x) for n, m, x in models() if n == name)
    expected, _ = grads_of(model, (x,))
    actual, block = grads_of(model, (x,), everything)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)
    if everything and name != "lstm":
        assert block.figures().dropped_bytes > 0
        assert block.figures().recomputed_operators > 0


def test_threads():
    model, x = nn.Sequential(Attention(64, 0.0), Mlp(64, 0.0, F.gelu)), torch.randn(4, 32, 64)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    results = {}

    def work(i):
        with remat(_everything=True):
            loss = model(x).sum()
        results[i] = torch.autograd.grad(loss, list(model.parameters()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert all(map(torch.equal, expected, results[i]))


def test_changed_in_place_after_the_block():
    x, w = torch.randn(64, 64), nn.Parameter(torch.randn(64, 64))
    scale = torch.randn(64)
    with remat(_everything=True):
        loss = ((x + scale) @ w).sum()
    scale.add_(1)
    with pytest.raises(ms.CheckpointError, match=r"aten::add.*other.*\[64\].*version 0.*version 1"):
        loss.backward()


def test_changed_in_place_in_the_block():
    x, w = torch.randn(64, 64), nn.Parameter(torch.randn(64, 64))
    scale = torch.randn(64)
    expected = torch.autograd.grad(((x + scale) @ w).sum(), w)[0]
    with remat(_everything=True):
        loss = ((x + scale) @ w).sum()
        scale.add_(1)
    assert torch.equal(torch.autograd.grad(loss, w)[0], expected)


@pytest.mark.parametrize("brought_back", [False, True])
def test_a_copy_that_is_freed_is_not_taken_for_the_values(brought_back):
    """What is computed from an input that was written, once nothing needs the copy of it."""
    x, w = torch.randn(1 << 16), nn.Parameter(torch.randn(1 << 16))
    expected = x.exp()
    with remat():
        first, second = x.exp(), x.exp()
        out = w * first  # needs x
        if brought_back:
            out.sum().backward()  # which computes `first` again
            w.grad = None
        x.add_(1)
        del out
        y = w * second  # is kept: x is not there any more
    y.sum().backward()
    assert torch.equal(w.grad, expected)


def small():
    torch.manual_seed(0)
    return nn.Sequential(Attention(64, 0.1), Mlp(64, 0.1, F.gelu)), torch.randn(2, 16, 64)


def test_two_backwards_and_two_derivatives():
    model, x = small()[0][1], torch.randn(2, 16, 64, requires_grad=True)  # twice differentiable
    results = []
    for context in (None, remat(_everything=True)):
        torch.manual_seed(1)
        if context is not None:
            context.__enter__()
        out = model(x).sin()
        if context is not None:
            context.__exit__(None, None, None)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(out.sum(), x, retain_graph=True)[0])
        (again,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        results.append([first, again.detach(), *torch.autograd.grad(again.square().sum(), x)])
    assert all(map(torch.equal, *results))


def test_exceptions_leave_nothing_behind():
    model, x = small()
    before = torch._C._autograd._top_saved_tensors_default_hooks(True)
    with pytest.raises(RuntimeError, match="shape"), remat():
        model(x[..., :5])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) == before
    with remat(_everything=True) as block:
        loss = model(x).sum()
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert block.figures().recomputed_operators == 0
    with pytest.raises(RuntimeError, match="entered once"):
        block.__enter__()


def test_nested_blocks_and_regions():
    model, x = small()
    torch.manual_seed(1)
    expected = torch.autograd.grad(model[1](model[0](x)).sum(), list(model.parameters()))
    for inner in (remat(_everything=True), None):
        torch.manual_seed(1)
        with remat(_everything=True):
            if inner is None:
                loss = model[1](ms.checkpoint(model[0], x)).sum()
            else:
                with inner:
                    y = model[0](x)
                loss = model[1](y).sum()
        assert all(map(torch.equal, expected, torch.autograd.grad(loss, list(model.parameters()))))


def test_memory_of_many_steps_in_one_block():
    model, x = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def steps(count):
        for _ in range(count):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with remat(_everything=True):
        steps(100)
        assert not host_memory_grows(lambda: steps(300), 1 << 20)


def test_in_backward():
    results = []
    for blocks in (False, True):
        model, x = small()
        optimizer = ms.Adam(model.parameters(), in_backward=True)
        for i in range(3):
            torch.manual_seed(i)
            if blocks:
                with remat(_everything=True):
                    loss = model(x).square().mean()
            else:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *results))
