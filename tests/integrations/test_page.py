"""The blocks of docs/integrations.md and of docs/trainers run, and print what is shown.

Some pages take most of a minute: each is run by one commit in four, as files are (tests/turns.py).
"""

import functools
import re
from pathlib import Path

import pytest
import turns
from libraries import library

import memsave_ext as ms

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {  # and what they need
    "integrations": [],
    "trainers/transformers": ["transformers", "accelerate"],
    "trainers/lightning": ["lightning.pytorch"],
    "trainers/accelerate": ["accelerate"],
    "trainers/timm": ["timm"],
    "trainers/trl": ["transformers", "trl"],
    "trainers/peft": ["transformers", "peft", "bitsandbytes"],
}

WITHOUT_NUMBERS = functools.partial(re.sub, r"[\d.]+", "0")

if not DOCS.is_dir():
    pytest.skip("no docs", allow_module_level=True)
if not ms._native.available:
    pytest.skip("the pages are run with the native part", allow_module_level=True)


def text_of(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_every_page_is_run():
    assert {f"trainers/{page.stem}" for page in (DOCS / "trainers").glob("*.md")} < {*PAGES}


@pytest.mark.filterwarnings("ignore")  # the tools' own
@pytest.mark.parametrize("name", [name for at, name in enumerate(PAGES) if turns.has(at)])
def test_its_blocks_run_one_after_the_other(name, tmp_path, monkeypatch, capsys):
    text = text_of(name)
    for needed in PAGES[name]:
        library(needed)
    monkeypatch.chdir(tmp_path)
    patches, patch = [], ms.patch_torch_checkpoint

    def kept():
        patches.append(patch())
        return patches[-1]

    monkeypatch.setattr(ms, "patch_torch_checkpoint", kept)
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) == text.count("```python")
    names = {"__name__": name}
    try:
        for block in blocks:
            line = text.count("\n", 0, block.start(1))
            exec(compile("\n" * line + block[1], f"{name}.md", "exec"), names)
    finally:
        for handle in patches:
            handle.remove()
    printed = WITHOUT_NUMBERS(capsys.readouterr().out)
    for shown in re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        assert WITHOUT_NUMBERS(shown) in printed


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", text_of(name)):
        assert ((DOCS / name).parent / target).exists(), target
