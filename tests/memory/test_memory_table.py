"""Tables on narrow terminals, and reports as texts."""

import functools
import io
import math
import os
import random
import re
import sys

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext.shared import table
from memsave_ext.shared.table import Text, print_table


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=["plain", "rich"], autouse=True)
def _renderer(request, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if request.param == "plain":
        monkeypatch.setattr(table, "_rich", lambda: None)
    else:
        pytest.importorskip("rich")


@pytest.fixture
def columns(monkeypatch):
    """Sets the width of every terminal."""

    def set_width(width):
        size = os.terminal_size((width, 24))
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: size)

    return set_width


def printed(file, *arguments):
    print_table(*arguments, file)
    return re.sub(r"\x1b\[\d*m", "", file.getvalue())  # without colours


def words(text):
    return sorted("".join(text.replace("\u2500", "").replace("-", "").split()))


@pytest.mark.parametrize("seed", range(30))
def test_random_tables_fit_and_lose_nothing(seed, columns):
    """Every letter is there; only the first column may be there more than once."""
    choice = random.Random(seed)
    letters = "abcdefgh ._"

    def text(most):
        return "x" + "".join(choice.choice(letters) for _ in range(choice.randrange(most)))

    count = choice.randrange(2, 12)
    numbers = [choice.random() < 0.5 for _ in range(count)]
    names = [text(12) for _ in range(count)]
    rows = [
        [f"{choice.random():.3f} KiB" if number else text(60) for number in numbers]
        for _ in range(choice.randrange(1, 6))
    ]
    width = choice.randrange(40, 120)
    columns(width)
    narrow, wide = (printed(file, "", names, rows) for file in (Terminal(), io.StringIO()))
    assert max(map(len, narrow.splitlines())) <= width
    if max(map(len, wide.splitlines())) <= width:
        assert narrow == wide
    once = words(wide)
    first = words("".join([names[0], *(row[0] for row in rows)]))
    tables = 1 + (len(words(narrow)) - len(once)) // max(1, len(first))
    assert words(narrow) == sorted([*once, *(first * (tables - 1))])


def test_names_are_broken_at_their_points(columns):
    columns(40)
    name = "transformer.layers.11.attention.projection.weight"
    text = printed(Terminal(), "", ["name", "memory"], [[name, "4.00 KiB"]])
    lines = [line.split()[0] for line in text.splitlines() if line.strip()][2:]
    assert "".join(lines) == name
    assert len(lines) > 1
    assert all(line.endswith(".") for line in lines[:-1])


def test_what_says_how_wide(columns, monkeypatch):
    """A terminal its width; COLUMNS, where nobody gave a file; files of one's own have none."""
    columns(50)
    arguments = "", ["a", "b"], [["word " * 20, "word " * 20]]

    def widest(text):
        return max(map(len, text.splitlines()))

    assert widest(printed(Terminal(), *arguments)) <= 50
    assert widest(printed(io.StringIO(), *arguments)) > 150
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # as in a pipe
    assert widest(printed(sys.stdout, *arguments)) > 150
    monkeypatch.setenv("COLUMNS", "50")
    assert widest(printed(io.StringIO(), *arguments)) > 150
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert widest(printed(sys.stdout, *arguments)) <= 50


def test_names_that_begin_with_a_digit_are_no_numbers():
    text = printed(io.StringIO(), "", ["n", "name", "size"], [["1", "0.weight", "1.5 KiB (3,072)"]])
    head, row = (line for line in text.splitlines() if "name" in line or "0.weight" in line)
    assert row.index("0.weight") == head.index("name")
    assert row.index("(3,072)") + len("(3,072)") == head.index("size") + len("size")


@functools.cache
def reports():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    with ms.memory.track(model, optimizer, stacks=ms._native.available) as t:
        step()
    with ms.remat(model) as block:
        loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    handle = ms.remat_module(model, by_module=True)
    step()

    def build():
        made = nn.Linear(8, 2)
        return made, None, lambda: made(torch.randn(4, 8)).sum().backward()

    found = ms.memory.fits(build, "1MB", device="cpu", every=True)
    compared = ms.memory.compare({"a variant with a long name": build, "another": build})
    kinds = t, block, handle, found, compared, ms.memory.footprint(model, optimizer)
    return [*kinds, ms.memory.predict(build)], (found, compared)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:remat keeps everything")
def test_all_reports_are_alike(capsys, columns, monkeypatch):
    """Texts, which print as they are shown; none prints by itself."""
    columns(80)
    kinds, printable = reports()
    for kind in kinds:
        file = io.StringIO()
        text = kind.report()
        assert kind.report(file=file) == file.getvalue().rstrip("\n")
        assert isinstance(text, Text)
        assert repr(text) == str(text) == text
        assert text
        assert not text.endswith("\n")
        assert capsys.readouterr().out == ""
        if kind in printable:
            assert str(kind) == text
        monkeypatch.setenv("COLUMNS", "80")
        assert all(len(line) <= 80 for line in kind.report().splitlines())
        monkeypatch.delenv("COLUMNS")


def test_table():
    file = io.StringIO()
    table._print_plain("T", ["a", "b", "c"], [["1", "2 B", "x"], ["", "-", "yy"]], [0, 1, 0], file)
    assert file.getvalue() == "T\na  b    c\n-  ---  --\n1  2 B  x\n     -  yy\n\n".replace(
        "a  b    c", "a    b  c"
    )
    with pytest.raises(ValueError, match="rows must have 2 cells, as columns, got 1"):
        table.print_table("", ["a", "b"], [["1"]], file)


def test_table_with_rich():
    pytest.importorskip("rich")
    file = io.StringIO()
    rows = [["layers[0]", 12, "a.py:1 in f :smile:"], ["x" * 200, 3, "-"]]
    table.print_table("[T]", ["a", "b", "c"], rows, file)
    text = file.getvalue()
    for part in ("[T]", "layers[0]", "x" * 200, "a.py:1 in f :smile:"):
        assert part in text
    assert all("12" not in line or line.index("12") > 200 for line in text.splitlines())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10235, "10.0 KiB"),
        (102399, "100 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (-2048, "-2.00 KiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_format_bytes(count, text):
    assert table.format_bytes(count) == text
    if abs(count) >= 1024:
        value, unit = text.split()
        size = float(value) * 1024 ** ("KiB", "MiB", "GiB", "TiB").index(unit) * 1024
        assert math.isclose(size, count, rel_tol=5e-3)


def test_names_of_columns_are_broken_before_texts(columns):
    columns(62)
    names = ["means", "largest batch", "between all steps", "cost"]
    rows = [["of so many letters", 7, "9.00 MiB", "one more forward"]]
    lines = printed(Terminal(), "", names, rows).splitlines()
    words = "largest", "batch", "between", "all", "steps"
    at = {word: next(n for n, line in enumerate(lines) if word in line) for word in words}
    assert at["largest"] < at["batch"] and at["between"] < at["all"] < at["steps"]
    assert any("of so many letters" in line and "one more forward" in line for line in lines)


def test_sentences_of_a_report_are_broken(columns):
    columns(40)
    sentence = " ".join(f"word{n}" for n in range(30))
    file = Terminal()
    text = table.as_text(lambda to: print(sentence, "  short", sep="\n", file=to), file)
    assert max(map(len, text.splitlines())) <= 40
    assert text.splitlines()[-1] == "  short" and text.split() == [*sentence.split(), "short"]
    assert file.getvalue() == text + "\n"
    wide = table.as_text(lambda to: print(sentence, file=to), io.StringIO())
    assert wide == sentence
