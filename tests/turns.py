"""Which files of tests are run: of places whose tests take minutes one in four at each commit.

So all have run after four commits. What is named on the command line always runs, and everything
with --full.
"""

import functools
import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
TURNS = 4
VARIABLE = "MEMSAVE_EXT_TURN"  # says whose turn it is; "all": everybody's
PLACES = (
    "adam/test_optim_db.py",  # imports torch's tests, which takes as long as half of its room
    "benchmarks", "distributed", "docs", "dry_run", "elsewhere", "integrations", "memory",
    "packaging", "predict", "remat", "stress",
)  # fmt: skip
EVERY_TIME = (
    "distributed/test_adam_ddp.py", "docs/test_contributing.py", "dry_run/test_tensors.py",
    "elsewhere/test_gradients_used.py", "integrations/test_transformers.py",
    "memory/test_memory.py", "packaging/test_imports.py", "packaging/test_includes.py",
    "packaging/test_mistakes.py", "packaging/test_sampling.py", "packaging/test_turns.py",
    "predict/test_holdings.py", "predict/test_repeats.py", "remat/test_budget_told.py",
    "remat/test_plan.py", "remat/test_remat.py", "remat/test_remat_operators.py",
)  # fmt: skip


def choose(everybody):
    """Sets the variable, for the processes that are started, too, to the turn of this commit, by
    the number of commits. One that is set already is kept."""
    if everybody:
        os.environ[VARIABLE] = "all"
    elif VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(_commits() % TURNS)
    elif os.environ[VARIABLE] not in [*map(str, range(TURNS)), "all"]:
        given = os.environ[VARIABLE]
        raise pytest.UsageError(f"{VARIABLE} must be 0 to {TURNS - 1}, or all, got {given!r}")


def _commits():
    """How many this checkout has; 0 where it is none."""
    count = ["git", "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(count, cwd=TESTS, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return int(done.stdout or 0)


def has(place):
    """Whether what is at this place of a list runs now."""
    turn = os.environ[VARIABLE]
    return turn == "all" or place % TURNS == int(turn)


@functools.cache
def waiting():
    """The files that take turns, in their order."""
    places = [TESTS / place for place in PLACES]
    files = sorted(
        file for at in places for file in (at.glob("test_*.py") if at.is_dir() else [at])
    )
    return [file for file in files if file.relative_to(TESTS).as_posix() not in EVERY_TIME]


def is_others(file):
    """Whether this file of tests is left to other commits."""
    return file in waiting() and not has(waiting().index(file))
