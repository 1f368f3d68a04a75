"""What memory.track() counts: the allocations of which threads, between which moments."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from sampling import some
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.memory import tracking

native_only = pytest.mark.skipif(
    not _native.available, reason="in pure Python it is torch's profiler, one for each thread"
)
python_only = pytest.mark.skipif(
    _native.available, reason="natively they do not exclude each other"
)


def test_live_and_peak():
    with ms.memory.track() as t:
        a = torch.empty(1000)
        b = torch.empty(500, dtype=torch.float64)
        del a
    assert (t.live, t.peak) == (4000, 8000)
    with t:
        del b
    assert (t.live, t.peak) == (0, 8000)


def test_a_training_step():
    """Live after a step: the gradients. Peak: activations and gradients on top of each other."""
    n = 128
    model = nn.Sequential(*[nn.Linear(n, n, bias=False) for _ in range(4)])
    x = torch.randn(64, n)
    with ms.memory.track() as t:
        model(x).sum().backward()
    gc.collect()
    assert t.live == 4 * n * n * 4
    activations = 3 * x.nbytes  # the inputs of the last three layers
    assert activations + t.live / 4 < t.peak <= activations + t.live + 4 * x.nbytes


def test_memory_from_before_does_not_count():
    before = torch.empty(100)
    with ms.memory.track() as t:
        del before
    assert (t.live, t.peak) == (0, 0)


def test_addresses_are_used_again():
    """Blocks freed between two entries must not be mistaken for others at their address."""
    t = ms.memory.track()
    for _ in range(50):
        with t:
            block = torch.empty(1000)
        del block
        before = torch.empty(500)
        with t:
            del before
    assert 0 <= t.live <= t.peak <= 50 * 4000
    with t:
        kept = [torch.empty(1000) for _ in range(50)]
    assert t.live >= sum(k.nbytes for k in kept)


def test_entered_again():
    t = ms.memory.track()
    kept = []
    for _ in range(3):
        with t:
            kept.append(torch.empty(10))
        torch.empty(1000)
    assert (t.live, t.peak) == (120, 120)


def test_reset_peak():
    with ms.memory.track() as t:
        torch.empty(1000)
        kept = torch.empty(10)
    t.reset_peak()
    assert t.peak == t.live == kept.nbytes
    assert sum(t.at_peak.values()) == t.peak


def test_exceptions_leave_nothing_installed():
    def fail():
        with ms.memory.track():
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert tracking.running() == []
    with ms.memory.track() as t:
        kept = torch.empty(1)
    assert t.live == kept.nbytes


def test_a_track_runs_once_at_a_time():
    t = ms.memory.track()
    with pytest.raises(RuntimeError, match="cannot stop: this track is not running"):
        t.__exit__(None, None, None)
    with t:
        with pytest.raises(RuntimeError, match="cannot start: this track is running already"):
            t.__enter__()
        kept = torch.empty(5)
    assert t.live == kept.nbytes


@native_only
def test_nested():
    with ms.memory.track() as outer:
        a = torch.empty(100)
        with ms.memory.track() as inner:
            b = torch.empty(10)
            del a
        torch.empty(50)
    assert (inner.live, inner.peak) == (b.nbytes, b.nbytes)
    assert (outer.live, outer.peak) == (b.nbytes, 440)


@native_only
def test_overlapping():
    first, second = ms.memory.track(), ms.memory.track()
    first.__enter__()
    a = torch.empty(10)
    second.__enter__()
    b = torch.empty(20)
    first.__exit__(None, None, None)
    c = torch.empty(30)
    second.__exit__(None, None, None)
    assert (first.live, second.live) == (a.nbytes + b.nbytes, b.nbytes + c.nbytes)


@native_only
def test_every_thread_counts():
    kept = []
    with ms.memory.track() as t:
        threads = [threading.Thread(target=lambda: kept.append(torch.empty(100))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (t.live, t.peak) == (3200, 3200)


@native_only
def test_freed_by_another_thread_and_left_on_another_thread():
    t = ms.memory.track()
    t.__enter__()
    kept = [torch.empty(100)]

    def work():
        kept.clear()
        t.__exit__(None, None, None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (t.live, t.peak) == (0, 400)


@native_only
def test_many_threads_start_and_stop_while_others_allocate():
    """Nothing is lost, mixed up or deadlocked."""
    wrong = []

    def work(k):
        for _ in range(30):
            with ms.memory.track() as t:
                block = torch.empty(1000 + k)
                at_least = t.live
                del block
            if not (block_bytes := 4 * (1000 + k)) <= at_least or t.peak < block_bytes:
                wrong.append((k, at_least, t.peak))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    with ms.memory.track() as outer:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert outer.live == 0


@native_only
def test_blocks_that_outlive_the_tracking():
    """They free themselves as ever, when nothing or another track looks on."""
    with ms.memory.track():
        a, b = torch.ones(1000), torch.ones(1000)
    del a
    with ms.memory.track() as t:
        b.resize_(5000)
        assert b[:1000].eq(1).all()
    c = b.clone()
    del b
    assert c[:1000].eq(1).all()
    assert t.peak >= 20_000


@native_only
def test_lazy_copies_and_foreign_memory():
    with ms.memory.track() as t:
        a = torch.ones(1000)
        copy = torch._lazy_clone(a)
        assert t.live == 4000
        copy[0] = 2
        assert t.live == 8000
        from_numpy = torch.from_numpy(a.numpy())  # no memory of its own
        assert t.live == 8000
    assert from_numpy[0] == 1
    assert copy[0] == 2


@native_only
def test_beside_torchs_profiler():
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with profiler, ms.memory.track() as t:
        kept = torch.empty(1000)
    assert t.live == kept.nbytes
    assert any(event.cpu_memory_usage == kept.nbytes for event in profiler.function_events)
    with ms.memory.track() as t, torch.autograd.profiler.profile(profile_memory=True):
        kept = torch.empty(1000)
    assert t.live == kept.nbytes


def _in_child(pipe):
    pipe.send(torch.ones(1000).sum().item())


@native_only
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_inside():
    """The child of a DataLoader neither waits for a lock nor tracks."""
    stop = threading.Event()

    def allocate():
        while not stop.is_set():
            torch.empty(10)

    thread = threading.Thread(target=allocate)
    context = multiprocessing.get_context("fork")
    with ms.memory.track() as t:
        thread.start()
        for _ in range(10):
            here, there = context.Pipe()
            child = context.Process(target=_in_child, args=(there,))
            child.start()
            assert here.poll(60), "the child hangs"
            assert here.recv() == 1000
            child.join()
        stop.set()
        thread.join()
    assert t.live == 0


@native_only
@pytest.mark.once
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_while_large_memory_is_allocated():
    """As of workers, beside threads that load data for an optimizer that steps in backward."""
    optimizer = ms.AdamW([nn.Parameter(torch.ones(4))], in_backward=True)
    stop = threading.Event()

    def allocate():
        while not stop.is_set():
            torch.empty(1 << 18)

    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            if (pid := os.fork()) == 0:
                torch.empty(1 << 18)
                os._exit(0)
            until = time.monotonic() + 60
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    pytest.fail("the child hangs")
                time.sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert optimizer.in_backward


@pytest.mark.once
def test_a_program_may_end_while_events_are_read():
    """They are read by a thread of their own, where there are many."""
    program = """
        import sys, torch, memsave_ext as ms
        with ms.memory.track() as t:
            for _ in range(int(sys.argv[1])):
                torch.empty(10)
    """
    running = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), str(count)])
        for count in some(range(50_000, 56_000, 2_000), 2)
    ]
    assert [process.wait(120) for process in running] == [0] * len(running)


@python_only
def test_it_cannot_be_nested():
    with (
        ms.memory.track() as outer,
        pytest.raises(RuntimeError, match="cannot start: this thread is already tracked"),
        ms.memory.track(),
    ):
        pass
    assert outer.live == 0
    assert tracking.running() == []


@python_only
def test_it_cannot_start_inside_the_profiler():
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with profiler, pytest.raises(RuntimeError, match="torch's profiler"), ms.memory.track():
        pass
    assert tracking.running() == []


def test_python_autograd_functions_run_inside():
    """torch reads the profiler's configuration at every one of them."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(5, requires_grad=True)
    with ms.memory.track() as t:
        Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 2.0))
    assert t.peak > 0


@native_only
def test_torch_does_not_take_it_for_its_profiler():
    with ms.memory.track():
        assert not torch._C._autograd._profiler_enabled()


@native_only
def test_usage_on_the_cpu():
    with pytest.raises(RuntimeError, match="keeps no figures"):
        ms.memory.usage("cpu")
    with ms.memory.track() as outer:
        torch.empty(1000)
        with ms.memory.track():
            kept = torch.empty(10)
            assert ms.memory.usage() == ms.memory.Usage(kept.nbytes, 4000, None)
    assert outer.peak == 4000
    for wrong in ("meta", "gpu"):
        with pytest.raises(ValueError, match=f"usage: device must be the CPU.*, got '{wrong}'"):
            ms.memory.usage(wrong)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module or None, got int"),
        ({"model": nn.LazyLinear(4)}, ValueError, "track: parameters of this LazyLinear have no"),
        ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer, .*, got int"),
        ({"optimizer": ["x"]}, TypeError, "optimizer must be .*, got str"),
        ({"device": "meta"}, ValueError, "device must be the CPU or a CUDA device, got 'meta'"),
        ({"device": "gpu"}, ValueError, "track: device must be the CPU or a CUDA device, got"),
        ({"device": []}, ValueError, "track: device must be the CPU or a CUDA device, got"),
        ({"stacks": "x"}, TypeError, "stacks must be True or False, got 'x'"),
        ({"max_events": 0}, ValueError, "max_events must be a positive int, got 0"),
        ({"max_events": 1.5}, ValueError, "max_events must be a positive int, got 1.5"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ms.memory.track(**arguments)


@pytest.mark.parametrize("stacks", [False, True])
def test_left_on_another_thread_it_can_still_be_left(stacks):
    """Natively with stacks: one thread's operators are watched."""
    if _native.available and not stacks:
        pytest.skip("any thread can leave it")
    t = ms.memory.track(stacks=stacks)
    t.__enter__()
    errors = []

    def leave():
        with pytest.raises(RuntimeError, match="it was not started on this thread") as caught:
            t.__exit__(None, None, None)
        errors.append(caught)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(errors) == 1
    t.__exit__(None, None, None)
    with ms.memory.track():
        pass
