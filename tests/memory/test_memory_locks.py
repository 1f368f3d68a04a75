"""The tracker and other locks: the GIL, and that of CUDA's allocator, with which it reports."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from memsave_ext import _native
from memsave_ext.memory.tracker import NativeTracker

pytestmark = pytest.mark.skipif(not _native.available, reason="of the native tracker")

CUDA = torch.device("cuda", 0)
LIBRARY = str(Path(torch.__file__).parent / "lib" / "libc10.so")
REPORT = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"


def report(library, address, size):
    """What CUDA's allocator calls, with its lock held. A device is two bytes: kind and index."""
    function = getattr(library(LIBRARY), REPORT)
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint16
    ]  # fmt: skip
    function(address, size, size, size, 1)


def report_without_gil(address, size=512):
    report(ctypes.CDLL, address, size)


def report_with_gil(address, size=512):
    report(ctypes.PyDLL, address, size)


@pytest.fixture
def tracker():
    tracker = NativeTracker(CUDA, [], True, 1000)
    tracker.start(0)
    yield tracker
    tracker.stop()


def functions_of_stacks(tracker):
    record = tracker.record()
    return [[function for *_, function in record.stack(i)] for i in range(len(record.blocks))]


def test_a_report_outside_of_operators_does_not_wait_for_the_gil(tracker):
    report_without_gil(1 << 20)
    report_with_gil(2 << 20)
    without, with_gil = functions_of_stacks(tracker)
    assert without == []
    assert "report_with_gil" in with_gil


def test_a_report_in_an_operator_has_the_stack_of_its_call(tracker):
    def reports(x):
        report_without_gil(1 << 20)
        return x.clone()

    def caller():
        torch.ops.memsave_ext_tests.reports(torch.zeros(1))

    # Not custom_op(): since torch 2.15 who observes operators does not see those.
    with torch.library._scoped_library("memsave_ext_tests", "FRAGMENT") as library:
        library.define("reports(Tensor x) -> Tensor")
        library.impl("reports", reports, "CPU")
        caller()
    [stack] = functions_of_stacks(tracker)
    assert "caller" in stack
    assert "report_without_gil" not in stack  # taken when the operator began


def test_operators_are_not_watched_afterwards():
    for _ in range(2):
        tracker = NativeTracker(CUDA, [], True, 1000)
        tracker.start(0)
        tracker.stop()
    assert not torch._C._autograd._profiler_enabled()
    torch.zeros(1).add_(1)
    report_without_gil(1 << 20)  # to nobody


class Held:
    """Memory that Python owns: the end of a tensor of it waits for the GIL."""

    def __init__(self):
        self.memory = bytearray(1024)

    def tensor(self):
        return torch.frombuffer(self.memory, dtype=torch.uint8)


def test_no_tensor_ends_with_the_lock_held():
    """Where a look has the last reference to one, threads that look and label wait for ever."""
    tracker = NativeTracker(torch.device("cpu"), [], False, 1000)
    tracker.start(None)
    done = threading.Event()

    def look():  # without the GIL: when a backward begins
        x = torch.ones(1, requires_grad=True)
        while not done.is_set():
            x.exp().exp().backward()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    for _ in range(60):
        tensors = [Held().tensor() for _ in range(5000)]
        tracker.label(tensors, 0, [0] * len(tensors))
        while tensors:
            tensors.pop()
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    tracker.stop()
