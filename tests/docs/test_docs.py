"""The code in the docs runs."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from libraries import library

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.predict import techniques

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    *sorted((DOCS / "adam").glob("*.md")),
    *(DOCS / f"{n}.md" for n in ("checkpoint", "choosing", "chunks", "fits")),
    *(DOCS / f"{n}.md" for n in ("linear_cross_entropy", "memory", "offload", "remat", "symptoms")),
    DOCS / "weights_on.md",
]

if not DOCS.is_dir():
    pytest.skip("no docs", allow_module_level=True)

# Pages that run with the native part alone, and why.
NATIVE = {
    "offload": "what moves is native",
    "remat": "it shows what is native",
    "symptoms": "remat is in it",
    "fits": "tests/predict has the same in pure Python with smaller models",
}
# Run in place of what a page shows, which takes half a minute: as many means are tried before one
# fits.
SMALLER = {
    "fits": {"depth=32": "depth=2", '"24GB"': '"9GB"', '"3.5GB"': '"6.5GB"'},
    "symptoms": {'"250MB", devices': '"700MB", devices'},
}


LIBRARIES = {"bitsandbytes", "peft", "transformers"}  # a block is left out where one is missing


def importable(name):
    try:
        library(name)
    except pytest.skip.Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_one_after_the_other(page, monkeypatch, tmp_path):
    if page.stem in NATIVE and not _native.available:
        pytest.skip(NATIVE[page.stem])
    monkeypatch.chdir(tmp_path)  # they may write files
    text = page.read_text(encoding="utf-8")
    for shown, smaller in SMALLER.get(page.stem, {}).items():
        assert text.count(shown) == 1
        text = text.replace(shown, smaller)
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace = {"__name__": page.stem}
    for block in blocks:
        imports = " ".join(re.findall(r"^(?:import|from) .*", block[1], re.MULTILINE))
        if not all(map(importable, LIBRARIES & {*re.findall(r"\w+", imports)})):
            continue
        # Errors name the page and its line.
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(page), "exec")
        exec(code, namespace)


def blocks(page):
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.M)
    assert found
    return found


@pytest.mark.once
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


@pytest.mark.once
def test_the_home_of_the_site_is_the_readmes_call_and_picture():
    assert blocks(DOCS / "index.md") == blocks(DOCS.parent / "README.md")
    picture = re.compile(r"!\[.*\]\((?:\.\./)?(benchmarks/results/.*)\)")
    home, readme = (
        picture.findall(page.read_text("utf-8"))
        for page in (DOCS / "index.md", DOCS.parent / "README.md")
    )
    assert home == readme[:1]


def test_the_blocks_of_checkpoint_count_once_and_leave_torch_as_it_was():
    torchs = torch.utils.checkpoint.checkpoint
    names = {"__name__": "checkpoint"}
    for code in blocks(DOCS / "checkpoint.md"):
        exec(code, names)
    assert torch.utils.checkpoint.checkpoint is torchs
    model, x, layer = names["model"], names["x"], names["layer"]
    assert int(names["net"][1].num_batches_tracked) == 1
    assert torch.equal(names["y"], type(model[0]).forward(model[0], x))
    assert all(p.grad.any() for p in model[1].parameters())
    assert layer.conv.weight.grad.any() and all(f.grad.any() for f in names["features"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target


def test_techniques_are_named():
    page = (DOCS / "fits.md").read_text(encoding="utf-8").replace("\n  ", " ")
    of_all = {one.name for t in techniques.ALL for one in (t, t.for_loops_that_clip()) if one}
    parts = {part for name in of_all for part in name.split(", ")}
    (told,) = (line for line in page.splitlines() if line.startswith("- Rows combine"))
    assert parts == set(re.findall(r"`([^`]+)`", told))
    (told,) = (line for line in page.splitlines() if "take `technique=`" in line)
    assert re.findall(r"such as `([^`]+)`", told)[0] in of_all
    takes = {
        "`fit`": ms.fit,
        "`memory.fits`": ms.memory.fits,
        "`found.apply`": ms.memory.Fits.apply,
    }
    for name, function in takes.items():
        assert ("technique" in inspect.signature(function).parameters) == (name in told)


def test_no_line_of_code_is_wider_than_its_column():
    root = DOCS.parent
    pages = [path for path in (root / "README.md", root / "CONTRIBUTING.md") if path.is_file()]
    for page in [*pages, *sorted(DOCS.rglob("*.md"))]:
        code = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.M)
        lines = "\n".join(text for kind, text in code if kind != "text").splitlines()
        assert not [line for line in lines if len(line) > 100], page


# The call that a page is about, or the calls. Left out are the symptoms and the guide: they begin
# with what all of their snippets run on, and tools/guide.py writes what the guide's cells print.
CALLS = {
    **dict.fromkeys(("README", "index", "fits", "integrations", "accelerate", "timm"), "ms.fit("),
    "transformers": "ms.integrations.transformers.Fit(",
    "peft": "ms.integrations.transformers.Fit(",
    "lightning": "ms.integrations.lightning.Fit(",
    "trl": "ms.integrations.trl.patch_lm_head(",
    "any_optimizer": "ms.in_backward(",
    "bfloat16": 'bf16="split")',
    "clipping": "max_grad_norm=1.0)",
    "grads_on": "grads_on=folder)",
    "loss_scaling": "grad_scaler=scaler)",
    "other_losses": ".paused()",
    "sgd_lion": "ms.SGD(",
    "states": 'state_dtype="8bit")',
    "states_on": "states_on=folder)",
    "choosing": "ms.AdamW(",
    "distributed": "ms.AdamW(",
    "checkpoint": "ms.checkpoint_modules(",
    "chunks": "ms.checkpoint(",
    "linear_cross_entropy": "ms.linear_cross_entropy(",
    "memory": "ms.memory.track(",
    "offload": "ms.remat_module(",
    "remat": "ms.remat(",
    "weights_on": "ms.weights_on(",
}


def test_the_first_snippet_of_a_page_begins_with_its_call():
    texts = [
        (page.stem, page.read_text("utf-8"))
        for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md"))
    ]
    shown = {name: text for name, text in texts if "```python\n" in text}
    assert shown.keys() == CALLS.keys() | {"symptoms", "guide"}
    for name, call in CALLS.items():
        first = shown[name].partition("```python\n")[2].partition("```")[0].splitlines()[:5]
        assert call in "\n".join(line.partition("#")[0] for line in first), name


# Pages that say in place what does not hold.
WITHOUT_LIMITATIONS = {"choosing", "symptoms", "accelerate", "lightning", "timm", "transformers"}
WITHOUT_LIMITATIONS |= {"integrations"}
TASKS = [*PAGES, DOCS / "distributed.md", DOCS / "integrations.md"]
TASKS += sorted((DOCS / "trainers").glob("*.md"))


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.stem)
def test_a_page_begins_with_its_snippet_and_ends_with_its_limitations(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines.index("```python") <= 8
    titles = [line for line in lines if line.startswith("## ")]
    assert (titles[-1:] == ["## Limitations"]) != (page.stem in WITHOUT_LIMITATIONS)
    assert "## Limitations" not in titles[:-1]
