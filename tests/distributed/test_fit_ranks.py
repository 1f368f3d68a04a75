"""fit() of models that are wrapped for several processes: all take the same technique."""

import functools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fitted_ranks
import pytest
import torch
from fitted_ranks import KINDS, RUNS
from ranks import run_ranks
from sharded_steps import fsdp

import memsave_ext as ms
from memsave_ext.predict import agreement


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, RUNS)


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_before(results, kind):
    plain = results[f"{kind}: plain"]
    for technique in fitted_ranks.TECHNIQUES[1:]:
        if technique and "remat" in technique and not ms._native.available:
            continue  # which keeps everything there, and has no budget
        ranks = results[f"{kind}: {technique}"]
        assert not isinstance(ranks[0], str), ranks[0]
        assert ranks[0][0] == ranks[1][0]  # the technique and its peak, of as large batches
        assert ranks[0][0][0] == (technique or "as built")
        for (_, losses, weights), (_, expected, of_plain) in zip(ranks, plain, strict=True):
            if technique and "Adam" in technique:  # this package's rounds otherwise
                assert losses == pytest.approx(expected, rel=1e-4)
                continue
            assert losses == expected
            assert all(map(torch.equal, weights, of_plain))


def test_what_is_saved_is_predicted(results):
    for kind in KINDS:
        peaks = {
            technique: results[f"{kind}: {technique}"][0][0][1]
            for technique in fitted_ranks.TECHNIQUES[1:3]
        }
        assert peaks["optimizer in backward"] < peaks[None]
    # Of a live model as much as of one that is built in the prediction.
    build = functools.partial(fsdp, depth=fitted_ranks.DEPTH)
    assert results["fsdp2: None"][0][0][1] == ms.memory.predict(build, devices=2).peak


def test_all_take_what_the_neediest_needs(results):
    (peaks, first), (_, second) = results["least_rows"]
    assert peaks[0] < peaks[1]  # as built the first would fit
    assert first[0] == second[0] != "as built"
    assert first[1] < second[1] < peaks[1]


def test_where_nothing_fits_on_one_all_say_so(results):
    first, second = results["nothing_fits"]
    assert "fit: nothing fits on rank 1" in first and "would run out of memory" in first
    assert "Nothing fits. The lowest peak is" in second


def test_where_one_raises_none_waits(results):
    first, second = results["one_fails"]
    assert "fit: rank 1 has raised KeyError: 'of rank 1'" in first
    assert "KeyError: 'of rank 1'" in second


@pytest.mark.skipif(not ms._native.available, reason="without the native part nothing is planned")
def test_first_steps_of_shards_are_planned(results):
    for plans, (peaks, losses, recomputed, said), (plain, expected) in results[
        "first_step_planned"
    ]:
        assert len(plans) == 1 and isinstance(plans[0], int), plans
        assert "went differently" not in said
        assert max(peaks) <= 1.02 * 17.5e6 < min(plain) and recomputed > 0
        assert losses == expected


@pytest.mark.once
@pytest.mark.parametrize("seed", range(20))
def test_they_agree_on_the_cheapest_that_fits_everywhere(monkeypatch, seed):
    """Threads in place of processes, and techniques that fit by chance."""
    rng = random.Random(seed)
    names, world = list("abcdefg"), rng.randint(1, 4)
    fit = [{name for name in names if rng.random() < rng.choice((0.3, 0.7))} for _ in range(world)]
    barrier, told = threading.Barrier(world, timeout=20), [None] * world
    rank = threading.local()

    def all_gather(found, mine):
        told[rank.number] = mine
        barrier.wait()
        found[:] = told
        barrier.wait()

    monkeypatch.setattr(agreement.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(agreement.dist, "all_gather_object", all_gather)

    def found(tried):
        def sentence(who):
            return f"{who}: none"

        cheapest = next((name for name in tried if name in fit[rank.number]), None)
        row = None if cheapest is None else SimpleNamespace(name=cheapest)
        return SimpleNamespace(cheapest=row, sentence=sentence)

    def run(number):
        rank.number = number
        try:
            return agreement.agreed(lambda: found(names), names, found).cheapest.name
        except torch.OutOfMemoryError:
            return None

    with ThreadPoolExecutor(world) as pool:
        taken = list(pool.map(run, range(world)))
    firsts = [next((i for i, name in enumerate(names) if name in one), 7) for one in fit]
    expected = next((n for n in names[max(firsts) :] if all(n in one for one in fit)), None)
    assert taken == [expected] * world
