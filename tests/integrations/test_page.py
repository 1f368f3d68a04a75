"""The blocks of docs/integrations.md run."""

import re
from pathlib import Path

import pytest
from libraries import library

import memsave_ext as ms

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
SECTIONS = {
    "transformers": ["transformers", "accelerate"],
    "Lightning": ["lightning.pytorch"],
    "accelerate": ["accelerate"],
    "torch.compile": [],
    "timm and torchvision": ["timm"],
}

if not ms._native.available:
    pytest.skip("the page is run with the native part", allow_module_level=True)


def sections():
    """{heading: (block, number of the line before it)}"""
    text = PAGE.read_text(encoding="utf-8")
    pattern = r"^## (.*?)\n+```python\n(.*?)^```$"
    return {
        found[1]: (found[2], text.count("\n", 0, found.start(2)))
        for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE)
    }


@pytest.mark.filterwarnings("ignore")  # the tools' own
@pytest.mark.parametrize("name", SECTIONS)
def test_a_block(name, tmp_path, monkeypatch):
    if not PAGE.is_file():
        pytest.skip("no docs")
    for needed in SECTIONS[name]:
        library(needed)
    monkeypatch.chdir(tmp_path)
    block, line = sections()[name]
    patches, patch = [], ms.patch_torch_checkpoint

    def kept():
        patches.append(patch())
        return patches[-1]

    monkeypatch.setattr(ms, "patch_torch_checkpoint", kept)
    try:
        exec(compile("\n" * line + block, str(PAGE), "exec"), {"__name__": name})
    finally:
        for handle in patches:
            handle.remove()


def test_links_lead_somewhere():
    if not PAGE.is_file():
        pytest.skip("no docs")
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target


def test_each_section_is_run():
    if not PAGE.is_file():
        pytest.skip("no docs")
    headings = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == list(sections()) == list(SECTIONS)
