"""What tests of several rooms share."""

import contextlib
import gc
import mmap
import pickle
import struct
import threading

import pytest
import torch
from torch.utils._pytree import tree_map

import memsave_ext as ms
from memsave_ext.dry_run import world
from memsave_ext.dry_run.child import in_child
from memsave_ext.fakes.storages import Storages
from memsave_ext.shared.device_memory import _mallinfo


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def assert_equal(left, right):
    """Bitwise, None and NaN included."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def gradients_and_peak(model, loss, block=None):
    """Gradients and the peak by ``memory.track`` of a step in a block, which draws the same random
    numbers each time."""
    torch.manual_seed(3)
    gc.collect()
    with ms.memory.track(model) as track:
        with block or contextlib.nullcontext():
            value = loss()
        value.backward()
        del value
        peak = track.peak
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return grads, peak


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def both(program, tensors, **kwargs):
    """Gradients of ``program(run)``, run plainly and checkpointed: equal, as are random numbers."""
    results = []
    for run in (plain, ms.checkpoint):
        torch.manual_seed(1)
        output = program(run)
        after = torch.rand(2)
        grads = torch.autograd.grad(output, tensors, allow_unused=True, **kwargs)
        results.append((output, after, *grads))
    assert_equal(*results)
    return results[1]


def run_threads(work, count):
    """``work(i)`` in ``count`` threads; what one raises is raised here."""
    failures = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@contextlib.contextmanager
def state_unchanged():
    def state():
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
            ms.is_recomputing(),
            torch._C._autograd._top_saved_tensors_default_hooks(False),
        )

    before = state()
    yield
    assert state() == before


class Wrapper(torch.Tensor):
    """Stands for another tensor, without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, Wrapper) else value

        def wrap(value):
            return Wrapper(value) if isinstance(value, torch.Tensor) else value

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


def _host_bytes():
    """What malloc has given out. The process's resident bytes also change as its heap is cut up."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        pytest.skip("glibc 2.33 or later counts what malloc has given out")
    gc.collect()
    info = mallinfo()
    return info.uordblks + info.hblkhd


def host_memory_grows(run, limit):
    """Whether what malloc has given out grows by ``limit`` bytes or more each time that ``run`` is
    called: what other threads of a process keep is not there each time."""

    def growth():
        before = _host_bytes()
        run()
        return _host_bytes() - before

    return all(growth() >= limit for _ in range(3))


class Shared:
    """A list that this process and its children share, as functions that run ahead in one."""

    _SIZE = struct.Struct("i")

    def __init__(self):
        self._memory = mmap.mmap(-1, 1 << 16)
        self.clear()

    def append(self, value):
        text, (end,) = pickle.dumps(value), self._SIZE.unpack_from(self._memory)
        self._memory[end : end + 4 + len(text)] = self._SIZE.pack(len(text)) + text
        self._SIZE.pack_into(self._memory, 0, end + 4 + len(text))

    def extend(self, values):
        for value in values:
            self.append(value)

    def values(self):
        found, place, (end,) = [], 4, self._SIZE.unpack_from(self._memory)
        while place < end:
            (size,) = self._SIZE.unpack_from(self._memory, place)
            found.append(pickle.loads(self._memory[place + 4 : place + 4 + size]))
            place += 4 + size
        return found

    def clear(self):
        self._SIZE.pack_into(self._memory, 0, 4)


def on_fakes(run, device="cpu", forgiving=False):
    """What a function returns that runs on fake tensors, in a child process as steps ahead do.

    ``forgiving``: also where it has taken an error of the fakes' own for itself.
    """
    storages = Storages(*[lambda *_: None] * 3, torch.device(device))

    def inside():
        with world.on_fakes(storages, torch.device(device)):
            result = run()
            if forgiving:
                storages.failed = None
            return result

    return in_child(inside, 300)
