"""CONTRIBUTING.md names files that are there, and every room."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
pytestmark = pytest.mark.skipif(
    not PAGE.is_file() or not (ROOT / "csrc").is_dir(), reason="needs the source tree"
)
FOLDERS = "csrc|memsave_ext|tests|benchmarks|docs|tools"


def paths():
    return set(re.findall(rf"\b(?:{FOLDERS})/[\w./]*\w", PAGE.read_text(encoding="utf-8")))


def test_every_path_is_there():
    named = paths()
    assert len(named) > 40
    results = {"benchmarks/results", "benchmarks/NAME.py"}  # written; a placeholder
    missing = {path for path in named - results if not (ROOT / path).exists()}
    assert not missing


def test_every_folder_of_tests_and_of_csrc_is_named():
    named = paths()
    for parent in ("csrc", "tests"):
        folders = {
            f"{parent}/{path.name}"
            for path in (ROOT / parent).iterdir()
            if path.name != "__pycache__"
            and path.is_dir()
            and any(path.rglob("*.[ch]*")) | any(path.glob("*.py"))
        }
        assert folders <= named


def test_every_target_of_make_that_is_named_exists():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"\bmake ([a-z-]+)", PAGE.read_text(encoding="utf-8"))
    assert set(named) <= set(targets)


def steps_of_ways():
    """The names of functions at the left of each step, and the files at its right."""
    ways = PAGE.read_text(encoding="utf-8").partition("## The ways")[2].partition("\n## ")[0]
    for way in re.findall(r"```text\n(.*?)```", ways, re.DOTALL):
        for step in way.split("\n  v\n"):
            lines, files, folder = step.split("\n"), [], ""
            for path in re.findall(r"[\w./]+\.(?:cpp|h|py)\b", "\n".join(x[50:] for x in lines)):
                path = path if "/" in path else f"{folder}/{path}"
                folder = path.rpartition("/")[0]
                files.append(ROOT / path)
            yield re.findall(r"[a-z_]+", lines[0][:17]), files


def test_ways_name_functions():
    seen = 0
    for names, files in steps_of_ways():
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        for name in {*names} - {"hook", "kernel", "allocator", "report", "table"}:  # of others
            found = re.search(rf"\b{name}\(|^class {name.title()}\b", text, re.MULTILINE)
            assert found, f"{name} is not in {files}"
            seen += 1
    assert seen > 30


def test_tests_are_in_the_folders_of_rooms():
    assert not list((ROOT / "tests").glob("test_*.py"))
