"""The programs of ``make stress`` with fixed seeds, for a few seconds, so that neither they nor what
runs them can rot; and that what is wrong is found."""

import subprocess
import sys

import pytest
import torch
from stress import adam, backwards, regions, run, worlds

import memsave_ext as ms

PARTS = {"regions": (regions, 100), "adam": (adam, 60), "backwards": (backwards, 15)}


@pytest.mark.parametrize("part", run.PARTS)
def test_programs_of_fixed_seeds(part):
    module, count = PARTS[part]
    for seed in range(count):
        verdict, text = module.run_seed(seed, [], False)
        assert not verdict or verdict.startswith("refused"), f"{part} {seed}: {verdict}\n{text}"


def test_a_wrong_gradient_is_found_and_made_small(monkeypatch):
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def wrong(function, *args, **kwargs):
        (first, *others) = args
        return worlds.plain_checkpoint(function, Doubles.apply(first), *others, **kwargs)

    monkeypatch.setattr(ms, "checkpoint", wrong)
    found = [regions.run_seed(seed, [], True) for seed in range(12)]
    texts = [text for verdict, text in found if verdict == "silent: other backward"]
    assert texts and min(text.count("ms.checkpoint(") for text in texts) == 1


def test_the_command_line_runs_a_seed_again():
    native = "1" if ms._native.available else "0"
    command = [sys.executable, run.__file__, "--part", "adam", "--native", native, "--seed", "2"]
    done = subprocess.run([*command, "--count", "3"], capture_output=True, text=True, check=False)
    assert "3 programs, 0 failures (0 refused), seed range 2 to 4" in done.stdout, done.stderr
    assert done.returncode == 0
