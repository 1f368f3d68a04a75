"""Prints tables: with rich if that is installed, as plain text otherwise."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TextIO

_NUMBER = re.compile(r"[-+\u2212]?[\d.]|[-\u2013]?$")  # the start of cells in columns of numbers
_GAP = "  "


def format_bytes(count: int) -> str:
    """Returns ``"12 B"`` or ``"3.50 KiB"``: three significant digits, units of powers of 1024."""
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
    """Prints a table. Columns of numbers are aligned to the right, except the first column.

    Args:
        title: printed above the table; empty for none.
        columns: the names of the columns.
        rows: a cell for each column, shown by ``str``.
        file: where to print; None for ``sys.stdout``.

    Raises:
        ValueError: a row has another number of cells than ``columns``; nothing is printed then.
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
    text = part["text"].Text  # keeps brackets and colons, which are markup in a str
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
    if not console.is_terminal:  # in a file no line is wrapped
        width = console.measure(table, options=console.options.update(max_width=1 << 16)).maximum
        console.width = max(width, 1)
    console.print(table)
