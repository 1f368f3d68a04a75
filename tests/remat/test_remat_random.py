"""Random programs in blocks, against plain autograd: the same bits."""

import contextlib
import random

import pytest
import torch
from remat_vocabulary import MORE, names
from sampling import some
from stress import programs, regions
from stress.worlds import namespace

from memsave_ext import remat

# Of forward differentiation in torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

PROGRAMS = 500


def everything():
    return remat(_everything=True)


def run(program, code, blocks, mode="plain", make=everything):
    """The steps of a program; ``blocks``: its forward, or all of it, in a block."""
    space = namespace(program, mode)
    space |= names(space["DTYPE"], make if blocks else contextlib.nullcontext)
    exec(code, space)
    torch.manual_seed(program.seed)
    steps, generator = [], space["program"]()
    block = make() if blocks else None
    try:
        if block is not None:
            block.__enter__()
        try:
            while True:
                label, values = generator.send(None if not steps else False)
                steps.append((label, [regions.keep(v) for v in values] + [torch.get_rng_state()]))
                if blocks == "forward" and len(steps) == 1:
                    block.__exit__(None, None, None)
        finally:
            if block is not None and (blocks == "all" or not steps):
                block.__exit__(None, None, None)
    except StopIteration:
        pass
    except Exception as error:
        # With its traceback it would hold this frame and the program's graph until a collection.
        steps.append(("error", [error.with_traceback(None)]))
    return steps


def check(seed, also=None, make=everything):
    program = programs.generate(seed, without=("adam",), also=also)
    writer = programs.Writer(program)
    code = compile(writer.source(), f"<program {seed}>", "exec")
    rng = random.Random(seed)
    blocks = "forward" if rng.random() < 0.7 else "all"
    strict = not (writer.hazards or writer.inexact)
    mode = "ours" if also and strict and rng.random() < 0.3 else "plain"
    plain, ours = run(program, code, None), run(program, code, blocks, mode, make)
    for i, (label, values) in enumerate(ours):
        theirs = plain[i]
        if label == "error":
            if mode == "ours" and "support saved tensor hooks" in str(values[0]):
                return ""  # of torch.func in a region
            both = theirs[0] == "error"
            return "" if both else f"error: {values[0]!r} ({blocks}, {mode})\n{writer.source()}"
        if theirs[0] == "error":
            return ""  # a value of the forward where plain autograd has lost it
        if label == "torch_statistics" and mode == "ours" and writer.torchs_own:
            continue  # torch's norms count again in torch's regions
        if not regions.all_same(values, theirs[1], True):
            return f"other {label} ({blocks}, {mode})\n{writer.source()}"
    return ""


@pytest.mark.parametrize("start", some(range(0, PROGRAMS, 100), 2))
def test_random_programs(start):
    wrong = [(seed, text) for seed in range(start, start + 100) if (text := check(seed))]
    assert not wrong, f"{len(wrong)}: seed {wrong[0][0]}: {wrong[0][1]}"


@pytest.mark.parametrize("start", some(range(0, PROGRAMS // 2, 50), 2))
def test_random_programs_of_more(start):
    wrong = [(seed, text) for seed in range(start, start + 50) if (text := check(seed, MORE))]
    assert not wrong, f"{len(wrong)}: seed {wrong[0][0]}: {wrong[0][1]}"
