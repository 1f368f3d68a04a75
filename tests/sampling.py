"""Which of the cases of a test are run: every one with --full, a sample of them without.

A sample has every value of every parameter. With the native part it also has each two values of
two parameters together, but of tests that are marked with each_value, where a case takes long.
"""

import itertools
from collections import Counter
from contextlib import contextmanager

import pytest

from memsave_ext import _native
from memsave_ext.predict import fit
from memsave_ext.predict.fits import search
from memsave_ext.predict.techniques import ALL

# One of each kind, among them those with the least and the most that they change.
FEW_TECHNIQUES = {
    "as built", "optimizer in backward", "Adam in backward", "loss head in chunks",
    "remat within the budget", "remat within the budget, offload", "checkpoint by block",
    "checkpoint by block, optimizer in backward",
    "checkpoint by block, Adam in backward, 4-bit states",
}  # fmt: skip

full = False  # whether pytest was started with --full; tests/conftest.py sets it


def some(values, count):
    """``count`` of ``values``, the first, the last and others between them; all with --full.

    For what a test sweeps by itself, as seeds and sizes.
    """
    values = list(values)
    if full or count >= len(values):
        return values
    return [values[place * (len(values) - 1) // max(count - 1, 1)] for place in range(count)]


def share(values, of, place=0):
    """One in ``of`` of ``values``; all with --full. Tests that name other places have others."""
    return list(values) if full else list(values)[place::of]


@contextmanager
def few_techniques():
    """Inside of it ``fits`` and ``fit`` try few techniques; all with --full. For tests of what they
    do with any technique, as each is a process that runs the step."""
    few = [t for t in ALL if full or t.name in FEW_TECHNIQUES]
    assert full or len(few) == len(FEW_TECHNIQUES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(search.__kwdefaults__, "among", few)
        patch.setattr(fit, "_WITHIN", [t for t in few if not t.remat])
        yield


def sampled(items):
    """Returns the tests among ``items`` to run: of each function that is parametrized more than
    once a sample of the combinations, the same each time."""
    of_function = {}
    for item in items:
        of_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for cases in of_function.values():
        kept.update(_covering(cases) if len(cases) > 1 else cases)
    return [item for item in items if item in kept]


def _covering(cases):
    """The first of ``cases``, and always the one that has most of what those before it have not;
    of several the one whose values were there least often."""
    running = [case for case in cases if not _is_skipped(case)] or cases[:1]
    # An identifier for each parametrize(), whatever number of arguments it gives.
    values = [tuple(enumerate(case.callspec._idlist)) for case in running]
    few = not _native.available or running[0].get_closest_marker("each_value")
    together = min(1 if few else 2, len(values[0]))
    left_of = [set(itertools.combinations(value, together)) for value in values]
    left = set().union(*left_of)
    chosen, times = [], Counter()

    def worth(place):
        return len(left_of[place] & left), -sum(times[value] for value in values[place])

    while left:
        best = max(range(len(running)), key=worth)
        chosen.append(running[best])
        left -= left_of[best]
        times.update(values[best])
    return chosen


def is_without(item):
    """Whether there is no such case, as ``@pytest.mark.without(case=...)`` says of its values."""
    return any(mark.kwargs["case"](item.callspec.params) for mark in item.iter_markers("without"))


def _is_skipped(case):
    skips = case.iter_markers("skipif")
    return case.get_closest_marker("skip") or any(mark.args[0] for mark in skips)
