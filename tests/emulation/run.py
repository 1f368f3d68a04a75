"""Run every CUDA kernel on the CPU and check what it does (`make emulate`).

    python tests/emulation/run.py [--builds plain address thread memory] [--large] [--part]

The last line says how many kernels ran: all that the programs hold, and all that nvcc compiles, as
tools/cuda_kernels.tsv lists them, in blocks for which a multiprocessor has registers.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import programs
import translate
from programs import build_config

REGISTERS = 65_536  # of a multiprocessor, with every compute capability since 5.3
NVCC_KERNELS = programs.ROOT / "tools" / "cuda_kernels.tsv"  # written by tools/cuda_check.py
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--builds", nargs="+", choices=programs.KINDS, default=["plain", "address"])
    parser.add_argument("--large", action="store_true", help="tensors of millions of elements, too")
    parser.add_argument("--part", action="store_true", help="not with everything in every order")
    options = parser.parse_args()
    kinds = [kind for kind in options.builds if has_compiler(kind)]
    # What runs longest first: with sanitizers, and in the order of the programs.
    runs = [(kind, program) for program in programs.DRIVERS for kind in reversed(kinds)]
    programs.build(kinds)
    if build_config.find_cuda_home()[0] is None:
        print("conversions: not compared with NVIDIA's, whose headers are not here")
    else:
        programs.build(["plain"], programs=(programs.CONVERSIONS,))
        runs.insert(0, ("plain", programs.CONVERSIONS))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(lambda of: run(*of, options), runs))
    ran: dict[str, dict[str, int]] = {}
    for (kind, program), (status, output) in zip(runs, results, strict=True):
        print(f"== {kind}\n{output}", end="", flush=True)
        if status:
            sys.exit(f"emulate: {program}, {kind}: exit {status}")
        if program in programs.DRIVERS:
            ran.setdefault(kind, {}).update(launched(path_of(kind, program)))
    registers = nvcc_registers()
    for threads in ran.values():
        require_same(set(threads), all_kernels(kinds[0]), "compiled here")
        require_same(set(threads), set(registers), "compiled by nvcc")
        require_registers(threads, registers)
    print(f"{len(threads)} kernels ran")


def has_compiler(kind: str) -> bool:
    name = programs.compiler(kind)
    if shutil.which(shlex.split(name)[0]) is None:
        print(f"{kind}: skipped, there is no {name}")
        return False
    return True


def path_of(kind: str, program: str) -> Path:
    return programs.FOLDER / kind / program


def run(kind: str, program: str, chosen: argparse.Namespace) -> tuple[int, str]:
    options = [f"--{name}" for name in ("large", "part") if getattr(chosen, name)]
    if kind != "plain":
        options.append("--one-order")  # what sanitizers see of right kernels does not depend on it
    return run_program(path_of(kind, program), kind, *options)


def run_program(path: Path, kind: str, *options: str) -> tuple[int, str]:
    command = [str(path), str(list_of(path)), *options]
    if kind == "thread":
        # Its shadow memory needs addresses where they used to be.
        command = ["setarch", platform.machine(), "-R", *command]
    done = subprocess.run(
        command,
        env={**os.environ, **OPTIONS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def names_an_error(line: str) -> bool:
    return line.startswith("emulation (") or "Sanitizer: " in line or "runtime error: " in line


def list_of(program: Path) -> Path:
    return program.with_suffix(".launched")


def symbols(program: Path) -> dict[int, str]:
    """The functions of a program by address, with the names that nvcc's are compared by."""
    rows = [line.split() for line in output_of("nm", "--defined-only", str(program)).splitlines()]
    functions = [(int(at, 16), name) for at, kind, name in rows if kind in "tTwW"]
    demangled = output_of("c++filt", "-p", given="\n".join(name for _, name in functions))
    names = demangled.replace("(anonymous namespace)::", "").splitlines()
    return {at: name for (at, _), name in zip(functions, names, strict=True)}


def output_of(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def launched(program: Path) -> dict[str, int]:
    """The most threads of a block, of each kernel that was launched."""
    named = symbols(program)
    rows = [line.split() for line in list_of(program).read_text().splitlines()]
    return {named[int(at, 16)]: int(threads) for at, threads in rows}


def all_kernels(kind: str) -> set[str]:
    """Every instantiation of a kernel that the programs hold."""
    sources = list((programs.ROOT / "csrc").glob("**/*.cu*"))
    kernels = set().union(*(translate.kernel_names(path) for path in sources))
    found = set()
    for program in programs.DRIVERS:
        for name in symbols(path_of(kind, program)).values():
            plain = name.partition("<")[0].rpartition("::")[2]
            if plain in kernels and "{lambda" not in name:
                found.add(name)
    return found


def nvcc_registers() -> dict[str, int]:
    """A thread's, by kernel."""
    lines = NVCC_KERNELS.read_text().splitlines()[1:]  # without the release of nvcc
    rows = csv.DictReader(lines, delimiter="\t")
    return {row["kernel"]: max(int(row["registers_80"]), int(row["registers_90"])) for row in rows}


def require_registers(threads: dict[str, int], registers: dict[str, int]) -> None:
    """A launch fails where a block takes more than a multiprocessor has (CUDA C++ Programming
    Guide, "Technical Specifications"): a warp takes them in units of 256."""
    for name, count in threads.items():
        of_warp = -(-registers[name] * 32 // 256) * 256
        taken = -(-count // 32) * of_warp
        if taken > REGISTERS:
            sys.exit(f"emulate: {name}: {count} threads take {taken} registers of {REGISTERS}")


def require_same(ran: set[str], expected: set[str], where: str) -> None:
    for name in sorted(expected - ran):
        print(f"{where}, and did not run: {name}")
    for name in sorted(ran - expected):
        print(f"ran, and not {where}: {name}")
    if ran != expected:
        sys.exit("emulate: not the same kernels; nvcc's are those of tools/cuda_kernels.tsv")


if __name__ == "__main__":
    main()
