"""Budgets where gradients of earlier steps are there, and many shapes that take turns."""

import warnings

import pytest
import torch
from test_budget import nothing_is_known_yet, wide  # noqa: F401
from torch import nn

import memsave_ext as ms

MOST_KNOWN = 1024


class Tied(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self, width=64, words=400):
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(3)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6))
    return nn.Sequential(*blocks), torch.randn(256, 256)


def gpt():
    torch.manual_seed(0)
    return Tied(), torch.randint(400, (4, 32))


def ratios_of(net, forward, micro_batches, optimizer=None, **options):
    """Peaks by what was promised, and whether each was what track saw; by step and micro-batch."""
    rows = []
    for _ in range(3):
        rows.append([])
        for _ in range(micro_batches):
            with ms.memory.track(net, *([] if optimizer is None else [optimizer])) as track:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of a budget below the least
                    with ms.remat(**options) as block:
                        loss = forward()
                loss.backward()
                del loss
                peak = track.peak
            assert block.peak == peak
            promised = max(block.budget or 0, block.least or 0)
            rows[-1].append(peak / promised if block.least else None)
        if optimizer is not None:
            optimizer.step()
        net.zero_grad(set_to_none=True)
    return rows


@pytest.mark.parametrize("build", [mlp, gpt])
@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_gradients_that_are_added_to(build, micro_batches, share):
    model, x = build()
    options = {"model": model, "budget": share}
    rows = ratios_of(model, lambda: model(x).square().mean(), micro_batches, **options)
    assert max(map(max, rows)) <= 1.02


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("adam", [True, False])
def test_a_block_that_calls_several_modules(micro_batches, adam):
    # None is called that has all the parameters, and plans are chosen when the first is called.
    model, x = mlp()

    def forward():
        y = x * 1.0
        for part in model:
            y = part(y)
        return y.square().mean()

    optimizer = ms.Adam(model.parameters()) if adam else None
    first, *later = ratios_of(model, forward, micro_batches, optimizer, budget=0.5)
    assert first[0] is None
    for row in later:
        assert max(row) <= 1.02


def test_more_shapes_in_turn_than_are_known():
    w = torch.ones(1, requires_grad=True)
    planned = []
    for _ in range(3):
        planned.append(0)
        for size in range(1, MOST_KNOWN + 77):
            with ms.remat(budget=1.0) as block:
                loss = (w * torch.zeros(size)).sin().sum()
            loss.backward()
            if block.least is not None:
                planned[-1] += 1
                last_planned = block  # reports say it where there is a plan
    assert planned[0] == 0 and min(planned[1:]) > MOST_KNOWN // 2
    known, of_them = last_planned._recorder.figures()["shapes"]
    assert known == MOST_KNOWN and of_them > MOST_KNOWN // 2
    told = f"Steps of {known} shapes are known, and {of_them} of them have plans"
    assert told in " ".join(last_planned.report().split())


def test_steps_within_a_budget_and_within_none_take_turns():
    """Each follows its own plan: that of the other is for memory that counts otherwise."""
    model, x = mlp()
    for number in range(6):
        for options in ({}, {"budget": 0.5}):
            model.zero_grad(set_to_none=number == 0)
            with ms.remat(model, **options) as block:
                loss = model(x).square().mean()
            loss.backward()
    assert block._recorder.figures()["shapes"][1] >= 2


@pytest.mark.parametrize("what", ["loss", "backward"])
def test_steps_that_end_in_another_way_take_turns(what):
    """As a critic's losses of real and of made samples, or two heads that are trained in turn."""
    model, x = mlp()
    heads = nn.ModuleList(nn.Linear(256, 1) for _ in range(2))
    plans = []
    for number in range(6):
        for turn in range(2):
            heads.zero_grad(set_to_none=number == 0)
            model.zero_grad(set_to_none=number == 0)
            with ms.remat(nn.ModuleList([model, heads]), budget=0.5) as block:
                y = model(x)
                first, second = (head(y).mean() for head in heads)
                if what == "loss":
                    loss = first + second if turn else -first - second - first
                else:
                    loss = second if turn else first
            loss.backward()
            if number > 1:
                assert block.peak <= 1.02 * max(block.budget, block.least)
            plans.append(block._recorder.budget()["plans"])
    # A plan that is made anew has other seconds.
    assert plans[-1] == plans[-3] and plans[-2] == plans[-4] and len(plans[-1]) > 1


class Writes(nn.Module):
    """Adds rows to what it has just computed; their source is saved only after that."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x):
        rows = torch.arange(0, 512, 2)
        x = x * 1.0
        for linear in self.linears:
            source = linear(x)
            x = (linear(x) * 0.1).sin().index_add_(0, rows, source[:256] * 1.0).mul(source)
        return x


def test_what_is_saved_after_it_was_read():
    torch.manual_seed(0)
    model, x = Writes(), torch.randn(512, 64)
    options = {"model": model, "budget": 0.5}
    _, *later = ratios_of(model, lambda: model(x).square().mean(), 1, **options)
    assert max(map(max, later)) <= 1.02


def handed_back(linear, x):
    """Numpy's view of a value that nobody refers to any more."""
    seen = torch.from_numpy((linear(x) * 1.5).detach().numpy())
    x = (x + seen).tanh()
    return (linear(x) + 1.0).sin()


def half_handed_back(linear, x):
    """DLPack's view of a part of one."""
    y = linear(x) * 1.5
    seen = torch.from_dlpack(y.detach().numpy()[256:])
    return torch.cat([(x[256:] + seen).tanh(), y[:256].cos()])


@pytest.mark.parametrize("block", [handed_back, half_handed_back])
@pytest.mark.parametrize("share", [0.45, 0.3])
def test_memory_that_numpy_or_dlpack_hands_back(block, share):
    torch.manual_seed(0)
    linears, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)), torch.randn(512, 64)

    def forward():
        y = x
        for linear in linears:
            y = block(linear, y)
        return y.square().mean()

    _, *later = ratios_of(linears, forward, 1, model=linears, budget=share)
    assert max(map(max, later)) <= 1.02
