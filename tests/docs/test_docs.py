"""The code in the docs runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from memsave_ext import _native

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    *sorted((DOCS / "adam").glob("*.md")),
    *(
        DOCS / f"{n}.md"
        for n in ("choosing", "chunks", "fits", "linear_cross_entropy", "memory", "remat")
    ),
]

# Pages about what the native part alone does.
NATIVE = ("remat",)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_one_after_the_other(page, monkeypatch, tmp_path):
    if page.stem in NATIVE and not _native.available:
        pytest.skip("it shows what is native")
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
        code = compile("\n" * line + block[1], str(page), "exec")
        exec(code, namespace)


class TransformerBlock(nn.Sequential):
    pass


def test_the_first_block_of_the_readme_trains():
    readme = DOCS.parent / "README.md"
    if not readme.is_file():
        pytest.skip("no README")
    block = re.search(r"^```python\n(.*?)^```$", readme.read_text("utf-8"), re.DOTALL | re.M)
    made, step = block[1].split("\n\n", 2)[1:]
    blocks = [TransformerBlock(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    names = {
        "TransformerBlock": TransformerBlock,
        "model": nn.Sequential(*blocks, nn.Linear(4, 3)),
        "loss": nn.functional.cross_entropy,
        "x": torch.randn(6, 4),
        "y": torch.arange(6) % 3,
    }
    exec(f"import memsave_ext as ms\n{made}", names)
    before = names["loss"](names["model"](names["x"]), names["y"]).item()
    for _ in range(20):
        exec(step, names)
    assert all(p.grad is None for p in names["model"].parameters())
    assert {int(block[1].num_batches_tracked) for block in blocks} == {21}
    assert names["loss"](names["model"](names["x"]), names["y"]).item() < before


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    if not page.is_file():
        pytest.skip("no docs")
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
