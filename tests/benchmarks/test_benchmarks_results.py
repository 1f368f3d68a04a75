"""Records of benchmarks, and the tables and pictures that are made of them."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, and import one another by plain names
common = importlib.import_module("shared.common")
readme_tables = importlib.import_module("readme_tables")

MACHINE = common.machine()
ROWS = [
    {"region": "8 saved tensors", "peer": "torch", "overhead_us": 113.0, "ratio": 1.0},
    {"region": "8 saved tensors", "peer": "ours", "overhead_us": 11.0, "ratio": 0.1},
]


def record(**more):
    return {"machine": MACHINE, "settings": {"rounds": 3}, "rows": ROWS, **more}


@pytest.fixture
def plot():
    for name in ("matplotlib", "PIL"):
        pytest.importorskip(name)
    return importlib.import_module("plot")


# records


def write(folder, value, settings, **machine):
    machine = {**MACHINE, "commit": "a", "dirty": False, **machine}
    run = {"machine": machine, "settings": settings, "value": value}
    return common.write_record(folder, "claim", run)


def values(path):
    return [run["value"] for run in json.loads(path.read_text())]


def test_record_replaces_only_what_it_repeats(tmp_path):
    one, other = {"depth": (1, 2)}, {"depth": (3, 4)}
    path = write(tmp_path, 1, one)
    write(tmp_path, 2, other)
    write(tmp_path, 3, one, commit="b")
    write(tmp_path, 4, one, torch="2.0")
    write(tmp_path, 5, one, native=not MACHINE["native"])
    assert values(path) == [1, 2, 3, 4, 5]
    assert write(tmp_path, 6, one) == path  # the same as the first
    assert values(path) == [2, 3, 4, 5, 6]
    assert common.newest(path)["value"] == 6


def test_record_of_another_machine_has_its_own_file(tmp_path):
    path = write(tmp_path, 1, {})
    others = [write(tmp_path, 2, {}, cpu="another"), write(tmp_path, 3, {}, cores=999),
              write(tmp_path, 4, {}, device="cuda", gpu="A GPU")]  # fmt: skip
    assert len({path, *others}) == 4
    assert [values(each) for each in (path, *others)] == [[1], [2], [3], [4]]


def test_record_of_a_changed_tree_does_not_stay(tmp_path):
    path = write(tmp_path, 1, {"n": 1}, dirty=True)
    write(tmp_path, 2, {"n": 2}, dirty=True)
    write(tmp_path, 3, {"n": 1}, commit="b")
    assert values(path) == [2, 3]


def test_record_has_a_line_for_each_row(tmp_path):
    settings = {"depth": [1, 2]}
    path = common.write_record(tmp_path, "claim", record(settings=settings, empty=[], name="µs"))
    lines = path.read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines if '"region"' in line] == ROWS
    assert ' "settings": {"depth": [1, 2]},' in lines
    (run,) = json.loads(path.read_text())
    assert (run["rows"], run["empty"], run["name"]) == (ROWS, [], "µs")


def test_rows_are_printed_and_written_as_they_come(tmp_path, capsys):
    """A benchmark that a limit of time ends has those rows that it came to."""
    settings = {"n": 1}
    common.write_record(tmp_path, "claim", record(settings={"n": 2}))
    rows = common.Rows(tmp_path, "claim", record(settings=settings, rows=None))
    rows.append({"case": "a", "seconds": 0.123456, "n": 3})
    assert capsys.readouterr().out == "a, seconds 0.1235, n 3\n"
    rows.append({"case": "b", "seconds": 2.0, "n": 4})
    (path,) = tmp_path.glob("*.json")
    other, run = json.loads(path.read_text())
    assert (run["rows"], run["partial"], other["settings"]) == (rows, True, {"n": 2})
    common.write_record(tmp_path, "claim", record(settings=settings, rows=rows, bars=[]))
    _, run = json.loads(path.read_text())
    assert (run["rows"], run["bars"]) == (rows, [])
    assert "partial" not in run


def test_results_are_written_in_lines():
    """As write_record does, a line for each row; at most 10,000, so that a change can be read."""
    results = list((BENCHMARKS / "results").glob("*.json"))
    if not results:
        pytest.skip("no results")
    texts = [path.read_text() for path in results]
    for text in texts:
        assert text == common.as_lines(json.loads(text))
    assert sum(len(text.splitlines()) for text in texts) <= 10_000


# tables


def test_tables_are_those_of_the_results():
    if not (ROOT / "README.md").is_file() or not list((BENCHMARKS / "results").glob("*.json")):
        pytest.skip("no README or no results")
    assert readme_tables.main(["--check"]) == 0


def test_every_result_is_on_a_page():
    results = list((BENCHMARKS / "results").glob("*.json"))
    if not (ROOT / "README.md").is_file() or not results:
        pytest.skip("no README or no results")
    pages = "".join(page.read_text(encoding="utf-8") for page in readme_tables.pages())
    marked = {m.partition(":")[0] for m in re.findall(r"<!-- (\S+?):begin -->", pages)}
    assert {path.name.partition("-")[0] for path in results} <= marked


def test_index_has_the_newest_run_of_each_file(tmp_path):
    path = write(tmp_path, 1, {}, commit="old")
    write(tmp_path, 2, {}, commit="new", dirty=True)
    bars = [{"name": "a", "value": 1, "bar": 2, "ok": ok} for ok in (True, False, True)]
    common.write_record(tmp_path, "other", record(bars=bars))
    page = tmp_path / "page.md"
    page.write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    options = ["--readme", str(page), "--results", str(tmp_path)]
    assert readme_tables.main(options) == 0
    assert readme_tables.main([*options, "--check"]) == 0
    lines = page.read_text().splitlines()[3:-1]
    assert len(lines) == 2
    assert " new* " in lines[0] and " old" not in lines[0]
    assert " 2 of 3 " in lines[1]
    assert all(json.loads(path.read_text())[-1]["date"] in line for line in lines)


def test_record_has_the_command_that_made_it(tmp_path, monkeypatch):
    words = ["/somewhere/a.py", "--rounds", "3", "--save", str(tmp_path), "--no-progress", "--big"]
    monkeypatch.setattr(sys, "argv", words)
    (run,) = json.loads(write(tmp_path, 1, {}).read_text())
    assert run["command"] == "benchmarks/a.py --rounds 3 --big"
    assert run["seconds"] >= 0


def test_tables_are_rewritten(tmp_path):
    left_out = {"a peer": "not installed"}
    path = common.write_record(tmp_path, "checkpoint_overhead", record(left_out=left_out))
    readme = tmp_path / "README.md"
    before = (
        "# A\n<!-- {0}:begin -->\nold\n<!-- {0}:end -->\n<!-- {1}:begin -->\n<!-- {1}:end -->\n"
    )
    readme.write_text(before.format("checkpoint_overhead", "densenet"))
    options = ["--readme", str(readme), "--results", str(tmp_path)]
    assert readme_tables.main([*options, "--check"]) == 1
    assert readme_tables.main(options) == 0
    assert readme_tables.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert "old" not in text
    assert "11.0 µs (0.10" in text
    assert "Left out: a peer (not installed)." in text
    assert path.name in text
    assert torch.__version__ in text
    assert "](" not in text  # there is no picture yet
    assert text.endswith(
        "<!-- densenet:begin -->\n<!-- densenet:end -->\n"
    )  # no result: left alone


def test_figures_in_sentences_are_those_of_the_results(tmp_path, monkeypatch):
    sentences = importlib.import_module("tables.sentences")
    pages = {str(page.relative_to(ROOT)) for page in readme_tables.pages()}
    assert {sentence.page for sentence in sentences.SENTENCES} <= pages
    words = "takes {} to {} times torch's (of 8)"
    one = ("docs/a.md", words, "claim", lambda run: run["value"], sentences.range_of)
    monkeypatch.setattr(sentences, "SENTENCES", (sentences.Sentence(*one),))
    text = "It takes 1.5 to\n  2 times torch's (of 8), not 3 to 4 times torch's (of 9).\n"
    assert sentences.renew("docs/a.md", text, tmp_path) == text  # there is no result
    write(tmp_path, [7.0], {}, device="cpu")
    write(tmp_path, [1.25, 0.5, 3.0], {}, device="cpu")
    write(tmp_path, [9.0], {}, device="cuda", gpu="A GPU")
    expected = text.replace("1.5", "0.5").replace("2 times", "3.0 times")
    assert sentences.renew("docs/a.md", text, tmp_path) == expected
    assert sentences.renew("docs/b.md", text, tmp_path) == text
    for other in ("", text.replace("takes", "took"), 2 * text):
        with pytest.raises(ValueError, match=r"docs/a\.md has [02] times, and should once: takes"):
            sentences.renew("docs/a.md", other, tmp_path)


# pictures


def test_pictures_are_those_of_the_results(plot):
    if not list((BENCHMARKS / "results").glob("*.json")):
        pytest.skip("no results")
    assert plot.main(["--check"]) == 0


def test_every_claim_with_a_picture_has_a_drawing(plot):
    assert plot.DRAWINGS.keys() == readme_tables.PICTURES.keys() <= readme_tables.TABLES.keys()


def test_picture_is_known_by_its_results(plot, tmp_path, capsys):
    options = ["--results", str(tmp_path)]

    def check():
        capsys.readouterr()
        status = plot.main([*options, "--check"])
        assert bool(capsys.readouterr().out) == bool(status)
        return status

    results = common.write_record(tmp_path, "checkpoint_overhead", record())
    picture = results.with_suffix(".png")
    assert check() == 1  # missing
    assert plot.main(options) == 0
    assert check() == 0
    drawn, when = picture.read_bytes(), picture.stat().st_mtime_ns
    assert plot.main(options) == 0
    assert picture.stat().st_mtime_ns == when  # what is right is left alone

    runs = json.loads(results.read_text())
    runs[-1]["rows"][0]["overhead_us"] += 1
    results.write_text(json.dumps(runs))
    assert check() == 1
    assert plot.main(options) == 0
    assert check() == 0
    assert picture.read_bytes() != drawn


def test_picture_that_was_painted_over(plot, tmp_path):
    image_module = importlib.import_module("PIL.Image")
    results = common.write_record(tmp_path, "checkpoint_overhead", record())
    picture = plot.draw(results)
    with image_module.open(picture) as image:
        image.load()
        digests = image.info[plot.KEY]
    information = plot.PngImagePlugin.PngInfo()
    information.add_text(plot.KEY, digests)
    image.save(picture, pnginfo=information)
    assert plot.fault(results) is None  # compressed anew, the same to the eye
    image.putpixel((5, 5), (0, 0, 0, 255))
    image.save(picture, pnginfo=information)
    assert "changed" in plot.fault(results)
    image.save(picture)
    assert "not drawn" in plot.fault(results)


def test_picture_depends_on_how_it_is_drawn(plot, tmp_path, monkeypatch):
    results = common.write_record(tmp_path, "checkpoint_overhead", record())
    plot.draw(results)
    table, caption = readme_tables.TABLES["checkpoint_overhead"]
    other = {"checkpoint_overhead": (table, lambda run: f"{caption(run)}!")}
    monkeypatch.setattr(importlib.import_module("shared.drawings"), "TABLES", other)
    assert "another" in plot.fault(results)


def test_page_shows_the_picture_from_where_it_is(plot, tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    docs.mkdir()
    path = common.write_record(results, "checkpoint_overhead", record())
    plot.draw(path)
    page = docs / "page.md"
    page.write_text("<!-- checkpoint_overhead:begin -->\n<!-- checkpoint_overhead:end -->\n")
    assert readme_tables.main(["--readme", str(page), "--results", str(results)]) == 0
    (target,) = re.findall(r"!\[.+?\]\((.+?)\)", page.read_text())
    assert target == f"../results/{path.stem}.png"
