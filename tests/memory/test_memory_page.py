"""The page of a timeline: one file, whose figures are those of the timeline; in a browser, too."""

import contextlib
import os
import re
import shutil
import sys

import pytest
import torch
from timelines import MIB, random_timeline, timeline, track_of, training

import memsave_ext as ms
from memsave_ext.memory.events import CATEGORIES, PHASES
from memsave_ext.memory.pictures import page
from memsave_ext.memory.pictures.timeline import places
from memsave_ext.shared.table import format_bytes

pytest.importorskip("bokeh")


def drawn(line):
    figure = page.figure_of(track_of(line), "Of a title")
    return figure, {r.name: r.data_source.data for r in figure.renderers if r.name}


def test_areas_and_what_is_under_the_pointer_are_the_timeline():
    line = random_timeline(300)
    figure, data = drawn(line)
    edges = places(line)
    rows = data["rows"]
    assert list(rows["left"]) == edges[:-1] and list(rows["right"]) == edges[1:]
    assert list(rows["seconds"]) == line.time.tolist() and list(rows["step"]) == line.step.tolist()
    assert list(rows["all"]) == line.live.sum(1).tolist()
    names = ["no phase" if p == "other" else p for p in PHASES]
    assert list(rows["phase"]) == [names[phase] for phase in line.phase.tolist()]
    scale = max(rows["all"]) / max(rows["top"])
    assert scale in (1, 1 << 10, 1 << 20, 1 << 30)
    for column, category in enumerate(CATEGORIES):
        assert list(rows[category]) == line.live[:, column].tolist()
        area = data[category]
        height = torch.tensor(area["y2"]) - torch.tensor(area["y1"])
        expected = torch.cat([line.live[:, column], line.live[-1:, column]]).double()
        torch.testing.assert_close(height * scale, expected)
    assert list(data["peak"]["y"]) == [max(rows["top"])]
    assert figure.title.text == "Of a title"


def test_steps_gaps_and_many_steps():
    figure, data = drawn(training((0, 1, 5)))
    spans = [r for r in figure.center if type(r).__name__ == "Span"]
    (gap,) = [r for r in figure.center if type(r).__name__ == "BoxAnnotation"]
    assert len(spans) == 2 and spans[1].location == gap.right
    assert data["rows"]["seconds"][-1] > data["rows"]["left"][-1]  # what is left out is no room
    figure, data = drawn(training(range(40)))
    assert len(data["rows"]["step"]) == 41
    assert not [r for r in figure.center if type(r).__name__ == "Span"]


def test_one_file_with_all_that_it_needs(tmp_path):
    model = torch.nn.Linear(64, 64)
    with ms.memory.track(model) as track:
        model(torch.randn(8, 64)).sum().backward()
    path = tmp_path / "timeline.html"
    track.plot(path, title="<&> of a title")
    text = path.read_text("utf-8")
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    assert "<title>&lt;&amp;&gt; of a title</title>" in text
    assert path.stat().st_size < 2_000_000
    empty = track_of(training())
    empty.timeline = timeline([])
    page.draw_track(empty, tmp_path / "empty.htm")
    assert "nothing was allocated" in (tmp_path / "empty.htm").read_text("utf-8")


def test_without_bokeh(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "bokeh"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(ImportError, match="a page needs bokeh, which cannot be imported"):
        page.draw_track(track_of(training()), tmp_path / "timeline.html")
    assert not [*tmp_path.iterdir()]


@contextlib.contextmanager
def browser():
    """Chromium, of ``CHROMIUM``, the path or playwright."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no chromium: {str(error).splitlines()[0]}")
        yield started, sync_api.expect
        started.close()


def test_in_a_browser(tmp_path):
    """What is said where the pointer is; without a network, and without an error."""
    line = training((0, 1), layers=3, tick=0.01)
    page.draw_track(track_of(line), tmp_path / "timeline.html")
    rows, errors = len(line.time), []
    with browser() as (chromium, expect):
        tab = chromium.new_page(viewport={"width": 1200, "height": 600})
        tab.context.set_offline(True)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        tab.goto((tmp_path / "timeline.html").as_uri())
        tab.locator(".bk-Figure").wait_for()
        frame = tab.evaluate(  # of what is drawn, in pixels
            """async () => {
              const view = Object.values(Bokeh.index.roots ?? Bokeh.index)[0];
              await view.ready;
              const box = view.el.getBoundingClientRect(), inner = view.frame.bbox;
              return [box.left + inner.left, box.top + inner.top, inner.width, inner.height];
            }"""
        )
        left, top, width, height = frame
        edges = places(line)
        for row in (0, rows // 3, rows // 2, rows - 2):
            middle = (edges[row] + edges[row + 1]) / 2
            x = left + (middle - edges[0]) / (edges[-1] - edges[0]) * width
            tab.mouse.move(left + 1, top + height / 2)
            tab.mouse.move(x, top + height / 3)
            said = tab.locator(".bk-tooltip-row-value")
            live = line.live[row].tolist()
            there = [c for c in reversed(range(5)) if line.live[:, c].any()]
            phase = PHASES[line.phase[row]]
            expected = [f"{line.time[row]:.6f} s", str(int(line.step[row])), phase]
            expected += [format_bytes(sum(live)), *(format_bytes(live[c]) for c in there)]
            expect(said).to_have_text(expected)
        assert live[0] == 3 * MIB
        start = "Object.values(Bokeh.index.roots ?? Bokeh.index)[0].model.x_range.start"
        before = tab.evaluate(start)
        tab.mouse.wheel(0, -200)
        tab.wait_for_function(f"{start} > {before}")
    assert not errors
