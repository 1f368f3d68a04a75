"""The emulation's programs, built by ninja: plain, or with a sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import translate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import build_config  # noqa: E402

HERE = ROOT / "tests" / "emulation"
FOLDER = ROOT / "build" / "emulation"

KINDS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DEMULATION_ADDRESS"],
    "thread": ["-fsanitize=thread", "-DEMULATION_THREAD"],
    "memory": ["-fsanitize=memory", "-DEMULATION_MEMORY"],
}
# Without contraction: comparisons must not depend on what a compiler makes of it.
# What a library needs, too: the kernels' objects are linked into the package by operators.py.
FLAGS = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-mfma", "-fPIC", "-fvisibility=hidden"]
DRIVERS = {  # first what runs longest
    "batch_norm": ["batch_norm", "driver"],
    "adam": ["adam", "adam_codes", "adam_measure", "driver"],
    "loss_head": ["loss_head", "driver"],
}
CONVERSIONS = "conversions"  # a program that needs the toolkit's headers, and no kernels
# ThreadSanitizer must not take what the executor does for what kernels do.
EXECUTOR = ["device", "fibers", "launch", "order"]
REFERENCE = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fopenmp"]

RULES = """\
rule compile
  command = $cxx $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx $in -o $out $flags
"""


def build(
    kinds: list[str],
    folder: Path = FOLDER,
    csrc: Path = ROOT / "csrc",
    programs: tuple[str, ...] = tuple(DRIVERS),
) -> None:
    """Build folder/KIND/PROGRAM for each of both."""
    sources = translate.translate_tree(csrc, folder / "csrc")
    (folder / "build.ninja").write_text(Plan(folder, csrc, sources).text(kinds, programs))
    run_ninja(folder)


def kernel_objects() -> list[Path]:
    """The objects of all kernels and the executor, once each, as build(["plain"]) leaves them."""
    objects = [FOLDER / "plain" / "adam_objects" / f"{name}.o" for name in EXECUTOR]
    for path in sorted((ROOT / "csrc").glob("**/*.cu")):
        kernel = path.relative_to(ROOT / "csrc").with_suffix(".o")
        program = "adam" if kernel.parts[0] == "report" else kernel.parts[0]
        objects.append(FOLDER / "plain" / f"{program}_objects" / kernel)
    return objects


def run_ninja(folder: Path) -> None:
    command = ["ninja", "-C", str(folder), "--quiet", f"-j{len(os.sched_getaffinity(0))}"]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit("emulate: the build failed")


def compiler(kind: str) -> str:
    if kind == "memory":  # GCC has no MemorySanitizer
        return os.environ.get("CLANGXX", "clang++-16")
    return os.environ.get("CXX", "g++")


class Plan:
    """What ninja is given. Paths are relative to its folder: a checkout's may have spaces."""

    def __init__(self, folder: Path, csrc: Path, sources: list[Path]) -> None:
        self.folder, self.csrc, self.sources = folder, csrc, sources
        self.lines = [RULES]

    def text(self, kinds: list[str], programs: tuple[str, ...]) -> str:
        includes = self._includes(HERE / "reference", self.csrc, HERE)
        self._compile("plain", HERE / "reference/adam.cpp", "reference.o", REFERENCE + includes)
        self._build("plain", "link", ["reference.o"], "libreference.so", ["-shared"])
        if CONVERSIONS in programs:
            self._toolkits_conversions()
        for kind in kinds:
            for program in programs:
                self._program(kind, program)
        return "".join(self.lines)

    def _toolkits_conversions(self) -> None:
        cuda_home, _ = build_config.find_cuda_home()
        flags = [*REFERENCE, *self._includes(HERE), "-w", f"-isystem '{cuda_home}/include'"]
        self._compile("plain", HERE / "reference/nvidia.cpp", "nvidia.o", flags)
        self._build("plain", "link", ["nvidia.o"], "libnvidia.so", ["-shared"])

    def _program(self, kind: str, program: str) -> None:
        includes = self._includes(self.folder / "csrc", self.csrc, HERE, HERE / "cuda")
        flags = [*FLAGS, *KINDS[kind], *includes]
        seen = {"-fsanitize=thread"} if kind == "thread" else set()
        objects = []
        for name in [*DRIVERS.get(program, [program, "driver"]), *EXECUTOR]:
            own = [flag for flag in flags if name not in EXECUTOR or flag not in seen]
            own += ["-O2"] if name in EXECUTOR else []
            objects.append(f"{kind}/{program}_objects/{name}.o")
            self._compile(kind, HERE / f"{name}.cpp", objects[-1], ["-Wall", "-Wextra", *own])
        for source in self.sources:
            relative = source.relative_to(self.folder / "csrc")
            # Of the kernels' warnings nvcc's are looked at.
            if relative.parts[0] in (program, *(["report"] if program == "adam" else [])):
                objects.append(f"{kind}/{program}_objects/{relative.with_suffix('.o')}")
                self._compile(kind, source, objects[-1], ["-w", *flags])
        # Without -pie: what the programs print of kernels are addresses as in their symbol tables.
        flags = [*KINDS[kind], "-no-pie", "-Wl,-rpath,'$$ORIGIN/..'"]
        library = "libnvidia.so" if program == CONVERSIONS else "libreference.so"
        self._build(kind, "link", [*objects, library], f"{kind}/{program}", flags)

    def _includes(self, *folders: Path) -> list[str]:
        return [f"-I{os.path.relpath(folder, self.folder)}" for folder in folders]

    def _compile(self, kind: str, source: Path, target: str, flags: list[str]) -> None:
        self._build(kind, "compile", [os.path.relpath(source, self.folder)], target, flags)

    def _build(
        self, kind: str, rule: str, inputs: list[str], target: str, flags: list[str]
    ) -> None:
        self.lines.append(
            f"build {target}: {rule} {' '.join(inputs)}\n"
            f"  cxx = {compiler(kind)}\n  flags = {' '.join(flags)}\n"
        )
