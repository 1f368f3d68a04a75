"""Says which mistakes the cases see; exits with 1 where one is not seen.

    python see_mistakes.py NUMBER:WORD...    # of MISTAKES, and of pytest's -k

streams.py runs it, and sets what pytest needs (PYTEST_ADDOPTS) and which package is imported.
Each runs in a process forked from this one, which has torch and the cases already: to load them
takes four times as long as a mistake needs to be seen.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import fake_cuda  # noqa: F401  before torch
import pytest
from mistakes import MISTAKES, VARIABLE

CASES = sorted(map(str, (Path(__file__).parent / "cases").glob("cases_*.py")))


def main() -> int:
    with contextlib.redirect_stdout(io.StringIO()) as collected:
        if pytest.main(["--collect-only", *CASES]) != 0:
            sys.exit(collected.getvalue())
    seen = [is_seen(int(number), word) for number, word in (x.split(":") for x in sys.argv[1:])]
    return int(not all(seen))


def is_seen(number: int, word: str) -> bool:
    """Whether a seed of the cases fails by what is checked."""
    mistake = MISTAKES[number]
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            run(number, word, output.fileno())
        _, ended = os.waitpid(child, 0)
        output.seek(0)
        text = output.read()
    lines = [x for x in text.splitlines() if x.startswith("E ") or "Timeout" in x]
    ways = mistake.seen.split("|")  # which of them comes first is a matter of time
    how = next((line[1:].strip() for line in lines if any(way in line for way in ways)), None)
    seen = os.waitstatus_to_exitcode(ended) == 1 and how is not None
    verdict = "seen" if seen else "NOT SEEN"
    print(f"{verdict}: {mistake.what} ({mistake.file}): {how or text[-500:]}", flush=True)
    return seen


def run(number: int, word: str, output: int) -> NoReturn:
    """Runs the cases with the mistake, in the forked process, which ends here whatever happens."""
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.environ[VARIABLE] = str(number)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = int(pytest.main(["-x", "-k", word, *CASES]))
        sys.stdout.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
