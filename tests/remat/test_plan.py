"""The planner: its simulation against a slow one, its plans against all that there are."""

import itertools
import random
import time

import pytest
from oracles.remat import DROP, DROP_TWICE, KEEP, Call, Content, Step, Trace, droppable
from remat_traces import random_trace

from memsave_ext import _native


def plans_of(trace, **options):
    return _native.module.remat_plans(*trace, **options)


def with_drops(trace, decisions):
    """All decisions, given those of the contents that can be dropped."""
    of = dict(zip(droppable(trace), decisions, strict=True))
    return [of.get(i, KEEP) for i in range(len(trace.contents))]


def all_plans(trace):
    """(peak, seconds, decisions) of every set of drops, the fast ones first."""
    number = len(droppable(trace))
    plans = []
    for bits in range(2**number):
        decisions = with_drops(trace, [DROP if bits >> i & 1 else KEEP for i in range(number)])
        plans += plans_of(trace, decisions=decisions)
    return sorted(plans, key=lambda plan: plan[1])


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_simulation_is_exact(first):
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        trace = random_trace(seed, operators=rng.randint(1, 25))
        drops = [rng.choice([KEEP, DROP, DROP, DROP_TWICE]) for _ in droppable(trace)]
        decisions = with_drops(trace, drops)
        ((peak, seconds, made),) = plans_of(trace, decisions=decisions)
        step = Step(trace, decisions)
        assert (peak, made) == (step.peak, decisions), seed
        assert seconds == pytest.approx(step.seconds), seed


@pytest.mark.parametrize("first", range(0, 50, 25))
def test_plans_are_a_frontier_that_holds(first):
    for seed in range(first, first + 25):
        trace = random_trace(seed, operators=10 + seed)
        plans, can_be_dropped = plans_of(trace), set(droppable(trace))
        assert plans == plans_of(trace), seed
        assert plans[0][2] == with_drops(trace, [KEEP] * len(droppable(trace))), seed
        is_last_resort = max(Step(trace, plans[-1][2]).runs) > 2
        for i, (faster, slower) in enumerate(itertools.pairwise(plans)):
            assert faster[0] > slower[0], seed
            assert faster[1] <= slower[1] or (is_last_resort and i + 2 == len(plans)), seed
        for i, (peak, seconds, decisions) in enumerate(plans):
            step = Step(trace, decisions)
            assert peak == step.peak, seed
            assert seconds == pytest.approx(step.seconds), seed
            assert all(d == KEEP for j, d in enumerate(decisions) if j not in can_be_dropped)
            assert max(step.runs) <= 2 or i + 1 == len(plans), seed


@pytest.mark.parametrize("seed", range(40))
def test_small_graphs_are_planned_as_well_as_by_trying_all(seed):
    trace = random_trace(seed, operators=random.Random(seed).randint(3, 20), most_saved=9)
    plans = plans_of(trace)
    everything = all_plans(trace)
    assert plans[-1][0] <= 1.01 * min(peak for peak, _, _ in everything)
    for peak, seconds, decisions in everything:
        if max(Step(trace, decisions).runs) > 2:
            continue
        (within, *_) = [plan for plan in plans if plan[0] <= peak]
        assert within[1] <= 1.03 * seconds + 1e-12


def chain(operators):
    """Operators of a second each, every one of which reads the result of the one before."""
    last = 2 * operators
    contents = [Content(1, -1, False, -1, -1, -1)]
    contents += [Content(1, i, True, i + 1, last - i - 1, last - i) for i in range(operators)]
    calls = [Call(1.0, [i], [i + 1], []) for i in range(operators)]
    return Trace(contents, calls, [(0, 1)] * (last + 1), operators)


# Half of the operators would have to run again for half of the memory. Long chains get less search.
@pytest.mark.parametrize(
    ("operators", "seconds", "again"), [(1000, 0.5, 0.6), (4000, 1.5, 0.6), (16000, 5.0, 0.9)]
)
def test_long_chains_are_planned_in_bounded_time(operators, seconds, again):
    trace = chain(operators)
    begin = time.process_time()
    plans = plans_of(trace)
    assert time.process_time() - begin < seconds
    assert plans[0][0] >= operators
    (half, *_) = [plan for plan in plans if plan[0] <= plans[0][0] / 2]
    assert half[1] < again * operators
    assert plans[-1][0] < plans[0][0] / 5
