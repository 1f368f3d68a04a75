"""The code in the docs runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [*sorted((DOCS / "adam").glob("*.md")), DOCS / "choosing.md", DOCS / "memory.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_one_after_the_other(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # they may write files
    if not page.is_file():
        pytest.skip("no docs")
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace = {"__name__": page.stem}
    for block in blocks:
        # Errors name the page and its line.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    if not page.is_file():
        pytest.skip("no docs")
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
