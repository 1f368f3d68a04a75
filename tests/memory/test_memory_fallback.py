"""The tracker of pure Python against the native one: the same blocks, phases and figures."""

import time

import pytest
import torch
from helpers import run_threads
from torch import nn
from tracked_programs import PROGRAMS, adam_after, memory_of_before, mlp, train_dense

import memsave_ext as ms
from memsave_ext import _native, _parts
from memsave_ext.checkpoint import forward_records
from memsave_ext.checkpoint import region as region_front
from memsave_ext.checkpoint.fallback import region as fallback_region
from memsave_ext.checkpoint.fallback import surroundings
from memsave_ext.memory import events, fallback
from memsave_ext.memory import figures as track_figures
from memsave_ext.memory.events import ALLOCATED, BEGIN_TRACKING, FREED, Event
from memsave_ext.memory.log import Log

needs_native = pytest.mark.skipif(not _native.available, reason="compares with the native tracker")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    """What the workers of a kernel allocate, only the native tracker sees."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made_by(monkeypatch, native, *args, **kwargs):
    """A track whose tracker is the native one or that of pure Python, however this runs."""
    module = _native.module if native else None
    others = _parts.native
    monkeypatch.setattr(_parts, "native", lambda part: module if part == "memory" else others(part))
    return ms.memory.track(*args, **kwargs)


def figures(track):
    steps = [(s.index, s.peak) for s in track.steps]
    regions = sorted((r.name, r.calls, r.saved_bytes) for r in track.regions)
    live = track.timeline.live
    ends = [live[track.timeline.step == s.index][-1].tolist() for s in track.steps]
    # Blocks of one size are in no order.
    top = sorted(track.top(10_000), key=str)
    return {
        "live": track.live,
        "peak": track.peak,
        "at_peak": track.at_peak,
        "peak_phase": track.peak_phase,
        "peak_step": track.peak_step,
        "steps": steps,
        "regions": regions,
        "ends": ends,
        "top": top,
    }


@needs_native
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_it_says_what_the_native_tracker_says(program, monkeypatch):
    """Of the same run, one inside the other."""
    model, optimizer, step = program()
    outer = made_by(monkeypatch, True, model, optimizer)
    inner = made_by(monkeypatch, False, model, optimizer)
    with outer, inner:
        for _ in range(2):
            step()
    assert figures(inner) == figures(outer)
    if program is memory_of_before:
        return  # pure Python does not see where backward begins, and so their end a little later
    for column in ("live", "phase", "step"):
        assert torch.equal(getattr(inner.timeline, column), getattr(outer.timeline, column)), column
    assert inner.peak > 0


def figures_of_run(monkeypatch, native):
    """With the checkpointing that tells this tracker of its recomputes, and stops them early."""
    module = _native.module if native else None
    run_region = (module or fallback_region).checkpoint_region
    monkeypatch.setattr(region_front, "_run_region", run_region)
    scopes = module or surroundings
    monkeypatch.setattr(forward_records, "_forward_record_scopes", scopes.forward_record_scopes)
    monkeypatch.setattr(forward_records, "_pack_hooks", scopes.pack_hooks)
    torch.manual_seed(0)
    model, optimizer, step = train_dense(
        lambda f, x: ms.checkpoint(f, x, preserve_rng_state=False), size=24
    )
    with made_by(monkeypatch, native, model, optimizer) as t:
        for _ in range(2):
            step()
    return figures(t)


@needs_native
def test_recomputes_of_this_package(monkeypatch):
    native, python = (figures_of_run(monkeypatch, n) for n in (True, False))
    assert len(native["regions"]) == 4
    assert python == native


@needs_native
def test_entered_again_and_peak_reset(monkeypatch):
    model, optimizer, step = adam_after()
    outer = made_by(monkeypatch, True, model, optimizer)
    inner = made_by(monkeypatch, False, model, optimizer)
    with outer, inner:
        step()
    first = figures(inner)
    assert first == figures(outer)
    torch.empty(1000)
    with outer, inner:
        step()
        for track in (outer, inner):
            track.reset_peak()
        step()
        step()
    assert figures(inner) == figures(outer)
    assert [s.index for s in inner.steps] == [2, 3]
    for track in (outer, inner):
        track.reset_peak()
    assert figures(inner) == figures(outer)
    assert inner.peak == inner.live < first["peak"]


def test_inside_the_block_figures_are_those_of_its_beginning(monkeypatch):
    model, x = mlp()
    params = sum(p.nbytes for p in model.parameters())
    with made_by(monkeypatch, False, model) as t:
        model(x).sum().backward()
        assert (t.live, t.peak) == (params, params)
        assert t.at_peak == {**dict.fromkeys(t.at_peak, 0), "parameters": params}
        assert t.regions == []
    assert t.live == 2 * params
    assert t.top(1)[0].line == ""


def test_times_are_of_one_clock(monkeypatch):
    """The profiler has its own: events and marks must be in order, from zero on."""
    model, optimizer, step = adam_after()
    step()
    track = made_by(monkeypatch, False, model, optimizer)
    with track:
        before = time.perf_counter()
        step()
        middle = time.perf_counter()
        time.sleep(0.05)
        step()
        after = time.perf_counter()
    times = track.timeline.time
    assert times[0] == 0
    assert (times.diff() >= 0).all()
    assert times[-1] <= after - before + 0.05
    first, second = (times[track.timeline.step == i] for i in (0, 1))
    assert second[-1] - first[-1] >= 0.05
    assert 0 < first[-1] <= middle - before + 0.05
    assert all(s.seconds > 0 for s in track.steps)


def test_other_threads_do_not_count(monkeypatch):
    model, x = mlp()
    kept = []

    def work(i):
        kept.append(torch.empty(1000))
        model(x).sum().backward()

    track = made_by(monkeypatch, False, model)
    with track:
        model(x).sum().backward()
        run_threads(work, 3)
        mine = torch.empty(10)
    assert len(kept) == 3
    assert len(track.steps) == 1
    assert track.live == 2 * sum(p.nbytes for p in model.parameters()) + mine.nbytes


def test_what_pauses_does_not_count(monkeypatch):
    track = made_by(monkeypatch, False)
    freed = torch.empty(300)
    with track:
        freed = torch.empty(200)
        with track_figures.untracked():
            kept = [torch.empty(1000)]
            with track_figures.untracked():
                del freed  # counts all the same
            kept.append(torch.empty(1000))
        kept.append(torch.empty(10))
    assert (track.live, track.peak) == (40, 800)


def test_one_at_a_time_and_on_its_own_thread():
    def tracker():
        return fallback.ProfilerTracker(CPU, [], 1)

    def refused(_=None):
        for start in (first.start, second.start):
            with pytest.raises(RuntimeError, match="cannot start: this thread is already tracked"):
                start(None)

    def stop(_=None):
        with pytest.raises(RuntimeError, match="cannot stop: it was not started on this thread"):
            first.stop()

    first, second = tracker(), tracker()
    first.stop()  # it was not started: does nothing
    first.start(None)
    refused()
    run_threads(refused, 1)
    run_threads(stop, 1)
    kept = torch.empty(10)
    first.stop()
    assert first.live == kept.nbytes
    assert surroundings.recompute_observer is None
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="torch's profiler"):
        second.start(None)
    second.start(None)
    second.stop()
    assert second.live == 0


def test_a_recompute_that_stops_early_leaves_its_modules(monkeypatch):
    """Its exception passes the hooks at their ends. Without an optimizer a step ends where no
    module is entered yet."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = nn.Sequential(layer)
    f = layer.forward
    layer.forward = lambda x: fallback_region.checkpoint_region(
        f, f, (x,), {}, False, early_stop=True, check_determinism=True, on_error=None
    )
    with made_by(monkeypatch, False, model) as t:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    assert [s.index for s in t.steps] == [0, 1, 2]
    # Of the tanh alone, which is the last tensor saved; its argument goes with it.
    (region,) = t.regions
    assert (region.name, region.calls) == ("0", 3)


def test_labelled_memory_that_moves(monkeypatch):
    """The end of memory from before has no event: it is looked for when something begins."""
    layer = nn.Linear(10, 10, bias=False)
    layer.register_buffer("table", torch.zeros(100))
    track = made_by(monkeypatch, False, layer)
    with track:
        layer.table.untyped_storage().resize_(4000)
        layer(torch.ones(1, 10))
        layer.weight.data = torch.zeros(10, 20)[:, :10]
        layer(torch.ones(1, 10))
    assert track.live == 4000 + 800
    assert track.timeline.live.sum(1)[0] == 800


def test_on_a_device_figures_are_its_allocators_own():
    """No device is needed for the rules: what is told is made up."""

    def event(time, kind, address, size, total):
        return Event(kind, 7, 0, time, events.NOT_IN_BACKWARD, address, size, total)

    log = Log([], 1000)
    log.read(
        [
            event(1, BEGIN_TRACKING, 0, 0, 1000),
            event(2, ALLOCATED, 0xA, 100, 1100),
            event(3, ALLOCATED, 0xB, 50, 1400),  # another thread allocated 250
            event(4, FREED, 0xC, 0, 1300),  # of before
            event(5, FREED, 0xC, 0, 1300),  # nothing changed
            event(6, ALLOCATED, 0xA, 70, 1370),  # its end was not told
            event(7, FREED, 0xA, 0, 1200),
        ]
    )
    record = log.record()
    assert (log.total, log.peak) == (1200, 1400)
    time, step, block, change, phase, total = record.changes.t().tolist()
    assert time == [1, 2, 3, 4, 6, 6, 7]
    assert block == [-1, 0, 1, -1, 0, 2, 2]
    assert change == [2, 1, 1, -1, -1, 1, -1]
    assert total == [1000, 1100, 1400, 1300, 1300, 1370, 1200]
    assert step == phase == [0] * 7
    assert record.blocks[:, 0].tolist() == [100, 50, 70]
