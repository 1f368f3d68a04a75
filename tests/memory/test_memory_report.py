"""Reports and documents of tracks."""

import io
import json
import re
from dataclasses import replace

import pytest
import torch
from timelines import MIB, full_track, random_timeline, track_of, training

import memsave_ext as ms
from memsave_ext.memory import report
from memsave_ext.memory.account import Region, Step
from memsave_ext.memory.events import CATEGORIES, PHASES
from memsave_ext.memory.series import thin
from memsave_ext.shared import table


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.setattr(table, "_rich", lambda: None)


def tables(track, **options):
    """The printed tables by title: lists of rows, a row split where columns are."""
    file = io.StringIO()
    report.print_report(track, file=file, **options)
    headline, *blocks = file.getvalue().strip("\n").split("\n\n")
    found = {"headline": headline}
    for block in blocks:
        title, header, rule, *rows = block.split("\n")
        edges = [match.span() for match in re.finditer("-+", rule)]
        cut = [[line[a:b].strip() for a, b in edges] for line in (header, *rows)]
        found[title] = [dict(zip(cut[0], row, strict=True)) for row in cut[1:]]
    return found


# tables


def test_what_the_peak_was_made_of():
    track = full_track()
    found = tables(track)
    assert track.peak == (4 + 8 + 4 + 3 + 2) * MIB  # before any gradient
    assert (
        found["headline"]
        == "Peak 21.0 MiB on cpu, in recompute of step 0; 12.0 MiB live at the end"
    )
    assert found["What the peak was made of"] == [
        {"category": "parameters", "memory": "4.00 MiB", "share": "19.0%"},
        {"category": "gradients", "memory": "0 B", "share": "0.0%"},
        {"category": "optimizer", "memory": "8.00 MiB", "share": "38.1%"},
        {"category": "activations", "memory": "7.00 MiB", "share": "33.3%"},
        {"category": "other", "memory": "2.00 MiB", "share": "9.5%"},
    ]


def test_the_largest_tensors_and_their_makers():
    found = tables(full_track(), top=2)
    tensors = found["Largest of 5 tensors at the peak"]
    assert [row["tensor"] for row in tensors] == ["3.00 MiB", "2.00 MiB"]
    assert tensors[0]["module"] == "blocks.1"
    assert tensors[0]["line"] == "net.py:12 in forward"
    assert "name" not in tensors[0]  # a column without a cell
    made = found["Where the tensors at the peak were made"]
    assert [(row["module"], row["line"], row["at the peak"], row["tensors"]) for row in made] == [
        ("blocks.1", "net.py:12 in forward", "3.00 MiB", "2"),
        ("blocks.1", "net.py:14 in forward", "2.00 MiB", "1"),
    ]
    assert tables(full_track())["Largest of 5 tensors at the peak"][3]["name"] == "0.weight"


def test_regions():
    rows = tables(full_track(regions=4), top=2)["Checkpointed regions"]
    assert [list(row.values()) for row in rows] == [
        ["blocks.3", "3", "4.00 MiB", "40.0 ms", "13.3 ms", "12.1%"],
        ["blocks.2", "3", "3.00 MiB", "30.0 ms", "10.0 ms", "9.1%"],
        ["2 others", "6", "3.00 MiB", "30.0 ms", "5.00 ms", "9.1%"],
        ["all", "12", "10.0 MiB", "100 ms", "8.33 ms", "30.3%"],
    ]
    assert "Checkpointed regions" not in tables(full_track(regions=0))


def test_a_region_without_name_calls_or_time():
    track = track_of(training(), regions=[Region("", 0, 0, 0.0)])
    (row,) = tables(track)["Checkpointed regions"]
    assert list(row.values()) == ["-", "0", "0 B", "0.00 \N{MICRO SIGN}s", "-", "-"]


def test_steps():
    rows = tables(full_track())["Training steps"]
    assert [list(row.values()) for row in rows] == [
        ["0", "100 ms", "20.0 MiB"],
        ["1", "110 ms", "20.0 MiB"],
        ["2", "120 ms", "20.0 MiB"],
    ]


def test_many_steps_are_summed_up():
    track = full_track()
    track.steps = [Step(i, 0.001 * (i + 1), (i + 1) * MIB) for i in range(99)]
    rows = tables(track)["99 training steps"]
    assert [list(row.values()) for row in rows] == [
        ["minimum", "1.00 ms", "1.00 MiB"],
        ["median", "50.0 ms", "50.0 MiB"],
        ["maximum", "99.0 ms", "99.0 MiB"],
    ]


def test_nothing_but_the_peak():
    assert len(tables(track_of(training()))) == 2
    assert len(tables(full_track(), top=0)) == 4  # regions are summed up, steps listed


def test_it_prints(capsys):
    report.print_report(full_track())
    assert capsys.readouterr().out.startswith("Peak 21.0 MiB")


@pytest.mark.parametrize("top", [-1, 1.5, "3", True, None])
def test_top_that_is_none(top, capsys):
    with pytest.raises((TypeError, ValueError), match="report: top must be"):
        report.print_report(full_track(), top=top)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000123, "12.3 \N{MICRO SIGN}s"),
        (0.001, "1.00 ms"),
        (0.5, "500 ms"),
        (0.9996, "1.00 s"),
        (999.0, "999 s"),
    ],
)
def test_seconds(seconds, text):
    assert table.format_seconds(seconds) == text


# documents


def is_plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return type(value) in (int, float, str)


def test_a_document_is_plain_and_survives_json():
    track = full_track()
    document = report.as_json(track)
    assert is_plain(document)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert (document["format"], document["version"]) == ("memsave_ext.memory.track", 1)
    assert document["memsave_ext"] == ms.__version__
    assert document["torch"] == torch.__version__
    assert document["device"] == "cpu"
    for name in ("live", "peak", "peak_phase", "peak_step", "peak_time", "at_peak"):
        assert document[name] == getattr(track, name)
    assert sum(document["at_peak"].values()) == document["peak"]
    assert [Step(**step) for step in document["steps"]] == track.steps
    assert [Region(**region) for region in document["regions"]] == track.regions
    assert [tensor["bytes"] for tensor in document["top"]] == [t.bytes for t in track.top()]


def test_under_a_default_device():
    """As of `torch.set_default_device("cuda")`, with which the figures' tensors would lie there."""
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with ms.memory.track(model, optimizer) as t:
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()

    def told():
        thinned = thin(t.timeline, 8)
        return t.at_peak, t.report(), t.to_json(), thinned.live.tolist(), [*map(str, t.top(5))]

    t._final = None
    with torch.device("meta"):
        under_meta = told()
        with ms.memory.track(model, optimizer) as other:
            model(x).sum().backward()
        assert other.peak > 0
    t._final = None  # they are counted once more
    assert told() == under_meta


def test_the_columns_of_a_timeline():
    line = training((0, 1, 7))
    columns = json.loads(json.dumps(report.timeline_as_json(line)))
    assert columns["rows"] == len(line.time)
    assert columns["phases"] == list(PHASES)
    torch.testing.assert_close(columns["time"], line.time.tolist(), rtol=0, atol=1e-7)
    assert columns["live"] == dict(zip(CATEGORIES, line.live.T.tolist(), strict=True))
    for name in ("phase", "step", "moved"):
        assert columns[name] == getattr(line, name).tolist()
    assert columns["gaps"] == list(line.gaps)


def test_long_timelines_are_thinned_out_and_keep_the_peak():
    line = random_timeline(100_000)
    document = report.as_json(track_of(line), points=500)
    columns = document["timeline"]
    assert columns["rows"] == 100_000
    assert len(columns["time"]) <= 502
    sums = [sum(row) for row in zip(*columns["live"].values(), strict=True)]
    assert max(sums) == document["peak"] == line.live.sum(1).max()
    assert len(json.dumps(document)) < 60_000


def test_an_empty_timeline():
    empty = training()
    empty = replace(empty, **{n: getattr(empty, n)[:0] for n in ("time", "live", "phase", "step")})
    columns = report.timeline_as_json(empty)
    assert columns["time"] == [] and columns["live"] == {category: [] for category in CATEGORIES}


def test_a_written_document(tmp_path):
    document = report.as_json(full_track(), tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == document
