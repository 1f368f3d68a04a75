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
# Of these the longest, those first that take longest: they are dealt out first, and begin first.
LONGEST = (
    "distributed/test_trained_ranks.py", "benchmarks/test_benchmarks.py",
    "integrations/test_fit_trainers.py", "predict/test_fits.py", "elsewhere/test_gradients.py",
    "predict/test_fit.py", "integrations/test_quantized.py", "stress/test_stress.py",
    "distributed/test_predicted_ranks.py", "docs/test_docs.py",
    "distributed/test_distributed_example.py", "remat/test_script.py",
    "predict/test_predict_offload.py", "dry_run/test_child.py",
    "benchmarks/test_benchmarks_training.py", "predict/test_workspaces.py",
    "distributed/test_fit_ranks.py", "distributed/test_remat_distributed.py",
    "integrations/test_interrupts.py", "docs/test_guide.py", "remat/test_budget.py",
    "integrations/test_fit_zoo.py", "remat/test_user_code.py",
)  # fmt: skip
EVERY_TIME = (
    "benchmarks/test_benchmarks_results.py", "distributed/test_adam_ddp.py",
    "docs/test_contributing.py", "dry_run/test_tensors.py",
    "elsewhere/test_gradients_used.py", "integrations/test_page.py",  # whose pages take turns
    "integrations/test_transformers.py",
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
    """Whether what is at this place of a list runs now. Turns are dealt out to and fro, so that
    those of a list that begins with the longest take about as long."""
    turn = os.environ[VARIABLE]
    there = place % (2 * TURNS)
    return turn == "all" or min(there, 2 * TURNS - 1 - there) == int(turn)


@functools.cache
def waiting():
    """The files that take turns, in their order."""
    places = [TESTS / place for place in PLACES]
    files = {file for at in places for file in (at.glob("test_*.py") if at.is_dir() else [at])}
    longest = [TESTS / name for name in LONGEST]
    every_time = {TESTS / name for name in EVERY_TIME}
    return [*longest, *sorted(files - {*longest} - every_time)]


def is_others(file):
    """Whether this file of tests is left to other commits."""
    return file in waiting() and not has(waiting().index(file))
