"""A few seconds of ``make stress``: the programs of fixed seeds, so that neither they nor what runs
them can rot; and that it finds what is wrong."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memsave_ext as ms

from stress import adam, backwards, programs, regions, run

RUN = Path(run.__file__)
COUNTS = {"regions": 100, "adam": 60, "backwards": 15}


@pytest.mark.parametrize("part", run.PARTS)
def test_random_programs_of_fixed_seeds(part):
    module = {"regions": regions, "adam": adam, "backwards": backwards}[part]
    for seed in range(COUNTS[part]):
        verdict, text = module.run_seed(seed, [], shrinks=False)
        assert not verdict or verdict.startswith("refused"), f"{part} {seed}: {verdict}\n{text}"
