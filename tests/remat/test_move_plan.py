"""Plans that move contents, against the slow model of a step, and against all that there are."""

import itertools
import math
import random

import pytest
from oracles.remat import DROP, DROP_TWICE, KEEP, MOVE, MOVE_TWICE, Call, Step, Trace, droppable
from remat_traces import random_trace
from sampling import some

from memsave_ext import _native

ALL = 2**62
UNIT = 64 << 10  # what is smaller is not moved


def large(seed, operators, **options):
    trace = random_trace(seed, operators, **options)
    contents = [c._replace(bytes=c.bytes * UNIT) for c in trace.contents]
    calls = [c._replace(temporary=c.temporary * UNIT) for c in trace.calls]
    return Trace(
        contents, calls, [(now * UNIT, peak * UNIT) for now, peak in trace.moments], trace.forward
    )


def plans_of(trace, out=1e9, back=1e9, most_moved=ALL):
    return _native.module.remat_moving_plans(*trace, out, back, most_moved)


def movable(trace):
    return [
        i for i, c in enumerate(trace.contents) if c.saved and c.let_go >= 0 and c.bytes >= UNIT
    ]


def bytes_moved(trace, decisions):
    return sum(c.bytes for c, d in zip(trace.contents, decisions, strict=True) if d >= MOVE)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_simulation_is_exact(first):
    brought_back = 0
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        trace = large(seed, rng.randint(1, 25))
        decisions = [KEEP] * len(trace.contents)
        for i in droppable(trace):
            decisions[i] = rng.choice([KEEP, DROP, DROP_TWICE])
        for i in movable(trace):
            decisions[i] = rng.choice([decisions[i], MOVE, MOVE_TWICE])
        ((peak, seconds, made),) = _native.module.remat_plans(*trace, decisions=decisions)
        step = Step(trace, decisions)
        assert (peak, made) == (step.peak, decisions), seed
        assert seconds == pytest.approx(step.seconds), seed
        brought_back += sum(step.backs)
    assert brought_back > 300


@pytest.mark.parametrize("first", some([0, 20], 1))
def test_plans_are_a_frontier_that_holds(first):
    moving = lower = early = 0
    for seed in range(first, first + 20):
        trace = large(seed, 10 + seed % 30)
        alone = _native.module.remat_plans(*trace)
        plans = plans_of(trace)
        assert plans == plans_of(trace), seed
        for (faster, *_), (slower, *_) in itertools.pairwise(plans):
            assert faster[0] > slower[0] and faster[1] <= slower[1], seed
        for (peak, seconds, decisions), waiting, back in plans:
            step = Step(trace, decisions, back)
            assert peak == step.peak, seed
            early += step.peak > Step(trace, decisions).peak
            assert not step.coming and all(decisions[i] >= MOVE for _, i in back), seed
            assert seconds == pytest.approx(step.seconds + waiting), seed
            for content, decision in zip(trace.contents, decisions, strict=True):
                assert decision < MOVE or (content.saved and content.let_go >= 0), seed
            moving += bytes_moved(trace, decisions) > 0
        # One that runs operators more than twice may take less time than those before it.
        assert plans[-1][0][0] <= alone[-1][0] or alone[-1][1] < alone[-2][1], seed
        lower += plans[-1][0][0] < alone[-1][0]
    assert moving > 100 and lower > 10 and early > 10


@pytest.mark.parametrize("seed", range(20))
def test_small_graphs_are_planned_as_well_as_by_trying_all(seed):
    """On a bus that takes no time, so that every plan costs what the host does."""
    trace = large(seed, random.Random(seed).randint(3, 12), most_saved=6)
    can_drop, can_move = droppable(trace), movable(trace)
    ways = [
        [KEEP] + [DROP] * (i in can_drop) + [MOVE] * (i in can_move)
        for i in range(len(trace.contents))
    ]
    plans = plans_of(trace, 1e18, 1e18)
    least = math.inf
    for decisions in itertools.product(*ways):
        step = Step(trace, list(decisions))
        least = min(least, step.peak)
        if max(step.runs + step.backs) > 2:
            continue
        (within, *_) = [plan for plan, *_ in plans if plan[0] <= step.peak]
        assert within[1] <= 1.03 * step.seconds + 1e-12
    assert plans[-1][0][0] <= 1.01 * least


def test_no_more_is_moved_than_may_be():
    for seed in range(10):
        trace = large(seed, 30)
        for most in (0, 20 * UNIT, 60 * UNIT):
            for (_, _, decisions), *_ in plans_of(trace, most_moved=most):
                assert bytes_moved(trace, decisions) <= most


def test_a_faster_bus_is_waited_for_less():
    waiting = []
    for speed in (1e7, 1e9, 1e11):
        plans = [plan for seed in range(10) for plan in plans_of(large(seed, 30), speed, speed)]
        moves = [(p, wait) for p, wait, _ in plans if any(d >= MOVE for d in p[2])]
        assert moves and all(wait >= 0 for _, wait in moves)
        waiting.append(sum(wait for _, wait in moves) / len(moves))
    assert waiting[0] > waiting[1] > waiting[2]


def test_a_store_without_speed_is_not_used():
    trace = large(3, 30)
    alone = _native.module.remat_plans(*trace)
    assert [plan for plan, *_ in plans_of(trace, 0.0, 0.0)] == alone


def layers(number, size=1 << 20, seconds=1e-3):
    """A chain of operators that take long, of which backward needs each result once."""
    last = 2 * number
    contents = [(size, -1, False, -1, -1, -1)]
    contents += [(size, i, True, i + 1, last - i - 1, last - i) for i in range(number)]
    calls = [Call(seconds, [i], [i + 1], []) for i in range(number)]
    return Trace(contents, calls, [(0, size)] * (last + 1), number)


@pytest.mark.parametrize("size", [(64 << 10) - 1, 64 << 10])
def test_what_is_smaller_than_64_kib_is_not_moved(size):
    plans = plans_of(layers(40, size))
    moves = any(d >= MOVE for (_, _, decisions), *_ in plans for d in decisions)
    assert plans and moves == (size == 64 << 10)


def test_an_idle_bus_takes_no_time():
    trace = layers(40)
    alone = _native.module.remat_plans(*trace)
    # A copy takes a tenth of an operator's time each way.
    plans = plans_of(trace, 1e10, 1e10)
    budget = alone[0][0] // 4
    recomputing = min(seconds for peak, seconds, _ in alone if peak <= budget)
    moving, waiting = next((p, wait) for p, wait, _ in plans if p[0] <= budget)
    assert recomputing > 20e-3
    assert moving[1] < 2e-3 and waiting < 1e-3
    assert bytes_moved(trace._replace(contents=[_Sized(c[0]) for c in trace.contents]), moving[2])


def test_a_slow_bus_is_left_to_what_takes_longer():
    trace = layers(40)
    plans = plans_of(trace, 1e8, 1e8)  # a copy takes ten times as long as its operator
    alone = _native.module.remat_plans(*trace)
    for budget in (alone[0][0] // 2, alone[0][0] // 4):
        recomputing = min(seconds for peak, seconds, _ in alone if peak <= budget)
        both = next(p for p, *_ in plans if p[0] <= budget)
        assert both[1] <= recomputing
        assert math.isfinite(both[1])


def test_what_leaves_slowly_is_waited_for_where_its_memory_is_needed():
    number, size, seconds, out = 40, 1 << 20, 1e-3, 1e8  # a copy out takes ten operators' time
    trace = layers(number, size, seconds)
    # Nothing can be recomputed.
    contents = [(*content[:1], -1, *content[2:]) for content in trace.contents]
    calls = [Call(seconds, [i], [], []) for i in range(number)]
    trace = Trace(contents, calls, trace.moments, number)
    plans = plans_of(trace, out, 1e18)
    assert len(plans) > 10
    for (peak, _, decisions), waiting, _ in plans:
        moved = sum(c[0] for c, d in zip(contents, decisions, strict=True) if d >= MOVE)
        # At the end of the forward all the rest is there, and what may linger within the peak.
        gone = number * size - peak
        assert moved >= gone
        assert waiting >= gone / out - number * (seconds + 1e-4)


class _Sized:
    def __init__(self, size):
        self.bytes = size
