"""Runs tests on the device in parts, each in a process forked from this one.

    python forked.py < PARTS    # a list in JSON of what Part has

streams.py runs it, and sets what pytest needs (PYTEST_ADDOPTS) and which package is imported. This
process has torch and the tests already: to load them takes longer than most parts do.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, NoReturn

import fake_cuda  # noqa: F401  before torch
import pytest
from mistakes import MISTAKES, VARIABLE

SEEDS = "MEMSAVE_EXT_SEEDS"


@dataclass
class Part:
    files: list[str]
    chosen: str  # for pytest's -k
    seeds: int  # with how many each case runs
    mistake: int | None = None  # of MISTAKES: one that some seed must see


def main() -> int:
    parts = [Part(**part) for part in json.load(sys.stdin)]
    files = dict.fromkeys(file for part in parts for file in part.files)
    os.environ[SEEDS] = "1"
    with contextlib.redirect_stdout(io.StringIO()) as collected:
        if pytest.main(["--collect-only", *files]) != 0:
            sys.exit(collected.getvalue())
    cores = len(os.sched_getaffinity(0))
    running: dict[int, tuple[Part, IO[str]]] = {}
    right = True
    while parts or running:
        if parts and len(running) < cores:
            part = parts.pop(0)
            output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed when the process has ended
            child = os.fork()
            if child == 0:
                run(part, output.fileno())
            running[child] = part, output
            continue
        child, status = os.wait()
        part, output = running.pop(child)
        with output:
            output.seek(0)
            right &= is_right(part, os.waitstatus_to_exitcode(status), output.read())
    return int(not right)


def run(part: Part, output: int) -> NoReturn:
    """In the forked process, which ends here whatever happens."""
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.environ[SEEDS] = str(part.seeds)
        options = ["-k", part.chosen]
        if part.mistake is not None:
            os.environ[VARIABLE] = str(part.mistake)
            options += ["-x", "--full"]
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = int(pytest.main([*options, *part.files]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def is_right(part: Part, status: int, text: str) -> bool:
    """Whether the tests have passed, or the mistake was seen by what is checked; says how."""
    if part.mistake is None:
        print(text, end="", flush=True)
        right = status in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
        if not right:
            print(f"exit status {status}: {part}", flush=True)
        return right
    mistake = MISTAKES[part.mistake]
    lines = [x for x in text.splitlines() if x.startswith("E ") or "Timeout" in x]
    ways = mistake.seen.split("|")  # which of them comes first is a matter of time
    how = next((line[1:].strip() for line in lines if any(way in line for way in ways)), None)
    seen = status == pytest.ExitCode.TESTS_FAILED and how is not None
    verdict = "seen" if seen else "NOT SEEN"
    print(f"{verdict}: {mistake.what} ({mistake.file}): {how or text[-500:]}", flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main())
