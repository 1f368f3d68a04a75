"""What is told of blocks with a budget: figures, pictures and reports."""

import sys

import pytest
import torch
from processes import run_program
from test_budget import no_warnings, nothing_is_known_yet, step, wide  # noqa: F401
from torch import nn

import memsave_ext as ms


def plans_and_peak(block):
    figures = block._recorder.budget()
    return figures["plans"], figures["plan"][0], block.peak


def test_plans_count_the_states_that_came_after_the_measured_step():
    """In a process of its own: where a step of another test is still open here, steps overlap."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__} as t; t.train_wide()"
    run_program(code).check_returncode()


def train_wide():
    model, x = wide()
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        with ms.remat(model, budget=0.5, optimizer=adamw) as block:
            loss = model(x).square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
    plans, planned, peak = plans_and_peak(block)
    states = sum(t.nbytes for state in adamw.state.values() for t in state.values())
    assert states > 0.1 * peak
    assert planned == pytest.approx(peak, rel=0.02)
    assert plans[-1][0] == pytest.approx(block.least, rel=0.02)


def picture(block, path, monkeypatch):
    """What plot() draws, and writes to ``path``."""
    picture = pytest.importorskip("memsave_ext.remat.picture")
    drawn = []
    save = picture.save
    monkeypatch.setattr(picture, "save", lambda f, p: (drawn.append(f), save(f, p)))
    block.plot(path)
    assert path.stat().st_size > 1000
    return drawn[0]


@pytest.mark.parametrize("budget", [10**8, 2**63 - 1, 1.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_picture_where_the_only_plan_takes_no_time(tmp_path, monkeypatch, budget, steps):
    pytest.importorskip("matplotlib")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    for _ in range(steps):
        _, _, block = step(model, x, budget=budget)
    figure = picture(block, tmp_path / "plan.png", monkeypatch)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            assert len(axis.get_major_locator()()) < 20


@pytest.mark.filterwarnings("ignore:remat. the budget")
@pytest.mark.parametrize("budget", [10**8, 1.0, 0.5, 0.01])
def test_what_stands_in_a_picture_hides_no_line(tmp_path, monkeypatch, budget):
    pytest.importorskip("matplotlib")
    model, x = wide()
    for _ in range(2):
        _, _, block = step(model, x, budget=budget)
    figure = picture(block, tmp_path / "step.png", monkeypatch)
    for axes in figure.axes:
        inside = axes.get_window_extent()
        words = [text.get_window_extent() for text in axes.texts]
        assert len(words) == (2 if axes is figure.axes[0] else 1)
        for at, box in enumerate(words):
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1
            assert inside.y0 <= box.y0 and box.y1 <= inside.y1
            assert not any(box.overlaps(other) for other in words[:at])
    (step_axes, _) = figure.axes
    for text, line in zip(step_axes.texts, step_axes.lines, strict=False):
        height = step_axes.transData.transform((0, line.get_ydata()[0]))[1]
        box = text.get_window_extent()
        assert not box.y0 < height < box.y1


def test_the_handle_draws_too(tmp_path):
    pytest.importorskip("matplotlib")
    model, x = wide()
    handle = ms.remat_module(model, budget=0.5)
    with pytest.raises(RuntimeError, match="no forward with gradients yet"):
        handle.plot(tmp_path / "none.png")
    model(x).sum().backward()
    handle.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_a_block_that_was_not_entered_has_no_picture(tmp_path):
    with pytest.raises(RuntimeError, match="not entered"):
        ms.remat(budget=0.5).plot(tmp_path / "none.png")


def test_parameters_that_are_no_leaves():
    """torch warns where their .grad is read."""

    class Scaled(nn.Module):
        def __init__(self, retains=False):
            super().__init__()
            self.leaf = nn.Parameter(torch.randn(256, 64))
            made = self.leaf * 2
            if retains:
                made.retain_grad()
            self._parameters["weight"] = made

        def forward(self, x):
            return nn.functional.gelu(x @ self.weight)

    x = torch.randn(32, 256)
    for retains in (False, True):
        model = Scaled(retains)
        expected = torch.autograd.grad(model(x).sum(), model.leaf, retain_graph=True)[0]
        with no_warnings():
            with ms.remat(model, budget=1.0) as block:
                loss = model(x).sum()
            loss.backward()
        assert torch.equal(model.leaf.grad, expected)
        assert block.figures().operators > 0


def test_a_report_tells_of_the_plan():
    model, x = wide()
    for number in range(4):
        with ms.remat() as block:
            loss = model(x).sum()
        loss.backward()
        assert ("follows a plan for its shape" in block.report()) == (number >= 2)
