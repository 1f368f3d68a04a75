"""The tracker's lock and the allocator's, taken by several threads; what lies elsewhere."""

import faulthandler
import random
import sys
import threading
import time

import checked_streams
import fake_cuda
import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext.memory.tracker import NativeTracker

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def tracker():
    tracker = NativeTracker(DEVICE, [], True, 1000)
    tracker.start(0)
    # Where threads wait for each other.
    faulthandler.dump_traceback_later(10, exit=True, file=checked_streams.STDERR)
    yield tracker
    faulthandler.cancel_dump_traceback_later()
    tracker.stop()


def test_the_allocator_is_not_called_by_what_it_reports_to(seed, tracker):
    """This thread's allocations are reported; the other one frees what the reports look for."""
    count = random.Random(seed).randint(500, 2000)
    done = threading.Event()

    def allocate_and_free():
        for _ in range(3):
            tensors = [torch.empty(1, device=DEVICE) for _ in range(count)]
            tracker.label(tensors, 0, [0] * count)
            while tensors:
                tensors.pop()
        done.set()

    thread = threading.Thread(target=allocate_and_free, daemon=True)
    thread.start()
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    while not done.is_set():
        (x * 2).exp().sum().backward()
    thread.join()


def test_threads_do_not_wait_for_each_other(seed, tracker):
    """One thread looks whether memory is still there that a backward of this one frees.

    The one has the tracker's lock and may be the last to hold a storage, whose memory the allocator
    takes back; the other one's allocations are reported with the allocator's lock held.
    """
    chance = random.Random(seed)
    done = threading.Event()
    # So large that it takes a while to free what an operation has saved, after it has allocated.
    x = torch.ones(1 << 16, device=DEVICE, requires_grad=True)

    def look():
        while not done.is_set():
            assert tracker.live >= 0
            time.sleep(chance.random() * 2e-4)  # in which the backward comes on

    for _ in range(3):
        y = unreported(lambda: results(x, chance.randint(5, 20), tracker))
        done.clear()
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        y.sum().backward()
        done.set()
        thread.join()


@pytest.fixture
def keeps_the_gil():
    """A thread that has the GIL keeps it until it waits."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def test_a_report_takes_no_storage(tracker, keeps_the_gil):
    """The engine's thread reports with the allocator's lock held, while another has the GIL.

    A report that took the storages it looks for would need the GIL for the one that Python alone
    holds. By then it would be the last to hold the others, which the allocator takes back.
    """
    storages = unreported(lambda: [torch.empty(1, device=DEVICE) for _ in range(4)])
    tracker.label(storages, 0, [0] * 4)
    of_python = storages.pop().untyped_storage()
    last = storages[-1].untyped_storage()._cdata
    holders = torch._C._storage_Use_Count(last)
    y = torch.ones(4, device=DEVICE, requires_grad=True).exp()
    gradient = torch.ones_like(y)
    has_ended = []

    def free():
        fake_cuda.wait_until_it_has_stopped()
        limit = time.monotonic() + 5
        while not (ended := fake_cuda.let_it_end(seconds=0.01)) and time.monotonic() < limit:
            if torch._C._storage_Use_Count(last) > holders:
                storages.clear()
                break
        has_ended.append(ended)

    fake_cuda.stop_next_allocation()
    thread = threading.Thread(target=free, daemon=True)
    thread.start()
    y.backward(gradient)
    thread.join()
    assert has_ended == [True], "a report waits for the GIL"
    assert of_python.nbytes() == 4


def test_statistics_are_asked_for_without_a_lock(tracker):
    """Of the allocator, whose lock another thread may have that reports to a tracker."""
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    with fake_cuda.lock_of_stats_checked():
        for _ in range(2):
            with ms.remat(budget="1GB") as block:
                loss = x.exp().sin().sum()
            loss.backward()
    assert block.peak > 0


def unreported(make):
    """What ``make`` returns on a thread whose allocations are not reported."""
    made = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made.pop()


def results(x, count, tracker):
    """The last of so many results; the graph alone has the others."""
    made = []
    for _ in range(count):
        x = x.sin().exp()
        made.append(x)
    # The first that the tracker looks for is the next that backward frees.
    tracker.label(made[-2::-1], 0, [0] * (count - 1))
    return x


@pytest.mark.parametrize("place", ["cpu", "folder"])
def test_what_lies_elsewhere(place, tmp_path):
    where = "cpu" if place == "cpu" else tmp_path
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).to(DEVICE)
    if place == "cpu":
        ms.weights_on(model, "cpu")
    optimizer = ms.AdamW(model.parameters(), grads_on=where, states_on=where)
    with ms.memory.track(model, optimizer) as t:
        for _ in range(2):
            model(torch.randn(8, 256, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    large = 2 * 256 * 256 * 4
    expected = {"parameters": large} if place == "cpu" else {}
    assert t.most_elsewhere == {**expected, "gradients": large, "optimizer": 2 * large}
