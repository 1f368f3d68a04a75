"""The model of torch's caching allocator: sizes worked out by hand from its rules, and a slow model
beside it. No card has been asked."""

import random

import pytest
from oracles.caching import MIB, Slow

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
