"""Puts mistakes into sources, each of which an environment variable switches on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

VARIABLE = "MEMSAVE_EXT_MISTAKE"  # the number of the mistake that runs; none without
IN_PYTHON = f'(__import__("os").environ.get("{VARIABLE}") == "{{number}}")'


class Mistake(Protocol):
    what: str
    file: str
    right: str  # occurs once in the file
    wrong: str  # in its place; MISTAKE says whether it is this mistake that runs


def with_mistakes(
    mistakes: Iterable[Mistake], read: Callable[[str], str], in_cpp: str
) -> dict[str, str]:
    """Returns the texts of the files that have mistakes, by name, with all of them.

    Args:
        read: returns the text of a file.
        in_cpp: what stands for MISTAKE in C++, with ``{number}``.

    Raises:
        ValueError: a file has not exactly one text of what is right.
    """
    texts: dict[str, str] = {}
    for number, mistake in enumerate(mistakes):
        text = texts.get(mistake.file) or read(mistake.file)
        if (count := text.count(mistake.right)) != 1:
            raise ValueError(f"{mistake.file} has {count} such texts, not one: {mistake.what}")
        switch = IN_PYTHON if mistake.file.endswith(".py") else in_cpp
        wrong = mistake.wrong.replace("MISTAKE", switch.format(number=number))
        texts[mistake.file] = text.replace(mistake.right, wrong)
    return texts
