"""The code in the docs runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    *sorted((DOCS / "adam").glob("*.md")),
    *(DOCS / f"{n}.md" for n in ("choosing", "chunks", "fits", "linear_cross_entropy")),
    *(DOCS / f"{n}.md" for n in ("memory", "offload", "remat")),
]

# Pages that run with the native part alone, and why.
NATIVE = {
    "offload": "what moves is native",
    "remat": "it shows what is native",
    "fits": "tests/predict has the same in pure Python with smaller models",
}
# Run in place of what a page shows, which takes half a minute: as many means are tried.
SMALLER = {"fits": {"depth=32": "depth=2", '"24GB"': '"3.4GB"'}}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_one_after_the_other(page, monkeypatch, tmp_path):
    if page.stem in NATIVE and not _native.available:
        pytest.skip(NATIVE[page.stem])
    monkeypatch.chdir(tmp_path)  # they may write files
    if not page.is_file():
        pytest.skip("no docs")
    text = page.read_text(encoding="utf-8")
    for shown, smaller in SMALLER.get(page.stem, {}).items():
        assert text.count(shown) == 1
        text = text.replace(shown, smaller)
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


def blocks(page):
    if not page.is_file():
        pytest.skip(f"no {page.name}")
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.M)
    assert found
    return found


def test_the_block_of_the_readme_runs_as_it_stands(capsys):
    (block,) = blocks(DOCS.parent / "README.md")
    code, loop = block.split("for step")
    names = {"__name__": "readme"}
    exec(code, names)
    assert "fit: predicted peak" in capsys.readouterr().out
    before = [p.clone() for p in names["model"].parameters()]
    with ms.memory.track(names["model"], names["optimizer"]) as t:
        exec("for step" + loop, names)
    assert not any(map(torch.equal, before, names["model"].parameters()))
    assert t.peak <= 1.02 * 400e6


def test_the_block_of_parts_runs(monkeypatch):
    """As it stands, given what a user has: a block that takes a mask, a model and an input."""
    (code,) = blocks(DOCS / "parts.md")

    class Masked(TransformerBlock):
        def forward(self, x, mask):
            return super().forward(x) * mask

    x = torch.randn(6, 4, requires_grad=True)
    names = {
        "TransformerBlock": TransformerBlock,
        "block": Masked(nn.Linear(4, 4), nn.Tanh()),
        "model": nn.Sequential(TransformerBlock(nn.Linear(4, 4), nn.ReLU())),
        "x": x,
        "mask": torch.ones(4),
    }
    torchs = torch.utils.checkpoint.checkpoint
    patches, patch = [], ms.patch_torch_checkpoint
    monkeypatch.setattr(ms, "patch_torch_checkpoint", lambda: patches.append(patch()))
    try:
        exec(code, names)
        assert torch.utils.checkpoint.checkpoint is not torchs
    finally:
        for handle in patches:
            handle.remove()
    assert torch.utils.checkpoint.checkpoint is torchs
    assert torch.equal(names["y"], names["block"](x, names["mask"]))
    names["y"].sum().backward()
    assert x.grad.any()
    assert torch.equal(names["model"](x), type(names["model"][0]).forward(names["model"][0], x))

    layer = names["DenseLayer"](8, 3)
    features = [torch.randn(2, 4, 5, 5, requires_grad=True) for _ in range(2)]
    result = layer(*features)
    result.sum().backward()
    assert result.shape == (2, 3, 5, 5)
    assert int(layer.norm.num_batches_tracked) == 1  # although it ran twice
    assert layer.conv.weight.grad.any()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    if not page.is_file():
        pytest.skip("no docs")
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
