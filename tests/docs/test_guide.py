"""The guide: its cells run, its notebook has its page, and the tool that writes both."""

import base64
import functools
import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import sampling
import torch

import memsave_ext as ms
from memsave_ext import _native

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs" / "guide.md").is_file():
    pytest.skip("no docs", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))  # a script, as its neighbours
guide = importlib.import_module("guide")

TEXT = guide.PAGE.read_text(encoding="utf-8")
BOOK = json.loads(guide.notebook(guide.parse(TEXT, guide.PAGE.parent)))
EVERY_TIME = 16  # cells that run without --full, too, which take a quarter of the time
FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"^!\[.*\]\((guide/.*)\)$", re.MULTILINE)


# the guide


@pytest.fixture
def _as_before(monkeypatch):
    # Times are not compared: one step of each variant is timed, and one tracked, in place of three.
    monkeypatch.setattr(ms.memory, "compare", functools.partial(ms.memory.compare, steps=1))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(
    not _native.available,
    reason="the guide is for the native part: pure Python's Adam needs temporaries",
)
@pytest.mark.usefixtures("_as_before")
def test_every_cell_runs_and_says_what_is_shown():
    pytest.importorskip("matplotlib")
    parts = guide.parse(TEXT, guide.PAGE.parent)
    if not sampling.full:
        del parts[parts.index(guide.cells(parts)[EVERY_TIME]) :]
    shown = [(bool(cell.output), sorted(cell.pictures)) for cell in guide.cells(parts)]
    guide.execute(parts)  # what the page claims is asserted in its cells
    ran = [(bool(cell.output), sorted(cell.pictures)) for cell in guide.cells(parts)]
    assert ran == shown

    savings = [saving for cell in guide.cells(parts) for saving in cell.savings]
    assert all(0 < after < before for _, before, after in savings)
    table = TEXT.partition("<!-- savings:begin -->")[2].partition("<!-- savings:end -->")[0]
    rows = re.findall(r"^\| \d+ \| (.*?) \|", table, re.MULTILINE)
    made = [technique for technique, _, _ in savings]
    assert made == rows[: len(made)]
    assert len(made) == len(rows) if sampling.full else len(made) > len(rows) / 3


def test_notebook_has_the_page():
    """Compared without the tool: every fence is a cell or its output, all other lines are text."""
    code = [block[2] for block in FENCE.finditer(TEXT) if block[1] == "python"]
    outputs = [block[2] for block in FENCE.finditer(TEXT) if block[1] == "text"]
    in_book = [cell for cell in BOOK["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) + "\n" for cell in in_book] == code
    streams = [o for cell in in_book for o in cell["outputs"] if o["output_type"] == "stream"]
    assert ["".join(stream["text"]) for stream in streams] == outputs

    drawn = [o["data"]["image/png"] for c in in_book for o in c["outputs"] if "data" in o]
    files = [guide.PAGE.parent / name for name in PICTURE.findall(TEXT)]
    assert [base64.b64decode(data) for data in drawn] == [file.read_bytes() for file in files]

    prose = PICTURE.sub("", FENCE.sub("", TEXT))
    in_book = [c for c in BOOK["cells"] if c["cell_type"] == "markdown"]
    assert "\n".join("".join(c["source"]) for c in in_book).split() == prose.split()


def test_notebook_is_valid():
    """What nbformat 4.5's schema asks for; nbformat itself where it is installed."""
    assert (BOOK["nbformat"], BOOK["nbformat_minor"]) == (4, 5)
    assert BOOK["metadata"]["kernelspec"].keys() >= {"name", "display_name"}
    ids = [cell["id"] for cell in BOOK["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell_id) for cell_id in ids)
    common = {"id", "cell_type", "metadata", "source"}
    for cell in BOOK["cells"]:
        code = cell["cell_type"] == "code"
        assert cell.keys() == common | ({"outputs", "execution_count"} if code else set())
        assert all(isinstance(line, str) for line in cell["source"])
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                assert output.keys() == {"output_type", "name", "text"}
            else:
                assert output["output_type"] == "display_data"
                assert output.keys() == {"output_type", "data", "metadata"}
    counts = [c["execution_count"] for c in BOOK["cells"] if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))

    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.from_dict(BOOK))


def test_every_section_measures_and_says_when_not_to():
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[2:]  # after the introduction and Setup
    assert [s.partition(".")[0] for s in sections] == [str(i + 1) for i in range(len(sections))]
    for section in sections:
        assert "```python" in section and "assert " in section
        assert section.count("**When not to ") == 1
        assert section.rstrip().rpartition("\n\n")[2].startswith("**When not to ")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", FENCE.sub("", TEXT)):
        assert (guide.PAGE.parent / target).exists(), target
    folder = guide.PAGE.parent / "guide"
    assert {f"guide/{path.name}" for path in folder.iterdir()} == set(PICTURE.findall(TEXT))


# the tool

PAGE = """# Title

<!-- savings:begin -->
<!-- savings:end -->

Words.

```python
savings = []
print("one")
```

```text
an old output
```

## 3. Section

```bash
not a cell
```

```python
import pathlib

pathlib.Path("dot.svg").write_text("<svg/>")
savings.append(("less of it", 2**21, 2**20))
```

```python
x = 1
```

End.
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_page_is_written_with_what_its_cells_printed_and_drew(page):
    assert guide.main(["--page", str(page)]) == 0
    text = page.read_text()
    assert 'print("one")\n```\n\n```text\none\n```\n\n## 3. Section\n' in text
    assert "old output" not in text
    assert "2**20))\n```\n\n![dot](guide/dot.svg)\n\n```python\nx = 1\n```\n\nEnd.\n" in text
    assert (page.parent / "guide" / "dot.svg").read_text() == "<svg/>"
    assert "\n| 3 | less of it | 2.0 MiB | 1.0 MiB | 50% |\n<!-- savings:end -->" in text

    assert not page.with_suffix(".ipynb").exists()
    assert guide.main(["--notebook", "--page", str(page)]) == 0
    assert page.read_text() == text
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    kinds = ["markdown", "code", "markdown", "code", "code", "markdown"]
    assert [cell["cell_type"] for cell in cells] == kinds
    assert cells[1]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["one\n"]}]
    (picture,) = cells[3]["outputs"]
    assert picture["data"] == {"image/svg+xml": "<svg/>"}
    assert cells[4]["outputs"] == []

    assert guide.main(["--page", str(page)]) == 0
    assert page.read_text() == text  # written from its own result, it is the same


def test_pictures_are_made_smaller_and_look_the_same():
    image = pytest.importorskip("PIL.Image")
    colours = [bytes(3 * [20 * i]) for i in range(12)]
    pixels = b"".join(colours[(i * i) % 12] for i in range(100 * 100))
    file = io.BytesIO()
    image.frombytes("RGB", (100, 100), pixels).save(file, "PNG", compress_level=0)
    smaller = guide.smaller(file.getvalue())
    assert len(smaller) < len(file.getvalue()) / 3
    assert image.open(io.BytesIO(smaller)).convert("RGB").tobytes() == pixels


def test_notebook_of_a_page_runs_nothing(page):
    assert guide.main(["--notebook", "--page", str(page)]) == 0
    assert page.read_text() == PAGE
    assert not (page.parent / "guide").exists()
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    assert cells[1]["outputs"][0]["text"] == ["an old output\n"]


def test_the_pages_are_built_with_the_notebook():
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs: ")[2].partition("\n\n")[0]
    assert recipe.index("tools/guide.py --notebook") < recipe.index("mkdocs build")
    assert f"`{guide.PAGE.with_suffix('.ipynb').name}`, which `make docs` writes" in TEXT


def test_error_names_the_cell_and_nothing_is_written(page):
    text = PAGE.replace("x = 1", "x = 1 / 0")
    page.write_text(text)
    line = text[: text.index("x = 1")].count("\n") + 1
    before = Path.cwd()
    message = f"cell 3, line {line} of page.md: ZeroDivisionError: division by zero"
    with pytest.raises(guide.CellError, match=re.escape(message)):
        guide.main(["--page", str(page)])
    assert page.read_text() == text
    assert not page.with_suffix(".ipynb").exists()
    assert Path.cwd() == before
