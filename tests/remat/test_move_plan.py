"""Plans that move contents, against the slow model of a step in which moving is dropping."""

import itertools
import math

import pytest
from oracles.remat import DROP, DROP_TWICE, KEEP, Call, Step, Trace
from remat_traces import random_trace
from sampling import some

from memsave_ext import _native

MOVE, MOVE_TWICE = 3, 4
AS_DROPPED = {KEEP: KEEP, DROP: DROP, DROP_TWICE: DROP_TWICE, MOVE: DROP, MOVE_TWICE: DROP_TWICE}
ALL = 2**62
UNIT = 64 << 10  # what is smaller is not moved


def large(seed, operators):
    trace = random_trace(seed, operators)
    contents = [c._replace(bytes=c.bytes * UNIT) for c in trace.contents]
    calls = [c._replace(temporary=c.temporary * UNIT) for c in trace.calls]
    return Trace(
        contents, calls, [(now * UNIT, peak * UNIT) for now, peak in trace.moments], trace.forward
    )


def plans_of(trace, out=1e9, back=1e9, most_moved=ALL):
    return _native.module.remat_moving_plans(*trace, out, back, most_moved)


def as_dropped(trace, decisions):
    """The step in which each moved content has a call of its own, which reads nothing."""
    moved = {i for i, decision in enumerate(decisions) if decision >= MOVE}
    contents, calls = list(trace.contents), []

    def add(content):
        contents[content] = contents[content]._replace(call=len(calls))
        calls.append(Call(2e-5, [], [content], []))

    read = {}
    for number, call in reversed(list(enumerate(trace.calls))):
        read |= dict.fromkeys(call.reads, number)
    for number, call in enumerate([*trace.calls, None]):
        for i in sorted(moved):
            if trace.contents[i].call < 0 and read.get(i, len(trace.calls)) == number:
                add(i)
        if call is None:
            break
        kept = [(j, made) for j, made in enumerate(call.makes) if made not in moved]
        gone = sum(trace.contents[made].bytes for made in call.makes if made in moved)
        for _, made in kept:
            if contents[made].call >= 0:
                contents[made] = contents[made]._replace(call=len(calls))
        writes = [call.writes[j] for j, _ in kept if j < len(call.writes)]
        makes = [made for _, made in kept]
        calls.append(Call(call.seconds, call.reads, makes, writes, call.temporary + gone))
        for i in sorted(moved):
            if trace.contents[i].call == number:
                add(i)
    made = Trace(contents, calls, trace.moments, trace.forward)
    return Step(made, [AS_DROPPED[decision] for decision in decisions])


def bytes_moved(trace, decisions):
    return sum(c.bytes for c, d in zip(trace.contents, decisions, strict=True) if d >= MOVE)


@pytest.mark.parametrize("first", some([0, 20], 1))
def test_plans_are_a_frontier_that_holds(first):
    moving = lower = 0
    for seed in range(first, first + 20):
        trace = large(seed, 10 + seed % 30)
        alone = _native.module.remat_plans(*trace)
        plans = plans_of(trace)
        assert plans == plans_of(trace), seed
        for (faster, _), (slower, _) in itertools.pairwise(plans):
            assert faster[0] > slower[0] and faster[1] <= slower[1], seed
        for (peak, seconds, decisions), waiting in plans:
            step = as_dropped(trace, decisions)
            assert peak == step.peak, seed
            assert seconds == pytest.approx(step.seconds + waiting), seed
            for content, decision in zip(trace.contents, decisions, strict=True):
                assert decision < MOVE or (content.saved and content.let_go >= 0), seed
            moving += bytes_moved(trace, decisions) > 0
        # One that runs operators more than twice may take less time than those before it.
        assert plans[-1][0][0] <= alone[-1][0] or alone[-1][1] < alone[-2][1], seed
        lower += plans[-1][0][0] < alone[-1][0]
    assert moving > 100 and lower > 10


def test_no_more_is_moved_than_may_be():
    for seed in range(10):
        trace = large(seed, 30)
        for most in (0, 20 * UNIT, 60 * UNIT):
            for (_, _, decisions), _ in plans_of(trace, most_moved=most):
                assert bytes_moved(trace, decisions) <= most


def test_a_faster_bus_is_waited_for_less():
    waiting = []
    for speed in (1e7, 1e9, 1e11):
        plans = [plan for seed in range(10) for plan in plans_of(large(seed, 30), speed, speed)]
        moves = [(p, wait) for p, wait in plans if any(d >= MOVE for d in p[2])]
        assert moves and all(wait >= 0 for _, wait in moves)
        waiting.append(sum(wait for _, wait in moves) / len(moves))
    assert waiting[0] > waiting[1] > waiting[2]


def test_a_store_without_speed_is_not_used():
    trace = large(3, 30)
    alone = _native.module.remat_plans(*trace)
    assert [plan for plan, _ in plans_of(trace, 0.0, 0.0)] == alone


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
    moves = any(d >= MOVE for (_, _, decisions), _ in plans for d in decisions)
    assert plans and moves == (size == 64 << 10)


def test_an_idle_bus_takes_no_time():
    trace = layers(40)
    alone = _native.module.remat_plans(*trace)
    # A copy takes a tenth of an operator's time each way.
    plans = plans_of(trace, 1e10, 1e10)
    budget = alone[0][0] // 4
    recomputing = min(seconds for peak, seconds, _ in alone if peak <= budget)
    moving, waiting = next((p, wait) for p, wait in plans if p[0] <= budget)
    assert recomputing > 20e-3
    assert moving[1] < 2e-3 and waiting < 1e-3
    assert bytes_moved(trace._replace(contents=[_Sized(c[0]) for c in trace.contents]), moving[2])


def test_a_slow_bus_is_left_to_what_takes_longer():
    trace = layers(40)
    plans = plans_of(trace, 1e8, 1e8)  # a copy takes ten times as long as its operator
    alone = _native.module.remat_plans(*trace)
    for budget in (alone[0][0] // 2, alone[0][0] // 4):
        recomputing = min(seconds for peak, seconds, _ in alone if peak <= budget)
        both = next(p for p, _ in plans if p[0] <= budget)
        assert both[1] <= recomputing
        assert math.isfinite(both[1])


class _Sized:
    def __init__(self, size):
        self.bytes = size
