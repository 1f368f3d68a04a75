"""Budgets that are a part of the device's memory."""

import pytest
import torch
from helpers import Shared
from test_budget import no_warnings, nothing_is_known_yet, step, wide  # noqa: F401
from torch import nn

import memsave_ext as ms
from memsave_ext.remat import budget as module
from memsave_ext.shared.device_memory import DeviceMemory, device_memory


@pytest.fixture
def memory(monkeypatch):
    """What the device has: ``memory(limit, free)`` sets it. What it returns is of devices asked."""
    asked = Shared()

    def set_to(limit, free):
        def answer(device):
            asked.append(device)
            return DeviceMemory(limit, free)

        monkeypatch.setattr(module, "device_memory", answer)
        return asked

    return set_to


def activations(model, x):
    """Bytes that count before a step, and its plain peak."""
    _, _, block = step(model, x, budget="1TB")
    return block._recorder.budget()["before"], block.peak


@pytest.mark.parametrize("text", ["80%", " 80.0 % ", "7.5%", ".5%", "100%"])
def test_percents_are_of_all_that_the_process_may_have(memory, text):
    model, x = wide()
    asked = memory(limit=10**9, free=10**8)
    _, _, block = step(model, x, budget=text)
    assert block.budget == int(10**9 * (float(text.strip().rstrip("% ")) / 100))
    assert asked.values() == [torch.device("cpu")]


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "nan%", "%", "auto%", "Auto", "80 percent"])
def test_what_is_no_part_of_a_device(text):
    with pytest.raises(ValueError, match="'80%' .* or 'auto'.* got "):
        ms.remat(budget=text)
    with pytest.raises(ValueError, match="'80%' .* or 'auto'.* got "):
        ms.remat_module(wide()[0], budget=text)


def test_auto_is_what_is_free_and_what_counts_already(memory):
    """Nine tenths of what is free, as the rest of the process needs memory, too."""
    model, x = wide()
    before, plain = activations(model, x)
    assert before > 0
    memory(limit=10**9, free=10**7)
    _, _, block = step(model, x, budget="auto")
    assert block.budget == before + 9 * 10**6
    # The same where only the calls of modules tell what counts.
    handle = ms.remat_module(model, budget="auto")
    model(x).sum().backward()
    assert handle.budget == before + 9 * 10**6
    assert plain > before


@pytest.mark.parametrize("kind", ["auto", "50%"])
def test_the_device_is_asked_when_a_block_is_entered(memory, kind):
    """Where others take memory, the next step gets along with less, and keeps to that."""
    model, x = wide()
    before, plain = activations(model, x)
    handle = ms.remat_module(model, budget=kind)
    expected, _, _ = step(model, x)
    recomputed = []
    for share in (1.2, 0.7, 0.5, 0.9, 0.5):
        bytes_there = int(share * (plain - before))
        of_all = 2 * (before + bytes_there)
        memory(limit=of_all, free=int(bytes_there / 0.9) + 1)
        results, peak, _ = step(model, x)
        assert all(map(torch.equal, expected, results))
        assert handle.peak == peak <= 1.02 * handle.budget
        assert handle.budget == pytest.approx(before + bytes_there, abs=2)
        recomputed.append(handle.figures().recomputed_operators)
    assert recomputed[0] == 0 < recomputed[3] < recomputed[1] < recomputed[2] == recomputed[4]


def test_budgets_that_change_a_little_plan_once(memory):
    model, x = wide()
    before, plain = activations(model, x)
    plans = set()
    for i in range(20):
        memory(limit=10**9, free=int((plain - before) * (0.6 + 0.002 * (i * 7 % 13))))
        with ms.remat(model, budget="auto") as block:
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        figures = block._recorder.budget()
        assert figures["plan"] is not None
        plans.add(tuple(figures["plans"]))
    assert len(plans) == 1


def test_a_first_step_keeps_to_what_is_free(memory):
    model, x = wide(layers=32)
    before, plain = activations(model, x)
    ms._native.module.remat_forget()
    memory(limit=10**9, free=int((plain - before) * 0.8))
    _, peak, block = step(model, x, budget="auto")
    assert block.least is None and block.figures().dropped_bytes > 0
    assert peak <= 1.02 * block.budget < plain


def test_too_little_is_told_with_the_bytes_that_are_there(memory):
    model, x = wide()
    activations(model, x)
    memory(limit=10**9, free=1)
    with pytest.warns(UserWarning, match="remat: the budget of .* is less than the minimum"):
        step(model, x, budget="auto")
    with pytest.raises(torch.OutOfMemoryError, match="needs at least"):
        step(model, x, budget="auto", strict=True)


@pytest.mark.parametrize("budget", ["auto", "90%"])
def test_the_memory_of_this_machine(budget):
    model, x = wide()
    with no_warnings():
        _, peak, block = step(model, x, budget=budget)
    assert peak < block.budget <= 1.1 * device_memory(torch.device("cpu")).limit
    assert block.figures().dropped_bytes == 0


def test_a_device_whose_memory_is_not_known(monkeypatch):
    def refuse(device):
        raise RuntimeError(f"the memory of device {str(device)!r} is not known here")

    monkeypatch.setattr(module, "device_memory", refuse)
    block = ms.remat(budget="auto")
    with pytest.raises(
        RuntimeError, match="budget='auto' is a part .*'cpu' is not known here; pass"
    ):
        block.__enter__()
    x = torch.ones(3, requires_grad=True)  # nothing is left open
    with ms.remat(budget="1GB") as other:
        y = x.sin()
    y.sum().backward()
    assert other.figures().operators == 1


def test_predictions_ask_the_device_that_is_predicted_for(memory):
    def build():
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        x = torch.randn(32, 64)

        def step():
            with ms.remat(model, budget="auto"):
                loss = model(x).sum()
            loss.backward()

        return model, None, step

    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="budget='auto' .* 'cuda' is not known here"):
            ms.memory.predict(build, device="cuda")
    asked = memory(limit=10**9, free=10**8)
    for device in ("cuda", "cpu"):
        assert ms.memory.predict(build, device=device).peak > 0
        assert {asked_for.type for asked_for in asked.values()} == {device}
        asked.clear()
