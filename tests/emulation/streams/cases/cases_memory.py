"""The tracker's lock and the allocator's, taken by several threads."""

import faulthandler
import random
import threading

import pytest
import torch

from memsave_ext import _native

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def tracker():
    tracker = _native.module.MemoryTracker(DEVICE, [], True, 1000)
    tracker.start(0)
    faulthandler.dump_traceback_later(10, exit=True)  # where threads wait for each other
    yield tracker
    faulthandler.cancel_dump_traceback_later()
    tracker.stop()


def test_trackers_lock_and_the_allocators(seed, tracker):
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
