"""Comparisons: the sizes are those of tensors made on purpose."""

import gc
import io
import json
import sys
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from timelines import training
from torch import nn

from memsave_ext.memory.compare import Comparison, Row, compare
from memsave_ext.memory.events import CATEGORIES
from memsave_ext.memory.tracking import running
from memsave_ext.shared import table

PARAMETERS = 100 * 100 * 4


def model_of_known_size():
    return nn.Linear(100, 100, bias=False)


def holding(size, calls=None):
    """A variant whose steps hold ``size`` bytes for a moment."""

    def build():
        def step():
            if calls is not None:
                calls.append(size)
            torch.empty(size, dtype=torch.uint8)

        return model_of_known_size(), None, step

    return build


def training_variant(checkpoint):
    def build():
        torch.manual_seed(0)
        n = 64
        layers = [nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n)) for _ in range(4)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(256, n)

        def step():
            y = x
            for layer in model:
                y = (
                    torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
                    if checkpoint
                    else layer(y)
                )
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


# what is measured


def test_peaks_are_those_of_the_steps():
    result = compare({"small": holding(1000), "large": holding(5_000_000), "again": holding(1000)})
    assert [row.name for row in result.rows] == ["small", "large", "again"]
    assert [row.peak for row in result.rows] == [PARAMETERS + n for n in (1000, 5_000_000, 1000)]
    for row in result.rows:
        assert row.at_peak["parameters"] == PARAMETERS
        assert list(row.at_peak) == list(CATEGORIES)
        assert sum(row.at_peak.values()) == row.peak == row.timeline.live.sum(1).max()
        assert row.seconds > 0
        assert row.timeline.time[0] == 0
    assert result.device == "cpu"


def test_a_training_step_and_its_checkpointed_form():
    naive, checkpointed = compare(
        {"naive": training_variant(False), "checkpoint": training_variant(True)}, steps=2
    ).rows
    assert (
        naive.at_peak["parameters"]
        == checkpointed.at_peak["parameters"]
        == 4 * 2 * (64 + 1) * 64 * 4
    )
    kept = 256 * 64 * 4  # of a layer, between two layers of one block
    # Without checkpoint the inner activations of all blocks live at once, with it those of one.
    assert naive.peak - checkpointed.peak >= 2 * kept
    assert naive.at_peak["activations"] >= 4 * kept
    assert {"backward", "recompute"} >= {naive.peak_phase, checkpointed.peak_phase}


def test_how_often_steps_run():
    calls = []
    compare({"a": holding(1, calls), "b": holding(2, calls)}, steps=4, warmup=3)
    assert calls == [1] * (3 + 4 + 4) + [2] * (3 + 4 + 4)
    calls.clear()
    compare({"a": holding(1, calls)}, steps=1, warmup=0)
    assert len(calls) == 2


def test_time_is_the_median_of_the_steps_without_tracking(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    durations = iter([100.0, 9.0, 1.0, 2.0, 50.0, 50.0, 50.0])  # warm-up, timed, tracked

    def build():
        def step():
            clock[0] += next(durations)

        return model_of_known_size(), None, step

    (row,) = compare({"a": build}).rows
    assert row.seconds == 2.0


def test_nothing_of_a_variant_is_left_for_the_next():
    """Not even what only the garbage collector can free."""
    gone = []

    def build():
        assert all(reference() is None for reference in gone)
        model = model_of_known_size()
        model.itself = [model]
        gone.append(weakref.ref(model))
        return model, torch.optim.SGD(model.parameters()), lambda: torch.empty(7)

    gc.disable()  # it is collected on purpose, not by chance
    try:
        rows = compare({"a": build, "b": build, "c": build}).rows
    finally:
        gc.enable()
    assert len(gone) == 3 and all(reference() is None for reference in gone)
    assert len({row.peak for row in rows}) == 1


def test_memory_that_is_left_behind_does_not_disturb():
    kept = []

    def leaky():
        return (
            model_of_known_size(),
            None,
            lambda: kept.append(torch.empty(1000, dtype=torch.uint8)),
        )

    def freeing():
        return (
            model_of_known_size(),
            None,
            lambda: (kept.clear(), torch.empty(10, dtype=torch.uint8)),
        )

    rows = compare(
        {"before": holding(10), "leaky": leaky, "after": holding(10), "freeing": freeing}
    ).rows
    assert [row.peak - PARAMETERS for row in rows] == [10, 3000, 10, 10]


# errors


def failing(at):
    """A variant that fails in its call ``at``; 0 is the building."""

    def build():
        calls = [0]

        def step():
            calls[0] += 1
            if calls[0] == at:
                raise OverflowError("too much")

        if at == 0:
            raise OverflowError("too much")
        return model_of_known_size(), None, step

    return build


@pytest.mark.parametrize(
    ("at", "when"),
    [
        (0, "while it was built"),
        (1, "in a warm-up step"),
        (2, "in a step that was timed"),
        (5, "in a step that was tracked"),
    ],
)
def test_a_failure_names_its_variant(at, when):
    message = f"^compare: variant 'second' failed {when}: OverflowError: too much$"
    with pytest.raises(RuntimeError, match=message) as caught:
        compare({"second": failing(at), "third": holding(1)})
    assert isinstance(caught.value.__cause__, OverflowError)
    assert not running()  # nothing is tracked any more


def test_an_interrupt_passes():
    def build():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"a": build})


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (None, "variants must be a mapping of names .* got NoneType"),
        ([holding(1)], "variants must be a mapping .* got list"),
        ({}, "at least one variant, got none"),
        ({1: holding(1)}, "names of variants must be str, got 1"),
        ({"a": (nn.Linear(1, 1), None, print)}, "variant 'a' must be a function .* got tuple"),
    ],
)
def test_variants_that_are_none(variants, message):
    with pytest.raises((TypeError, ValueError), match=f"^compare: .*{message}"):
        compare(variants)


LINEAR = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "got NoneType"),
        ((LINEAR, None), "got a tuple of 2"),
        ([LINEAR, None, print], "got list"),
        (
            (print, None, print),
            "the model must be a torch.nn.Module, got builtin_function_or_method",
        ),
        (
            (LINEAR, LINEAR, print),
            "the optimizer must be a torch.optim.Optimizer or None, got Linear",
        ),
        ((LINEAR, None, None), "the step must be callable, got NoneType"),
    ],
)
def test_a_builder_that_returns_something_else(made, message):
    start = r"^compare: the builder of variant 'a' must return \(model, optimizer or None, step\)"
    with pytest.raises(TypeError, match=f"{start}.*{message}"):
        compare({"a": lambda: made})


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": 1.0}, {"warmup": -1}, {"warmup": None}, {"device": "tpu3"}]
)
def test_options_that_are_none(options):
    with pytest.raises((TypeError, ValueError, RuntimeError), match="steps|warmup|device"):
        compare({"a": holding(1)}, **options)


# what is shown


def made_up():
    rows = []
    for i, name in enumerate(("naive", "checkpoint", "both")):
        line = training(layers=8 - 2 * i)
        peak = int(line.live.sum(1).argmax())
        at_peak = dict(zip(CATEGORIES, line.live[peak].tolist(), strict=True))
        rows.append(Row(name, 0.1 * (i + 1), sum(at_peak.values()), at_peak, "backward", line))
    return Comparison(rows, "cpu")


def test_the_report(monkeypatch):
    monkeypatch.setattr(table, "_rich", lambda: None)
    file = io.StringIO()
    result = made_up()
    result.report(file=file)
    title, header, _, *lines = file.getvalue().strip().splitlines()
    assert title == "Training steps on cpu, \N{MULTIPLICATION SIGN} against naive"
    assert "gradients" not in header  # nobody has any at the peak
    for row, line in zip(result.rows, lines, strict=True):
        assert line.startswith(row.name)
        ratio = f"{row.peak / result.rows[0].peak:.2f}"
        assert f"{table.format_bytes(row.peak)}  {ratio}" in line
        for size in row.at_peak.values():
            assert not size or table.format_bytes(size) in line
    assert [line.split()[3] for line in lines] == ["1.00", "2.00", "3.00"]


def test_the_document(tmp_path):
    result = made_up()
    document = result.to_json(tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text()) == document == result.to_json()
    assert (document["format"], document["version"]) == ("memsave_ext.memory.comparison", 1)
    for row, variant in zip(result.rows, document["variants"], strict=True):
        for name in ("name", "seconds", "peak", "at_peak", "peak_phase"):
            assert variant[name] == getattr(row, name)
        columns = zip(CATEGORIES, row.timeline.live.T.tolist(), strict=True)
        assert variant["timeline"]["live"] == dict(columns)


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    result = made_up()
    result.plot(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    result.plot(tmp_path / "c.svg", title="What it saves")
    drawn = (tmp_path / "c.svg").read_text()
    assert "<!-- What it saves -->" in drawn
    for row in result.rows:
        assert f"<!-- {row.name}: {table.format_bytes(row.peak)} in backward -->" in drawn


def test_what_the_picture_draws():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from memsave_ext.memory.pictures import comparison

    rows = made_up().rows
    styles = [comparison._style(i) for i in range(3)]
    courses, times, peaks = Figure().subplots(3)
    comparison._draw_courses(courses, rows, styles)
    for row, line in zip(rows, courses.lines, strict=True):
        assert line.get_ydata().tolist() == row.timeline.live.sum(1).tolist()
        assert line.get_ydata()[line.get_markevery()[0]] == row.peak
    comparison._draw_times(times, rows, styles)
    places = [(line.get_xdata()[0], line.get_ydata()[0]) for line in times.lines]
    assert places == [(row.seconds, row.peak) for row in rows]
    assert [text.get_text() for text in times.texts] == [row.name for row in rows]
    comparison._draw_peaks(peaks, rows)
    for place, row in enumerate(rows):
        bars = [
            bar for bar in peaks.patches if bar.get_y() < place < bar.get_y() + bar.get_height()
        ]
        held = [size for category, size in row.at_peak.items() if category != "gradients"]
        assert [bar.get_width() for bar in bars] == held  # nobody has gradients then
        assert bars[-1].get_x() + bars[-1].get_width() == row.peak
    seen = {
        str((style["color"], style["linestyle"])) for style in map(comparison._style, range(20))
    }
    assert len(seen) == 20


def test_long_names_leave_room_and_run_under_no_legend(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from memsave_ext.memory.pictures import comparison

    figures = []
    monkeypatch.setattr(comparison, "save", lambda figure, _: figures.append(figure))
    rows = [
        replace(row, name=f"{row.name}: checkpoint by block, Adam in backward, 8-bit states")
        for row in made_up().rows
    ]
    comparison.plot_comparison(rows, tmp_path / "c.png", "title")
    (figure,) = figures
    figure.draw_without_rendering()
    assert len(figure.axes) == 3
    for axes in figure.axes:
        assert axes.get_window_extent().width > 0.25 * figure.bbox.width
        if axes.get_legend() is not None:
            legend = axes.get_legend().get_window_extent()
            assert not any(legend.overlaps(text.get_window_extent()) for text in axes.texts)
            assert not legend.overlaps(axes.get_window_extent())
            assert legend.x1 <= figure.bbox.x1


def test_the_picture_without_matplotlib(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="a picture needs matplotlib"):
        made_up().plot(tmp_path / "c.png")
