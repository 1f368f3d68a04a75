"""Runs the cells of docs/guide.md and writes the page again (`make guide`); makes a notebook of it.

    python tools/guide.py               # run every cell, write what they printed into the page
    python tools/guide.py --notebook    # run nothing, write docs/guide.ipynb (for `make docs`)

The page is the source. A ```python block is a cell, and the ```text block right after it is what
the cell printed. A picture that a cell writes into its working directory is shown below it. Between
<!-- savings:begin --> and <!-- savings:end --> stands what the cells appended to their `savings`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide.md"
PICTURES = "guide"  # the folder beside the page
MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}

CELL = re.compile(
    r"^```python\n(?P<source>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?"
    rf"(?P<pictures>(?:\n!\[[^]\n]*\]\({PICTURES}/[^)\n]+\)\n)*)",
    re.DOTALL | re.MULTILINE,
)
SAVINGS = re.compile(r"(<!-- savings:begin -->\n).*?(<!-- savings:end -->)", re.DOTALL)
HEADING = re.compile(r"^(?=#{1,3} )", re.MULTILINE)
SECTION = re.compile(r"^## (\d+)\.", re.MULTILINE)

Saving = tuple[str, int, int]  # technique, bytes before, bytes after


@dataclass
class Cell:
    source: str
    line: int  # of the page, where its source begins
    output: str = ""
    pictures: dict[str, bytes] = field(default_factory=dict)  # by file name
    savings: list[Saving] = field(default_factory=list)


Part = str | Cell  # markdown, or a cell


class CellError(Exception):
    """A cell raised; its traceback is the cause's."""


def parse(page: str, folder: Path) -> list[Part]:
    """The page, from the top: markdown and cells in turn. ``folder`` has its pictures."""
    parts: list[Part] = []
    end = 0
    for match in CELL.finditer(page):
        parts.append(page[end : match.start()])
        names = re.findall(rf"\({PICTURES}/([^)\n]+)\)", match["pictures"])
        parts.append(
            Cell(
                source=match["source"],
                line=page.count("\n", 0, match.start("source")) + 1,
                output=match["output"] or "",
                pictures={name: (folder / PICTURES / name).read_bytes() for name in names},
            )
        )
        end = match.end()
    return [*parts, page[end:]]


def cells(parts: Sequence[Part]) -> list[Cell]:
    return [part for part in parts if isinstance(part, Cell)]


@contextlib.contextmanager
def _in_new_folder():
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def execute(parts: Sequence[Part], page: str = PAGE.name) -> None:
    """Run the cells in one namespace, and keep what they print, draw and save.

    Raises:
        CellError: with the page's line of the cell that raised.
    """
    namespace: dict[str, Any] = {"__name__": "guide", "savings": []}
    with _in_new_folder() as folder:
        for number, cell in enumerate(cells(parts), 1):
            # Named as in a notebook: the page's own lines would move with what is printed.
            name = f"cell {number}"
            linecache.cache[name] = len(cell.source), None, cell.source.splitlines(True), name
            before = len(namespace["savings"])
            with contextlib.redirect_stdout(io.StringIO()) as output:
                try:
                    exec(compile(cell.source, name, "exec"), namespace)
                except Exception as error:
                    what = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise CellError(f"{name}, line {cell.line} of {page}: {what}") from error
            printed = output.getvalue().rstrip()
            cell.output = f"{printed}\n" if printed else ""
            cell.savings = namespace["savings"][before:]
            drawn = sorted(path for path in folder.iterdir() if path.suffix in MEDIA)
            cell.pictures = {path.name: path.read_bytes() for path in drawn}
            for path in drawn:
                path.unlink()


def smaller(png: bytes) -> bytes:
    """The picture with a palette: diagrams have few colours."""
    from PIL import Image  # which came with matplotlib

    result = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64).save(result, "PNG", optimize=True)
    return result.getvalue()


def savings_table(parts: Sequence[Part]) -> str:
    lines = ["| section | technique | before | after | less |", "| --: | :-- | --: | --: | --: |"]
    section = ""
    for part in parts:
        if isinstance(part, str):
            section = [section, *SECTION.findall(part)][-1]
            continue
        for technique, before, after in part.savings:
            sizes = " | ".join(f"{size / 2**20:.1f} MiB" for size in (before, after))
            lines.append(f"| {section} | {technique} | {sizes} | {1 - after / before:.0%} |")
    return "\n".join(lines) + "\n"


def put_savings(parts: Sequence[Part]) -> list[Part]:
    table = savings_table(parts)
    return [
        part if isinstance(part, Cell) else SAVINGS.sub(lambda m: m[1] + table + m[2], part)
        for part in parts
    ]


def markdown(parts: Sequence[Part]) -> str:
    text = []
    for part in parts:
        if isinstance(part, str):
            text.append(part)
            continue
        text.append(f"```python\n{part.source}```\n")
        if part.output:
            text.append(f"\n```text\n{part.output}```\n")
        text += [f"\n![{Path(p).stem}]({PICTURES}/{p})\n" for p in part.pictures]
    return "".join(text)


def notebook(parts: Sequence[Part]) -> str:
    """As nbformat 4.5 asks for, with the same bytes for the same page."""
    entries: list[dict[str, Any]] = []
    count = 0
    for part in parts:
        if isinstance(part, Cell):
            count += 1
            entries.append(
                {
                    "cell_type": "code",
                    "execution_count": count,
                    "metadata": {},
                    "outputs": _outputs(part),
                    "source": _lines(part.source),
                }
            )
            continue
        for section in HEADING.split(part):
            if section.strip():
                source = _lines(section.strip())
                entries.append({"cell_type": "markdown", "metadata": {}, "source": source})
    for number, entry in enumerate(entries):
        entry["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {
        "cells": entries,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").splitlines(keepends=True)


def _outputs(cell: Cell) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if cell.output:
        text = cell.output.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    for name, content in cell.pictures.items():
        kind = MEDIA[Path(name).suffix]
        svg = kind == MEDIA[".svg"]
        data = content.decode() if svg else base64.b64encode(content).decode()
        outputs.append({"data": {kind: data}, "metadata": {}, "output_type": "display_data"})
    return outputs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--notebook", action="store_true", help="run nothing, write a notebook")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    page = args.page

    parts = parse(page.read_text(encoding="utf-8"), page.parent)
    if args.notebook:
        page.with_suffix(".ipynb").write_text(notebook(parts), encoding="utf-8")
        return 0
    sys.path.insert(0, str(PAGE.parents[1]))  # the package of this checkout
    execute(parts, page.name)
    parts = put_savings(parts)
    for cell in cells(parts):
        for name, content in cell.pictures.items():
            if name.endswith(".png"):
                cell.pictures[name] = smaller(content)
            (page.parent / PICTURES).mkdir(exist_ok=True)
            (page.parent / PICTURES / name).write_bytes(cell.pictures[name])
    page.write_text(markdown(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
