"""Tables for people: with rich where that is installed, plain text otherwise."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TextIO

_NUMBER = re.compile(r"[-+\u2212]?[\d.]|[-\u2013]?$")  # how cells of a column of numbers begin
_GAP = "  "


def format_bytes(count: int) -> str:
    """``"12 B"``, ``"3.50 KiB"``, ``"1.25 GiB"``: three significant digits, powers of 1024."""
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 999.5 or unit == "TiB":
            break
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    file: TextIO | None = None,
) -> None:
    """Print a table; columns of numbers, but never the first, are aligned to the right.

    Args:
        title: above it; empty for none.
        columns: their names.
        rows: as many cells each, shown by ``str``.
        file: to print to; None for ``sys.stdout``.

    Raises:
        ValueError: a row with another number of cells. Nothing is printed then.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(
                f"rows must have {len(columns)} cells, as columns, got {len(row)}: {row}"
            )
    right = [
        i > 0 and any(row[i] for row in cells) and all(_NUMBER.match(row[i]) for row in cells)
        for i in range(len(columns))
    ]
    file = sys.stdout if file is None else file
    if (rich := _rich()) is not None:
        _print_rich(rich, title, columns, cells, right, file)
    else:
        _print_plain(title, columns, cells, right, file)


def _rich() -> ModuleType | None:
    try:
        return importlib.import_module("rich")
    except ImportError:
        return None


def _print_plain(
    title: str,
    columns: Sequence[str],
    cells: list[list[str]],
    right: list[bool],
    file: TextIO,
) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        return _GAP.join(aligned).rstrip()

    rule = _GAP.join("-" * width for width in widths)
    lines = [*([title] if title else []), line(columns), rule, *map(line, cells)]
    print("\n".join(lines), end="\n\n", file=file)


def _print_rich(
    rich: ModuleType,
    title: str,
    columns: Sequence[str],
    cells: list[list[str]],
    right: list[bool],
    file: TextIO,
) -> None:
    part = {name: importlib.import_module(f"rich.{name}") for name in ("console", "table", "text")}
    box = importlib.import_module("rich.box")
    text = part["text"].Text  # whose brackets and colons stay what they are
    table = part["table"].Table(
        title=text(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for name, to_right in zip(columns, right, strict=True):
        table.add_column(text(name), justify="right" if to_right else "left")
    for row in cells:
        table.add_row(*map(text, row))
    console = part["console"].Console(file=file)
    if not console.is_terminal:  # nothing is to be wrapped in a file
        width = console.measure(table, options=console.options.update(max_width=1 << 16)).maximum
        console.width = max(width, 1)
    console.print(table)
