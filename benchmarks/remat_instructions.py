"""Instructions that a block of remat takes of the host, for an operator and once a step.

Callgrind counts them, so that they do not depend on how busy the machine is. Steps of two lengths
tell what is for each operator, forward and backward, from what is once a step. Needs valgrind and a
C compiler; code that valgrind does not know, as AVX512, is left out.

    python benchmarks/remat_instructions.py --save benchmarks/results
"""

import argparse
import copy
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from remat import PLAIN, RECORDED, REMAT, Small, observed
from shared.common import ROOT, machine, parser_of, settings_of, write_record

OBSERVER, UNNEEDED = "an observer that does nothing", "a budget that is not needed"
HALF = "budget 0.5"
WAYS = (PLAIN, OBSERVER, RECORDED, REMAT, UNNEEDED, HALF)
PROGRAMS = {"elementwise": False, "linear layers": True}
COUNTED = 2  # steps
REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
# Which kernels torch takes: those with instructions that valgrind knows.
KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
KERNELS |= {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OMP_NUM_THREADS": "1"}

Way = tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]


def ways_of(model: nn.Module) -> dict[str, Way]:
    def within(budget: float | str) -> nn.Module:
        other = copy.deepcopy(model)
        ms.remat_module(other, budget=budget)
        return other

    return {
        PLAIN: (model, nullcontext),
        OBSERVER: (model, observed),
        RECORDED: (model, functools.partial(ms.remat, _everything=None)),
        REMAT: (model, ms.remat),
        UNNEEDED: (within("8GB"), nullcontext),
        HALF: (within(0.5), nullcontext),
    }


def run(requests: Path, lengths: list[int], warmup: int) -> None:
    """Runs under callgrind: takes steps and has those counted of which nothing is new."""
    callgrind = ctypes.CDLL(str(requests))
    torch.set_num_threads(1)
    x = torch.randn(2, 8, requires_grad=True)
    for program, linear in PROGRAMS.items():
        for length in lengths:
            _native.module.remat_forget()  # the other length began with the same operators
            for way, (model, block) in ways_of(Small(linear, length)).items():
                for number in range(warmup + COUNTED):
                    if number == warmup:
                        callgrind.begin()
                    with block():
                        y = model(x)
                    y.backward(torch.ones_like(y))
                    del y
                callgrind.end(f"{program}/{length}/{way}".encode())


def count(lengths: list[int], warmup: int) -> dict[str, int]:
    """Instructions of a step, by program, length and way."""
    with tempfile.TemporaryDirectory() as folder:
        source, requests = Path(folder, "requests.c"), Path(folder, "requests.so")
        source.write_text(REQUESTS)
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", requests, source], check=True)
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "-q"]
        command += [f"--callgrind-out-file={folder}/counted", sys.executable, __file__, "--run"]
        command += [str(requests), "--warmup", str(warmup), "--lengths", *map(str, lengths)]
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **KERNELS, "PYTHONPATH": python_path}
        subprocess.run(command, env=environment, check=True)
        found = {}
        for path in Path(folder).glob("counted.*"):
            text = path.read_text()
            if name := re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE):
                (total,) = re.findall(r"^totals: (\d+)$", text, re.MULTILINE)
                found[name[1]] = int(total) // COUNTED
        return found


def operators_of(program: str, length: int) -> int:
    with ms.remat() as block:
        Small(PROGRAMS[program], length)(torch.randn(2, 8, requires_grad=True))
    return block.figures().operators


def rows_of(found: dict[str, int], lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for program in PROGRAMS:
        short, long = (operators_of(program, length) for length in lengths)
        row: dict[str, Any] = {"program": program, "operator": {}, "step": {}}
        for way in WAYS:
            if f"{program}/{lengths[0]}/{way}" not in found:
                continue
            instructions, more = (found[f"{program}/{length}/{way}"] for length in lengths)
            row["operator"][way] = (more - instructions) / (long - short)
            row["step"][way] = instructions - row["operator"][way] * short
        for figures in (row["operator"], row["step"]):
            plain = figures[PLAIN]
            figures |= {way: value - plain for way, value in figures.items() if way != PLAIN}
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs=2, default=[8, 24], help="layers of the two")
    parser.add_argument("--warmup", type=int, default=8, help="steps before those that count")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run(options.run, options.lengths, options.warmup)
        return 0
    if not shutil.which("valgrind"):
        print("remat_instructions left out: valgrind is not installed")
        return 0
    settings = settings_of(options, "lengths", "warmup")
    rows = rows_of(count(options.lengths, options.warmup), options.lengths)
    for row in rows:
        for way, each in row["operator"].items():
            step = row["step"][way]
            print(f"{row['program']:14} {way:30}{each:9.0f} an operator{step:11.0f} a step")
    record = {"machine": machine(), "settings": settings, "rows": rows}
    print(write_record(options.save, "remat_instructions", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
