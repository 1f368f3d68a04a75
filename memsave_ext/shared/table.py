"""Text of reports: numbers with units, and tables, which rich prints where it is installed."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import TextIO

# The cells of columns of numbers: "0.5", "12 KiB (3,072)", "4.8%", "-"; not "0.weight".
_NUMBER = re.compile(r"[-+\u2212]?[\d,]*\.?\d+(e[-+]?\d+)?([%\u00d7]|\s.*)?$|[-\u2013]?$")
_SIZES = {
    f"{prefix}{infix}b": base**power
    for base, infix in ((1000, ""), (1024, "i"))
    for power, prefix in enumerate("kmgt", 1)
} | {"": 1, "b": 1}
_GAP = "  "
_LEAST = 12  # the width that texts in a narrow table keep


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


def parse_bytes(text: str) -> int | None:
    """Returns what ``"24GB"`` (10^9 bytes each) or ``"22.5 GiB"`` (2^30) says; None if nothing."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    size = match and _SIZES.get(match[2].lower())
    count = float(match[1]) * size if match and size else math.inf
    return int(count) if math.isfinite(count) else None


def format_seconds(seconds: float) -> str:
    """Returns for example ``"12.3 ms"``, with three significant digits."""
    value, unit = seconds, "s"
    for per_second, smaller in ((1e3, "ms"), (1e6, "\N{MICRO SIGN}s")):
        if value < 0.9995:
            value, unit = seconds * per_second, smaller
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


class Text(str):
    """A report: a text that a prompt and a notebook show as it is printed."""

    def __repr__(self) -> str:
        return str(self)


def as_text(write: Callable[[TextIO], None], file: TextIO | None) -> Text:
    """Returns what ``write`` prints into the file it is given; also printed to ``file`` if given.

    Tables and sentences are as wide as they may be in ``file``, or else where ``print`` shows the
    text.
    """
    report = _Report(sys.stdout if file is None else file)
    write(report)
    lines, width = report.getvalue().rstrip("\n").split("\n"), _width(report)
    if width is not None:
        lines = [part for line in lines for part in _broken(line.rstrip(), width)]
    text = "\n".join(lines)
    if file is not None:
        print(text, file=file)
    return Text(text)


class _Report(io.StringIO):
    """What is written to it is shown in ``shown_in``."""

    def __init__(self, shown_in: TextIO) -> None:
        super().__init__()
        self.shown_in = shown_in


def _width(file: TextIO) -> int | None:
    """How many columns there are for a table in ``file``; None: any, in a file of its own.

    ``COLUMNS`` says it for all that is not given a file, a terminal its own width.
    """
    shown_in = file.shown_in if isinstance(file, _Report) else file
    is_terminal = shown_in.isatty() if hasattr(shown_in, "isatty") else False
    if is_terminal or (shown_in is sys.stdout and os.environ.get("COLUMNS")):
        return shutil.get_terminal_size().columns
    return None


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    file: TextIO | None = None,
) -> None:
    """Prints a table. Columns of numbers are aligned to the right, except the first column.

    Where it would be wider than the terminal, names of columns are broken into lines, then texts;
    if that is not enough, the last columns follow below, beside the first column once more.

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
    rich = _rich()
    between, around = (3, 4) if rich is not None else (len(_GAP), 0)
    table = [list(columns), *cells]
    for part in _parts(table, right, _width(file), between, around):
        head, *body = [[row[i] for i in part] for row in table]
        aligned = [right[i] for i in part]
        if rich is not None:
            _print_rich(rich, title, head, body, aligned, file)
        else:
            _print_plain(title, head, body, aligned, file)
        title = ""


def _parts(
    table: list[list[str]], right: list[bool], width: int | None, between: int, around: int
) -> list[list[int]]:
    """Breaks the texts of a table so that it fits; returns the columns of each table to print.

    Args:
        table: its rows, names of columns first; changed in place.
        right: of each column, whether it holds numbers, which are not broken.
        width: how wide it may be; None for any width.
        between: what is between two columns.
        around: what is beside the outer ones.
    """
    count = len(table[0])
    widths = [max(len(row[i]) for row in table) for i in range(count)]

    def total(part: Sequence[int]) -> int:
        return sum(widths[i] for i in part) + between * (len(part) - 1) + around

    if width is None or total(range(count)) <= width:
        return [list(range(count))]
    for i in range(count):  # names of columns that are wider than what is below them
        word = max(map(len, table[0][i].split()), default=0)
        widths[i] = max(word, *(len(row[i]) for row in table[1:]), 0)
    texts = [i for i in range(count) if not right[i] and widths[i] > _LEAST]
    while texts and total(range(count)) > width:
        widest = max(texts, key=lambda i: widths[i])
        widths[widest] -= 1
        if widths[widest] == _LEAST:
            texts.remove(widest)
    for row in table:
        for i, cell in enumerate(row):
            if len(cell) > widths[i]:
                row[i] = "\n".join(_broken(cell, widths[i]))
    parts = [[0]]
    for i in range(1, count):
        if len(parts[-1]) > 1 and total([*parts[-1], i]) > width:
            parts.append([0])
        parts[-1].append(i)
    return parts


def _broken(text: str, width: int) -> list[str]:
    """Breaks a text at spaces and, where a word is too long, behind a point or anywhere."""
    lines, rest = [], text
    while len(rest) > width:
        end = rest.rfind(" ", 1, width + 1)
        if end < 0:
            end = rest.rfind(".", 1, width) + 1 or width
        lines.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return [*lines, rest]


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
    table = [[cell.split("\n") for cell in row] for row in (columns, *cells)]
    widths = [max(map(len, itertools.chain(*column))) for column in zip(*table, strict=True)]

    def lines_of(row: list[list[str]]) -> Iterator[str]:
        for line in itertools.zip_longest(*row, fillvalue=""):
            aligned = (
                part.rjust(width) if to_right else part.ljust(width)
                for part, width, to_right in zip(line, widths, right, strict=True)
            )
            yield _GAP.join(aligned).rstrip()

    rule = _GAP.join("-" * width for width in widths)
    body = itertools.chain.from_iterable(map(lines_of, table[1:]))
    lines = [*([title] if title else []), *lines_of(table[0]), rule, *body]
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
    # What is too wide has been broken.
    width = console.measure(table, options=console.options.update(max_width=1 << 16)).maximum
    console.width = max(width, 1)
    console.print(table)
