"""The allocation tracker against sizes computed by hand."""

import gc
import threading

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native


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


def test_exceptions_leave_nothing_installed():
    def fail():
        with ms.memory.track():
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with ms.memory.track() as t:
        kept = torch.empty(1)
    assert t.live == kept.nbytes


def test_it_cannot_be_nested():
    with (
        ms.memory.track() as outer,
        pytest.raises(RuntimeError, match="cannot start: this thread is already tracked"),
        ms.memory.track(),
    ):
        pass
    assert outer.live == 0


def test_it_cannot_start_inside_the_profiler():
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with profiler, pytest.raises(RuntimeError, match="torch's profiler"), ms.memory.track():
        pass


def test_it_cannot_stop_on_another_thread():
    t = ms.memory.track()
    errors = []

    def leave():
        try:
            t.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with t:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        kept = torch.empty(5)
    assert t.live == kept.nbytes
    assert errors == ["memory tracking cannot stop: it was not started on this thread"]


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


@pytest.mark.skipif(not _native.available, reason="in pure Python it is torch's profiler")
def test_torch_does_not_take_it_for_its_profiler():
    with ms.memory.track():
        assert not torch._C._autograd._profiler_enabled()
