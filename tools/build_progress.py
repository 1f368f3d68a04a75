"""One line for each compiled file in place of the compiler's commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path


def shortened(lines: Iterable[str]) -> Iterator[str]:
    """What `ninja -v` prints, without its commands: [3/14] and the compiled file.

    Warnings and errors stay.
    """
    after_failure = False
    for line in lines:
        if after_failure:  # the command again
            after_failure = False
            continue
        after_failure = line.startswith("FAILED: ")
        step = re.match(r"(\[\d+/\d+\]) (.+)", line)
        yield f"{step[1]} {_compiled(step[2])}\n" if step else line


def _compiled(command: str) -> str:
    try:
        words = shlex.split(command)
        path = Path(words[words.index("-o") - 1])
    except ValueError:
        return command
    return path.as_posix()[path.as_posix().index("csrc/") :] if "csrc" in path.parts else path.stem


@contextlib.contextmanager
def short_output() -> Iterator[None]:
    """Everything that is written to file descriptor 1 meanwhile goes through `shortened`."""
    sys.stdout.flush()
    terminal = os.dup(1)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.close(write_end)

    def forward() -> None:
        with open(read_end, errors="replace") as lines, open(terminal, "w") as output:
            for line in shortened(lines):
                output.write(line)
                output.flush()

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)
        thread.join()
