"""What memory.predict(), fits() and track() say of memory that remat moves to files."""

import json
import os
import warnings

import pytest
import sampling
import torch
import torch.nn.functional as F
from helpers import Shared
from torch import nn

import memsave_ext as ms
from memsave_ext.memory import report
from memsave_ext.remat import block as remat_block
from memsave_ext.shared.table import format_bytes

pytestmark = pytest.mark.skipif(not ms._native.available, reason="remat records natively")
native = ms._native.module


@pytest.fixture(autouse=True)
def nothing_is_known_yet():
    native.remat_forget()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "remat: the budget of")
        yield


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(tokens=2048):
    return nn.Sequential(*[Block() for _ in range(4)]), torch.randn(tokens, 64)


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def attentions():
    """To compute anything again takes many times as long as to move it."""
    first, others = nn.Linear(128, 128), [Attention() for _ in range(6)]
    return nn.Sequential(first, *others), torch.randn(1, 1, 1024, 128)


def builder(make=blocks, **options):
    def build():
        model, x = make()
        handle = ms.remat_module(model, **options) if options else None
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                figures = handle.figures()
                moved = figures.moved_bytes, figures.brought_back_bytes, figures.waited_seconds
                build.moves.append(moved)

        return model, optimizer, step

    build.moves = Shared()
    return build


def without_optimizer():
    model, x = Block(), torch.randn(2, 64)
    return model, None, lambda: model(x).sum().backward()


def tracked_third(build):
    model, optimizer, step = build()
    step()
    step()
    with ms.memory.track(model, optimizer) as t:
        step()
    return t


def test_a_prediction_moves_as_the_step_does(tmp_path):
    build = builder(attentions, budget=0.05, offload=tmp_path)
    predicted = ms.memory.predict(build)
    moved, brought_back, _ = build.moves.values()[-1]
    assert predicted.most_moved == moved > 2 << 20
    assert brought_back >= moved
    t = tracked_third(build)
    assert predicted.peak == pytest.approx(t.peak, rel=0.01)
    assert predicted.most_moved == t.most_moved
    assert t.most_moved == build.moves.values()[-1][0]
    assert predicted.timeline.moved[-1] == t.timeline.moved[-1] == 0
    assert predicted.live == t.live


def with_bus(monkeypatch, out, back):
    store = native.RematStore
    monkeypatch.setattr(remat_block, "store_of", lambda *_: store.predicted("a bus", out, back))


def test_the_time_of_the_bus(monkeypatch, tmp_path):
    build = builder(budget=0.05, offload=tmp_path)
    waited = []
    for out, back in ((1e12, 2e12), (1e9, 2e9), (1e6, 2e6)):
        with_bus(monkeypatch, out, back)
        predicted = ms.memory.predict(build)
        moved, brought_back, waits = build.moves.values()[-1]
        seconds = moved / out + brought_back / back
        assert moved > 0
        assert predicted.bus_seconds == pytest.approx(seconds)
        assert waits <= seconds
        waited.append(waits)
    # Before copies that take seconds an operator's microseconds are nothing.
    assert waited[0] < 1e-3 < waited[1] < waited[2] and waited[2] > 0.5 * seconds


def test_a_graph_that_outlives_its_prediction(monkeypatch, tmp_path):
    with_bus(monkeypatch, 1e6, 1e6)
    left = []

    def build():
        model, x = nn.Sequential(*[Block() for _ in range(4)]), torch.randn(2048, 64)

        def step():
            for backward in (True, False):
                with ms.remat(model, budget=0.05, offload=tmp_path):
                    left[:] = [model(x).square().mean()]
                if backward:
                    left.pop().backward()

        return model, None, step

    predicted = ms.memory.predict(build)
    assert predicted.most_moved > 0
    left.clear()


def test_without_moving_nothing_is_told():
    predicted = ms.memory.predict(builder())
    assert (predicted.most_moved, predicted.bus_seconds) == (0, 0)
    assert "moved" not in predicted.report()


def test_a_card_moves_to_a_folder(tmp_path):
    predicted = ms.memory.predict(builder(budget=0.05, offload=tmp_path), device="cuda")
    assert predicted.most_moved > 1 << 20 and predicted.bus_seconds > 0


@pytest.mark.usefixtures("few_techniques")
def test_a_card_moves_to_the_hosts_memory():
    found = ms.memory.fits(
        builder(lambda: blocks(1 << 16)), 300 << 20, offload="cpu", device="cuda"
    )
    rows = {row.name: row for row in found.rows}
    row = rows["remat within the budget, offload"]
    assert found.cheapest is row
    assert row.moved > 10 << 20 and row.bus_seconds > 0
    assert row.peak < 0.9 * rows["remat within the budget"].peak


@pytest.mark.usefixtures("few_techniques")
def test_fits_tries_to_move_where_it_may(tmp_path):
    without = ms.memory.fits(without_optimizer, 1, device="cpu", every=True)
    found = ms.memory.fits(builder(), 1, device="cpu", every=True, offload=tmp_path)
    rows = {row.name: row for row in found.rows}
    moving = {name for name in rows if "offload" in name}
    assert {row.name for row in without.rows} == set(rows) - moving and len(moving) == (
        3 if sampling.full else 1
    )
    row = rows["remat within the budget, offload"]
    assert row.moved > 10 << 20 and row.bus_seconds > 0
    assert row.peak < 0.9 * rows["remat within the budget"].peak
    assert all(rows[name].moved is None for name in set(rows) - moving)
    head = found.report().partition("as built")[0]
    assert "moved" in head and "copies" in head
    assert "copies" not in without.report().partition("as built")[0]
    assert json.loads(json.dumps(found.to_json()))["offload"] == os.fspath(tmp_path)


@pytest.mark.usefixtures("few_techniques")
def test_what_fits_is_applied(tmp_path):
    least = ms.memory.predict(builder(budget=1, offload=tmp_path)).peak
    build, budget = builder(), int(1.02 * least)
    found = ms.memory.fits(build, budget, device="cpu", offload=tmp_path)
    assert found.cheapest.name == "remat within the budget, offload"
    found.plot(tmp_path / "fits.png")
    expected = tracked_third(build)
    native.remat_forget()
    torch.manual_seed(0)
    model, optimizer, step = build()
    applied = found.apply(model, optimizer)
    for _ in range(3):
        step()
    assert applied.measured <= 1.02 * budget < expected.peak
    applied.undo()


@pytest.mark.usefixtures("few_techniques")
def test_fit_moves_where_it_may(tmp_path, capsys):
    model, optimizer, step = builder()()
    x = torch.randn(2048, 64)
    options = {"budget": 9_900_000, "loss": lambda y: y.square().mean(), "in_backward": False}
    applied = ms.fit(model, optimizer, x, offload=tmp_path, **options)
    assert applied.technique == "remat within the budget, offload"
    assert "or results moved" in capsys.readouterr().out
    for _ in range(3):
        step()
    assert applied.measured <= 1.02 * 9_900_000
    applied.undo()
    with pytest.raises(ValueError, match="this technique needs offload="):
        ms.fit(model, optimizer, x, technique=applied.technique, **options)


def test_a_timeline_says_where_it_went(tmp_path):
    model, _, _ = builder(budget=0.05, offload=tmp_path)()
    x, store = (
        torch.randn(2048, 64),
        native.RematStore.in_folder(os.path.realpath(tmp_path), torch.device("cpu")),
    )
    model(x).sum().backward()
    with ms.memory.track(model) as whole:
        loss = model(x).sum()
        used = store.used()
        with ms.memory.track(model) as later:
            loss.backward()
        del loss
    assert used == whole.most_moved == later.most_moved > 0
    for t in (whole, later):
        moved = t.timeline.moved
        assert moved[-1] == 0 and moved.min() == 0 and moved.max() == used
        said = " ".join(t.report().split())  # a long line is broken
        assert f"elsewhere at most {format_bytes(used)} of activations" in said
        assert t.to_json()["most_moved"] == used
        assert report.timeline_as_json(t.timeline, 1 << 30)["moved"] == moved.tolist()
    assert later.timeline.moved[0] == used and whole.timeline.moved[0] == 0


def test_of_long_runs_too(tmp_path):
    build = builder(budget=0.05, offload=tmp_path)
    model, optimizer, step = build()
    with ms.memory.track(model, optimizer, max_events=500) as t:
        for _ in range(6):
            step()
    assert t.timeline.gaps and 0 < t.most_moved <= build.moves.values()[-1][0]
    assert t.timeline.moved[-1] == 0 and t.timeline.moved.min() >= 0


def test_pictures_have_a_line_of_it(tmp_path):
    pytest.importorskip("matplotlib")
    t = tracked_third(builder(budget=0.05, offload=tmp_path))
    from matplotlib.figure import Figure

    from memsave_ext.memory.pictures.timeline import draw_timeline

    axes = Figure().add_subplot()
    draw_timeline(axes, t.timeline)
    lines = {line.get_label(): line for line in axes.get_lines()}
    label = next(label for label in lines if label.startswith("moved elsewhere"))
    assert max(lines[label].get_ydata()) == t.most_moved <= axes.get_ylim()[1]
