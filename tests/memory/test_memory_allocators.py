"""CUDA allocators that report nothing are refused: figures would stay at their first value."""

import pytest
import torch
from on_device import HAS_CUDA
from torch import nn

import memsave_ext as ms
from memsave_ext import _native


@pytest.fixture(params=["cudaMallocAsync", "pluggable"])
def backend(request, monkeypatch):
    """As torch tells of a process whose allocator is another one; without a GPU nothing else is."""
    if not HAS_CUDA:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: request.param)
    return request.param


def test_tracks(backend):
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=f"memory.track follows .*'{backend}' here"):
        ms.memory.track(model, device="cuda")
    with ms.memory.track(model) as t:  # the CPU's allocator is its own
        model(torch.ones(1, 2))
    assert t.peak > 0


@pytest.mark.skipif(not _native.available, reason="budgets need the native part")
def test_budgets(backend):
    """Without a model the device is CUDA where it is in use."""
    with pytest.raises(RuntimeError, match=f"remat: a budget follows .*'{backend}' here"):
        ms.remat(budget="1GB")
    ms.remat()
    x = torch.ones(3, requires_grad=True)
    with ms.remat(nn.Linear(2, 2), budget="1GB"):
        y = x.sin()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
