"""fit() of models that are wrapped for several processes: all take the same technique."""

import datetime
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fitted_ranks
import pytest
import torch
import torch.distributed as dist
from fitted_ranks import KINDS, RUNS, WRONG
from ranks import run_ranks
from sharded_steps import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memsave_ext as ms
from memsave_ext.predict.agreement import Meeting, agreed, check_same


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


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("technique", fitted_ranks.UNEVEN)
def test_a_rank_with_fewer_batches(results, technique, unused):
    """Inside of join(), where a rank without batches reduces zeros, and steps nothing."""
    ranks = results[f"uneven: {technique}: {unused}"]
    for found, expected in zip(ranks, results[f"uneven: None: {unused}"], strict=True):
        assert not isinstance(found, str), found
        assert found[:2] == expected[:2] and len(found[1]) in (3, 9)
        assert all(map(torch.equal, found[2], expected[2]))


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


def meetings(world, store):
    return [Meeting("fit", store, rank, range(world)) for rank in range(world)]


def on_threads(meetings, function):
    """[what it returns or raises with each meeting, at the same time]."""

    def run(meeting):
        try:
            return function(meeting)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(run, meetings))


@pytest.fixture
def store():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=60))
    return store


@pytest.mark.once
@pytest.mark.parametrize("seed", range(20))
def test_they_agree_on_the_cheapest_that_fits_everywhere(seed, store):
    """Threads in place of processes, and techniques that fit by chance."""
    rng = random.Random(seed)
    names, world = list("abcdefg"), rng.randint(1, 4)
    fit = [{name for name in names if rng.random() < rng.choice((0.3, 0.7))} for _ in range(world)]

    def agree(meeting):
        def found(tried):
            cheapest = next((name for name in tried if name in fit[meeting.rank]), None)
            row = None if cheapest is None else SimpleNamespace(name=cheapest)
            return SimpleNamespace(cheapest=row, sentence=lambda who: f"{who}: none")

        with meeting.errors_told():
            return agreed(meeting, lambda: found(names), names, found).cheapest.name

    firsts = [next((i for i, name in enumerate(names) if name in one), 7) for one in fit]
    expected = next((n for n in names[max(firsts) :] if all(n in one for one in fit)), None)
    for _ in range(2):  # they meet again, also where they have not agreed
        taken = on_threads(meetings(world, store), agree)
        if expected is None:
            assert all(isinstance(one, torch.OutOfMemoryError) for one in taken)
        else:
            assert taken == [expected] * world
    # What was told is not kept, but for the last; nor are errors cleared away.
    if expected is not None and hasattr(store, "list_keys"):
        assert len([key for key in store.list_keys() if "calls" not in key]) == 1


@pytest.mark.once
@pytest.mark.parametrize("raising", range(3))
@pytest.mark.parametrize("error", [TypeError("of one"), torch.OutOfMemoryError("of one")])
@pytest.mark.parametrize("told", range(3))
def test_what_one_raises_all_do(store, raising, error, told):
    """After so many meetings."""

    def run(meeting):
        with meeting.errors_told():
            for number in range(told):
                assert meeting.all_gather((meeting.rank, number)) == [(r, number) for r in range(3)]
            if meeting.rank == raising:
                raise error
            meeting.all_gather(None)

    for _ in range(2):
        raised = on_threads(meetings(3, store), run)
        assert raised[raising] is error
        for rank in {0, 1, 2} - {raising}:
            text = f"fit: rank {raising} has raised {type(error).__name__}: of one"
            assert str(raised[rank]) == text
            kind = torch.OutOfMemoryError if "Memory" in text else RuntimeError
            assert type(raised[rank]) is kind
    assert on_threads(meetings(3, store), lambda m: m.all_gather(m.rank)) == [[0, 1, 2]] * 3


@pytest.mark.once
@pytest.mark.parametrize("late", range(2))
def test_none_waits_for_ever(store, late):
    store.set_timeout(datetime.timedelta(seconds=0.3))
    first, second = meetings(2, store)
    there, other = (second, first) if late == 0 else (first, second)
    with pytest.raises(RuntimeError, match=f"fit: rank {late} has not called it within") as raised:
        there.all_gather(1)
    assert "the time limit of the process group. All processes that train" in str(raised.value)
    # Who comes late is told so, and later they meet again.
    store.set_timeout(datetime.timedelta(seconds=60))
    if late == 1:
        with pytest.raises(RuntimeError, match="fit: rank 1 has not called it within"):
            other.all_gather(1)
        assert on_threads(meetings(2, store), lambda m: m.all_gather(m.rank)) == [[0, 1]] * 2


@pytest.mark.once
def test_settings_must_be_the_same(store):
    def run(meeting):
        check_same(meeting, {"technique": None, "micro_batches": 1 + meeting.rank // 2})

    said = "fit: micro_batches must be the same in all processes, got 1 on rank 0 and 2 on rank 2"
    assert [str(one) for one in on_threads(meetings(3, store), run)] == [said] * 3


def test_wrong_use_is_told_on_every_rank(results):
    """[errors of each rank]; no rank has waited for another."""
    for name, (by_one, by_other) in WRONG.items():
        first, second = results[f"wrong: {name}"]
        assert by_one in first and by_other in second, (name, first, second)


def test_what_fits_found_is_applied_to_wrapped_models(results):
    for kind in KINDS:
        for (steps, losses, weights), (_, expected, of_plain) in zip(
            results[f"found: {kind}"], results[f"{kind}: plain"], strict=True
        ):
            assert steps
            assert losses == expected
            assert all(map(torch.equal, weights, of_plain))


def test_budgets_may_differ_and_it_is_said(results):
    (said, of_ranks), (nothing, same) = results["budgets_differ"]
    assert of_ranks == same and [budget for _, budget in of_ranks.values()] == [10**9, 10**8]
    assert "fit: rank 1 has the least left: predicted peak" in said and "95.4 MiB" in said
    assert nothing == ""


def test_processes_that_are_not_there():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    given = {"batch": torch.ones(1, 4), "loss": torch.sum, "budget": "1GB"}
    try:
        with pytest.raises(ValueError, match="fit: the other processes of torch's fake process gr"):
            ms.fit(model, None, **given)
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="fit: the model is wrapped for several processes, and th"):
        ms.fit(model, None, **given)
    with pytest.raises(TypeError, match="fit: model must be a torch.nn.Module, got list"):
        ms.fit([], None, **given)


@pytest.mark.parametrize("kind", ["DeepSpeedEngine", "FullyShardedDataParallel"])
def test_what_shards_in_other_ways_is_refused(kind):
    model = type(kind, (torch.nn.Sequential,), {})(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"fit: .*(FSDP2 instead|FSDP1, which is not supported)"):
        ms.fit(model, None, torch.ones(1, 4), budget="1GB", loss=torch.sum)
