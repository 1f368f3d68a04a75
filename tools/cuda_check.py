"""Compile every CUDA source without a GPU and without a CUDA torch (`make cuda-check`).

Kernels (*.cu, free of torch headers) are compiled for sm_80 and sm_90 and listed with registers,
spills and shared memory; cuda.cpp files are checked against the headers of the installed torch.
Fails on an error or a spill. The kernels' registers and names are left for `make emulate`, which
runs each.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_config
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "build" / "cuda-kernels.txt"
ARCHS = ("80", "90")
ROW = "{:<50} {:>5} {:>9} {:>11} {:>12}"


def main() -> None:
    cuda_home, missing = build_config.find_cuda_home()
    if cuda_home is None:
        print(f"cuda-check: skipped, {missing}.")
        return
    kernels = sorted(ROOT.glob("csrc/**/*.cu"))
    bindings = sorted(ROOT.glob("csrc/**/cuda.cpp"))
    commands = [kernel_command(cuda_home, path) for path in kernels]
    commands += [binding_command(cuda_home, path) for path in bindings]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, commands))

    problems = 0
    registers_of: dict[str, int] = {}
    print(ROW.format("kernel", "arch", "registers", "spill bytes", "shared bytes"))
    for path, (compiled, output) in zip(kernels, results, strict=False):
        if not compiled:
            problems += 1
            print(f"{path.relative_to(ROOT)} does not compile:\n{output}")
            continue
        for name, arch, registers, spill, shared in parse_ptxas(output):
            problems += spill > 0
            registers_of[name] = max(registers_of.get(name, 0), registers)
            print(ROW.format(name, arch, registers, spill, shared))
    for path, (compiled, output) in zip(bindings, results[len(kernels) :], strict=True):
        problems += not compiled
        print(f"{path.relative_to(ROOT)}: {'compiles' if compiled else 'does not compile'}")
        print(output, end="")
    KERNELS.parent.mkdir(exist_ok=True)
    rows = (f"{registers} {name}\n" for name, registers in sorted(registers_of.items()))
    KERNELS.write_text("".join(rows))
    if problems:
        sys.exit(f"cuda-check: {problems} sources that do not compile or kernels that spill.")


def kernel_command(cuda_home: str, path: Path) -> list[str]:
    command = [f"{cuda_home}/bin/nvcc", "-c", str(path), "-o", os.devnull]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    command += ["-O3", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}", torch_std()]
    return [*command, "--compiler-options", "-fPIC", *cpp_extension.COMMON_NVCC_FLAGS]


def binding_command(cuda_home: str, path: Path) -> list[str]:
    # The first define keeps a CPU wheel's headers from including a file only CUDA wheels have.
    command = [os.environ.get("CXX", "c++"), "-fsyntax-only", torch_std(), str(path)]
    command += ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", "-DMEMSAVE_EXT_WITH_CUDA=1"]
    command += [*build_config.WARNINGS, f"-I{ROOT / 'csrc'}", "-isystem", f"{cuda_home}/include"]
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    return command + [f for path in includes for f in ("-isystem", path)]


def torch_std() -> str:
    """The -std that torch builds extensions with. It has no public name, so its source is read."""
    match = re.search(r"-std=c\+\+\d+", inspect.getsource(cpp_extension))
    assert match, "torch.utils.cpp_extension names no -std"
    return match.group()


def run(command: list[str]) -> tuple[bool, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def parse_ptxas(output: str) -> list[tuple[str, str, int, int, int]]:
    """(kernel, arch, registers, spill bytes, static shared bytes) per entry of `-Xptxas -v`."""
    rows = []
    for block in re.split(r"Compiling entry function '", output)[1:]:
        mangled, arch = re.match(r"([^']*)' for '([^']*)'", block).groups()
        registers = re.search(r"Used (\d+) registers", block)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", block)
        shared = re.search(r"(\d+) bytes smem", block)
        rows.append(
            (
                demangle(mangled),
                arch,
                int(registers.group(1)) if registers else 0,
                sum(map(int, spills)),
                int(shared.group(1)) if shared else 0,
            )
        )
    return rows


def demangle(name: str) -> str:
    if shutil.which("c++filt"):
        name = run(["c++filt", "-p", name])[1].strip()
    return name.replace("(anonymous namespace)::", "")


if __name__ == "__main__":
    main()
