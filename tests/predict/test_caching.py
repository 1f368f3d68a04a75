"""The model of torch's caching allocator: sizes worked out by hand from its rules, and a slow model
beside it. No card has been asked."""

import random

import pytest
import torch
from oracles.caching import MIB, Slow
from torch import nn

import memsave_ext as ms
from memsave_ext.fakes.caching import CachingAllocator


def reserved(expandable, *events):
    """Events: a size allocates, the negative number of an event frees what it allocated."""
    allocator = CachingAllocator(expandable)
    for number, event in enumerate(events, 1):
        if event > 0:
            allocator.allocated(number, event)
        else:
            allocator.freed(-event)
    return allocator.reserved


@pytest.mark.parametrize(
    ("events", "default", "expandable"),
    [
        ((512,), 2 * MIB, 2 * MIB),
        ((MIB,) * 3, 4 * MIB, 4 * MIB),
        ((MIB + 512,), 20 * MIB, 20 * MIB),
        ((5 * MIB,) * 4, 20 * MIB, 20 * MIB),
        ((5 * MIB,) * 5, 40 * MIB, 40 * MIB),
        ((11 * MIB,), 12 * MIB, 20 * MIB),
        ((11 * MIB,) * 10, 120 * MIB, 120 * MIB),
        ((13 * MIB,) * 10, 140 * MIB, 140 * MIB),
        # What is freed is used again, a small one from the rest of a large.
        ((100 * MIB, -1, 60 * MIB, 40 * MIB), 100 * MIB, 100 * MIB),
        ((MIB, MIB, -1, 512, 512), 2 * MIB, 2 * MIB),
        # A rest of at most 1 MiB stays with its block, unless segments expand.
        ((64 * MIB, -1, 63 * MIB, MIB + 512), 84 * MIB, 80 * MIB),
        # Two that lie side by side join in one segment, and never do across two.
        ((20 * MIB, 20 * MIB, -1, -2, 40 * MIB), 80 * MIB, 40 * MIB),
        # Of growing sizes each needs a segment of its own; one that grows is used again.
        ((30 * MIB, -1, 32 * MIB, -3, 34 * MIB, -5, 36 * MIB), 132 * MIB, 40 * MIB),
    ],
    ids=str,
)
def test_by_hand(events, default, expandable):
    assert reserved(False, *events) == default
    assert reserved(True, *events) == expandable


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_beside_the_slow_model(expandable, seed):
    rng = random.Random(seed)
    fast, slow, living = CachingAllocator(expandable), Slow(expandable), []
    for number in range(600):
        if living and rng.random() < 0.48:
            gone = living.pop(rng.randrange(len(living)))
            fast.freed(gone)
            slow.freed(gone)
        else:
            largest = rng.choice([2 * MIB, 2 * MIB, 12 * MIB, 64 * MIB])
            size = 512 * rng.randint(1, largest // 512)
            living.append(number)
            fast.allocated(number, size)
            slow.allocated(number, size)
        assert fast.reserved == slow.reserved
    assert fast.reserved > 100 * MIB


def test_what_was_there_before_is_freed_without_a_word():
    allocator = CachingAllocator(False)
    allocator.freed(1)
    assert allocator.reserved == 0


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.factor = nn.Parameter(torch.empty(size // 4))

    def forward(self):
        return (self.factor * 2).sum()


def scaled():
    """The parameter, its product, whose memory its gradient is in, and numbers."""
    model = Scale(64 * MIB)

    def step():
        model().backward()
        model.factor.grad = None

    return model, None, step


def growing():
    """Each needs a segment of its own, if none grows."""
    model = nn.Linear(2, 2)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        for size in (30, 32, 34, 36):
            torch.empty(size * MIB, dtype=torch.uint8)

    return model, None, step


def test_a_prediction_says_what_is_reserved():
    predicted = ms.memory.predict(scaled, device="cuda")
    assert 128 * MIB < predicted.peak < 129 * MIB
    assert predicted.reserved == (64 + 64 + 2) * MIB
    assert predicted.reserved_expandable == (7 * 20 + 2) * MIB
    assert "the allocator reserves 130 MiB" in " ".join(predicted.report().split())
    assert predicted.to_json()["reserved"] == predicted.reserved
    assert not any("PYTORCH_ALLOC_CONF" in text for text in predicted.remedies())
    on_cpu = ms.memory.predict(scaled)
    assert on_cpu.reserved is on_cpu.reserved_expandable is None
    assert "reserves" not in on_cpu.report()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_fragmentation_costs_and_what_ends_it(monkeypatch, name):
    predicted = ms.memory.predict(growing, device="cuda")
    assert predicted.reserved == (30 + 32 + 34 + 36 + 2) * MIB
    (said,) = predicted.remedies()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment it reserves 42" in said
    monkeypatch.setenv(name, "expandable_segments:True")
    predicted = ms.memory.predict(growing, device="cuda")
    assert predicted.reserved == predicted.reserved_expandable == (40 + 2) * MIB
    assert predicted.remedies() == []


@pytest.mark.usefixtures("few_techniques")
def test_the_budget_is_of_reserved_bytes():
    for budget, fits in ((130 * MIB, True), (130 * MIB - 1, False)):
        row = ms.memory.fits(scaled, budget).rows[0]
        assert (row.reserved, row.fits) == (130 * MIB, fits)
        assert row.peak < row.reserved


def test_memory_from_before_is_reserved():
    """States, a model that ``build`` only returns, another model: as if the step had made them."""

    def made():
        model, teacher = nn.Linear(512, 512), nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            x = torch.ones(64, 512)
            (model(x) - teacher(x).detach()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    expected = ms.memory.predict(made, device="cuda")
    model, optimizer, step = before = made()
    for _ in range(2):
        predicted = ms.memory.predict(lambda: before, device="cuda")
        assert (predicted.peak, predicted.reserved) == (expected.peak, expected.reserved)
        step()  # and with states

    teacher = nn.Linear(512, 512)
    x = torch.ones(64, 512)
    for _ in range(2):
        predicted, alone = (
            ms.memory.predict(model, optimizer, x, loss=torch.sum, device="cuda", others=others)
            for others in ([teacher], [])
        )
        assert predicted.others == predicted.peak - alone.peak > 2**20
        assert predicted.reserved >= predicted.peak
        step()
