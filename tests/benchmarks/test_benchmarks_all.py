"""All benchmarks: each is told on its page, and run_all.py runs them."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, and import one another by plain names


def scripts_that_record():
    return {
        path.stem for path in BENCHMARKS.glob("*.py") if "write_record(options." in path.read_text()
    } | {"densenet"}


def test_every_claim_is_told_and_measured():
    """What, against whom, and what it does not show, beside the list of all results."""
    page = ROOT / "docs" / "benchmarks.md"
    if not page.is_file():
        pytest.skip("no docs")
    text = page.read_text(encoding="utf-8").partition("## Where it loses")[0]
    rows = re.findall(r"^\| (`\w+\.py`.*) \|$", text, re.MULTILINE)
    told = []
    for row in rows:
        names, *cells = row.split(" | ")
        assert len(cells) == 3 and all(cells), row
        told += re.findall(r"`(\w+)\.py`", names)
    assert len(set(told)) == len(told)
    assert set(told) == scripts_that_record() | {"predict_speed"}  # which only prints
    if results := list((BENCHMARKS / "results").glob("*.json")):
        measured = {path.name.partition("-")[0] for path in results}
        assert measured >= {name for name in scripts_that_record() if not name.endswith("_cuda")}


@pytest.fixture
def run_all(monkeypatch, tmp_path):
    """With two benchmarks that are none."""
    pytest.importorskip("tqdm")
    module = importlib.import_module("run_all")
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "bad.py").write_text("import sys\nprint('a bar  3.0 MISSED')\nsys.exit(3)\n")
    (folder / "good.py").write_text(
        "import argparse, pathlib\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--save', type=pathlib.Path)\n"
        "parser.add_argument('--no-progress', action='store_true', required=True)\n"
        "parser.add_argument('--rounds', type=int, choices=[2], required=True)\n"
        "print('a peer left out: not installed')\n"
        "(parser.parse_args().save / 'good.json').write_text('')\n"
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "SECONDS", {"bad": 1, "good": 1})
    monkeypatch.setattr(module, "OPTIONS", {"good": "--rounds 2"})
    return module


def test_run_all_goes_on_after_a_failure(run_all, tmp_path, capsys):
    save, logs = tmp_path / "save", tmp_path / "logs"
    save.mkdir()
    assert run_all.main(["--save", str(save), "--logs", str(logs)]) == 1
    printed = capsys.readouterr().out
    assert (save / "good.json").exists()
    assert "MISSED" in (logs / "bad.log").read_text()
    assert "bad: a bar 3.0 MISSED" in printed
    assert "good: a peer left out: not installed" in printed
    assert "bad: exit 3" in printed


def test_run_all_runs_what_is_asked_for(run_all, tmp_path):
    options = ["--only", "good", "--save", str(tmp_path), "--logs", str(tmp_path)]
    assert run_all.main(options) == 0
    assert not (tmp_path / "bad.log").exists()


def test_run_all_has_every_benchmark_and_ends_in_time():
    """But for those that take long."""
    module = importlib.import_module("run_all")
    names = {name for name in scripts_that_record() if not name.endswith("_cuda")}
    names -= {"real_limit", "predict_time"}
    assert module.SECONDS.keys() == names >= module.OPTIONS.keys()
    assert sum(module.SECONDS.values()) <= 75 * 60  # the pages say one to two hours
