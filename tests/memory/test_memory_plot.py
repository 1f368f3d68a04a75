"""Pictures of timelines: what is drawn is what was measured."""

import sys
from collections import Counter

import pytest
import torch
from timelines import MIB, full_track, random_timeline, timeline, track_of, training
from torch import nn

import memsave_ext as ms
from memsave_ext.memory.events import CATEGORIES, PHASES
from memsave_ext.memory.pictures import timeline as plot
from memsave_ext.memory.series import step_peaks, thin
from memsave_ext.shared.table import format_bytes

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402


def draw(line, **options):
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plot.draw_timeline(axes, line, **options)
    return axes


def areas(axes):
    return {
        area.get_label().partition(":")[0]: area.get_paths()[0].vertices
        for area in axes.collections
        if area.get_label().partition(":")[0] in CATEGORIES
    }


def ends_at(vertices, x):
    """Where a polygon of horizontal and vertical edges begins and ends above ``x``."""
    starts, ends = vertices[:-1], vertices[1:]
    crossing = (starts[:, 0] < x) != (ends[:, 0] < x)
    heights = starts[crossing][:, 1]
    return heights.min(), heights.max()


def texts(axes):
    return [text.get_text() for text in axes.texts]


# what is drawn


@pytest.mark.parametrize("line", [training(range(2)), random_timeline(300)])
def test_the_areas_are_the_live_bytes_on_one_another(line):
    drawn = areas(draw(line))
    assert list(drawn) == [c for i, c in enumerate(CATEGORIES) if line.live[:, i].any()]
    for row in range(len(line.time) - 1):
        between = float(line.time[row : row + 2].mean())
        bottom = 0
        for category, vertices in drawn.items():
            low, high = ends_at(vertices, between)
            assert low == bottom
            assert high - low == line.live[row, CATEGORIES.index(category)]
            bottom = high
        assert bottom == line.live[row].sum()


@pytest.mark.parametrize("seed", range(3))
def test_the_peak_is_that_of_the_whole_timeline(seed):
    line = random_timeline(20_000, seed)
    spike = 12_345 + seed
    line.live[spike, 3] = 1 << 40
    axes = draw(line)
    (marker,) = [artist for artist in axes.lines if artist.get_gid() == "peak"]
    size = int(line.live.sum(1).max())
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (float(line.time[spike]), size)
    phase, step = PHASES[line.phase[spike]], int(line.step[spike])
    (label,) = [text for text in texts(axes) if text.startswith("peak")]
    assert format_bytes(size) in label
    assert (f"in {phase} of step {step}" in label) == (phase != "other")
    assert max(vertices[:, 1].max() for vertices in areas(axes).values()) == size
    assert axes.get_ylim()[1] > size


def test_of_equal_peaks_the_first_is_marked():
    axes = draw(training(range(3)))
    (marker,) = [artist for artist in axes.lines if artist.get_gid() == "peak"]
    assert marker.get_xdata()[0] < 0.033


def test_the_legend_says_what_the_peak_was_made_of():
    line = training()
    peak = int(line.live.sum(1).argmax())
    labels = [text.get_text() for text in draw(line).get_legend().get_texts()]
    for column, category in enumerate(CATEGORIES):
        size = format_bytes(int(line.live[peak, column]))
        assert f"{category}: {size} at the peak" in labels
    assert labels[5:] == ["forward", "backward", "recompute", "optimizer"]
    assert draw(line, legend=False).get_legend() is None


def test_phases_are_as_long_as_they_were():
    line = training(range(3))
    axes = draw(line)
    (strip,) = axes.child_axes
    drawn = {
        bars.get_label(): sum(path.get_extents().width for path in bars.get_paths())
        for bars in strip.collections
    }
    expected = Counter()
    for row in range(len(line.time) - 1):
        expected[PHASES[line.phase[row]]] += float(line.time[row + 1] - line.time[row])
    end = axes.get_xlim()[1] - float(line.time[-1])  # the last row's width
    expected[PHASES[line.phase[-1]]] += end
    assert drawn == pytest.approx(dict(expected))
    hatched = {bars.get_label() for bars in strip.collections if bars.get_hatch()}
    assert hatched == {"recompute"}
    assert "forward" not in texts(strip)  # too short for its name
    assert "forward" in texts(draw(training()).child_axes[0])


def test_axes_have_readable_units():
    axes = draw(timeline([(0.0, [0] * 5, "other", 0), (0.2, [3 << 30, 0, 0, 0, 0], "forward", 0)]))
    axes.figure.draw_without_rendering()
    assert axes.get_ylabel() == "memory (GiB)"
    shown = {
        tick.get_text(): y
        for tick, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
    }
    assert {"0": 0, "1": 1 << 30, "2": 2 << 30, "3": 3 << 30}.items() <= shown.items()
    (strip,) = axes.child_axes
    assert strip.get_xlabel() == "time since tracking began (ms)"
    assert [label.get_text() for label in strip.get_xticklabels()] == [
        "0",
        "50",
        "100",
        "150",
        "200",
    ]


def test_top_is_the_upper_end():
    assert draw(training(), top=7 << 30).get_ylim() == (0, 7 << 30)


# gaps and many steps


def test_a_gap_is_a_break_with_its_steps():
    line = training((0, 1, 40))
    (gap,) = line.gaps
    axes = draw(line)
    assert "steps 2\N{EN DASH}39 left out" in texts(axes)
    (band,) = [patch for patch in axes.patches if patch.get_gid() == "gap"]
    left, right = band.get_extents().transformed(axes.transData.inverted()).intervalx
    assert left == pytest.approx(float(line.time[gap - 1]))
    recorded = float(line.time[gap - 1] - line.time[0] + line.time[-1] - line.time[gap])
    assert right - left == pytest.approx(0.02 * recorded)
    # After it, everything keeps its length and its bytes.
    row = gap + 7
    place = right + float(line.time[row : row + 2].mean() - line.time[gap])
    for category, vertices in areas(axes).items():
        low, high = ends_at(vertices, place)
        assert high - low == line.live[row, CATEGORIES.index(category)]
    (strip,) = axes.child_axes
    ticks = {
        float(text.get_text()): x
        for x, text in zip(strip.get_xticks(), strip.get_xticklabels(), strict=True)
    }
    for milliseconds, x in ticks.items():
        seconds = milliseconds / (1e3 if "(ms)" in strip.get_xlabel() else 1)
        before = seconds <= float(line.time[gap - 1]) + 1e-9
        assert x == pytest.approx(seconds if before else right + seconds - float(line.time[gap]))
    assert max(ticks.values()) > right


def test_one_step_left_out():
    assert "step 1 left out" in texts(draw(training((0, 2))))


def test_steps_are_numbered_and_of_many_some():
    named = [text.strip() for text in texts(draw(training(range(3)))) if text.startswith(" step")]
    assert named == ["step 0", "step 1", "step 2"]
    named = [text.strip() for text in texts(draw(training(range(25)))) if text.startswith(" step")]
    assert named == [f"step {i}" for i in range(0, 24, 3)]  # the 24th begins at the edge
    assert not [text for text in texts(draw(training())) if text.startswith(" step")]


@pytest.mark.parametrize("steps", [range(50), [*range(20), *range(40, 60)]])
def test_very_many_steps_are_drawn_at_their_peaks(steps):
    line = training(steps)
    line.live[:, 3] += line.step * MIB  # so that no two steps are alike
    small = step_peaks(line)
    for number in steps:
        mine = line.live[line.step == number]
        largest = mine[mine.sum(1).argmax()]
        assert all(torch.equal(row, largest) for row in small.live[small.step == number])
        assert small.time[small.step == number][0] == line.time[line.step == number][0]
    assert [(int(small.step[g - 1]), int(small.step[g])) for g in small.gaps] == (
        [(19, 40)] if line.gaps else []
    )
    axes = draw(line)
    assert axes.get_legend().get_title().get_text() == "each step at its peak"
    for number in (0, 7, 19):  # before any gap, all along the step
        mine = line.step == number
        for time in (line.time[mine][1:] - 1e-5).tolist():
            total = sum(
                high - low for low, high in (ends_at(v, time) for v in areas(axes).values())
            )
            assert total == line.live[mine].sum(1).max()


# thinning out


@pytest.mark.parametrize("points", [4, 10, 1000])
def test_thinning_keeps_the_course_and_the_peak(points):
    line = random_timeline(5000, points)
    small = thin(line, points)
    assert len(small.time) <= points + 2  # where steps begin
    rows = torch.searchsorted(line.time, small.time)
    for column in ("time", "live", "phase", "step"):
        assert torch.equal(getattr(line, column)[rows], getattr(small, column))
    assert (rows[0], rows[-1]) == (0, len(line.time) - 1)
    total, kept = line.live.sum(1), small.live.sum(1)
    edges = torch.linspace(0, 1, points // 4 + 1, dtype=torch.float64)
    edges = line.time[0] + edges * (line.time[-1] - line.time[0])
    for low, high in zip(edges[:-1] + 1e-9, edges[1:] - 1e-9, strict=True):
        all_of_bin = total[(line.time >= low) & (line.time < high)]
        kept_of_bin = kept[(small.time >= low) & (small.time < high)]
        if len(all_of_bin):
            assert (kept_of_bin.min(), kept_of_bin.max()) == (all_of_bin.min(), all_of_bin.max())


def test_thinning_keeps_gaps_and_the_beginnings_of_phases():
    line = training([*range(10), *range(20, 30)], layers=8)
    for points in (800, 8):
        small = thin(line, points)
        assert len(small.time) < len(line.time)
        (old,), (new,) = line.gaps, small.gaps
        assert small.time[new - 1 : new + 1].tolist() == line.time[old - 1 : old + 1].tolist()
    small = thin(line, 800)
    starts = line.time[1:][line.phase[1:] != line.phase[:-1]]
    assert set(starts.tolist()) <= set(small.time.tolist())


def test_short_timelines_stay_as_they_are():
    line = random_timeline(100)
    assert thin(line, 100) is line


def test_events_at_one_time():
    line = random_timeline(100)
    line.time.zero_()
    assert thin(line, 8).live.sum(1).max() == line.live.sum(1).max()
    draw(line)


@pytest.mark.parametrize("points", [3, -1, True, 4.0, None])
def test_points_that_are_none(points):
    with pytest.raises((TypeError, ValueError), match="points must be"):
        thin(random_timeline(10), points)


# files


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_files_without_pyplot(tmp_path, monkeypatch, suffix, start):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    path = tmp_path / f"timeline{suffix}"
    plot.plot_track(track_of(training()), path)
    assert path.read_bytes().startswith(start)


def test_title(tmp_path):
    plot.plot_track(full_track(), tmp_path / "t.svg")
    assert "<!-- Live memory on cpu, 3 training steps -->" in (tmp_path / "t.svg").read_text()
    plot.plot_track(full_track(), tmp_path / "t.svg", title="Mine")
    assert "<!-- Mine -->" in (tmp_path / "t.svg").read_text()


def test_nothing_allocated(tmp_path):
    axes = draw(timeline([]))
    assert texts(axes) == ["nothing was allocated"]


def test_one_event():
    axes = draw(timeline([(0.0, [0, 0, 0, 8, 0], "forward", 0)]))
    assert areas(axes)["activations"][:, 1].max() == 8


def test_a_format_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="xyz.*not supported"):
        plot.plot_track(track_of(training()), tmp_path / "timeline.xyz")


@pytest.mark.parametrize("name", ["timeline.html", "TIMELINE.HTM"])
def test_a_page_for_a_browser_is_torchs(tmp_path, name):
    with ms.memory.track() as track:
        pass
    with pytest.raises(
        ValueError, match="'timeline.png', got .*snapshot.*pytorch.org/memory_viz"
    ) as e:
        track.plot(tmp_path / name)
    assert str(tmp_path / name) in str(e.value)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="a picture needs matplotlib.*pip install matplotlib"):
        plot.plot_track(track_of(training()), tmp_path / "timeline.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("events", range(700, 2000, 100))
def test_parts_of_steps_that_are_left_out(events, tmp_path):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ms.memory.track(model, optimizer, max_events=events) as t:
        torch.empty(10**6)
        for _ in range(300):
            torch.empty(10)
        for _ in range(40):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    t.plot(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size


def test_a_run_without_steps_of_which_a_part_is_left_out(tmp_path):
    with ms.memory.track(max_events=1000) as t:
        for _ in range(3000):
            torch.empty(10)
    assert t.timeline.gaps
    t.plot(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "a part of step 0 left out" in text
