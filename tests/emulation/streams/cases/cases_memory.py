"""The tracker's lock, the allocator's and the interpreter's, taken by several threads."""

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
    """This thread's allocations are reported; the other one frees with the interpreter's lock."""
    chance = random.Random(seed)
    done = threading.Event()

    def allocate_and_free():
        while not done.is_set():
            tensors = [torch.empty(16, device=DEVICE) for _ in range(20)]
            tracker.label(tensors, 0, [0] * len(tensors))
            while tensors:
                tensors.pop()

    thread = threading.Thread(target=allocate_and_free, daemon=True)
    thread.start()
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    for _ in range(chance.randint(10, 30)):
        (x * 2).exp().sum().backward()
        assert tracker.live >= 0
    done.set()
    thread.join()
