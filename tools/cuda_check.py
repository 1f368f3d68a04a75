"""Compile every CUDA source without a GPU and without a CUDA torch (`make cuda-check`).

    python tools/cuda_check.py [--renew]
    python tools/cuda_check.py --arch 75 86 89 100 120

Kernels (*.cu, free of torch headers) are compiled for sm_80 and sm_90, cuda.cpp files are checked
against the headers of the installed torch. What a kernel takes is compared with cuda_kernels.tsv:
registers, and of sm_90 shared memory and what sass.py reads from the machine code. Fails on an
error, a spill, and where a figure is not the table's; --renew writes the table anew. With --arch
kernels are compiled for other architectures, which have no table: fails on an error and a spill.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import build_config
import sass
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "cuda_kernels.tsv"
ARCHS = ("80", "90")
# Of a multiprocessor of sm_90.
REGISTERS, THREADS, BLOCKS, SHARED = 65_536, 2048, 32, 227 << 10


class Row(NamedTuple):
    """A kernel. From `instructions` on -1: there is no nvdisasm. `path`, `read` and `written`:
    instructions and bytes of a thread on the path that sass.py describes. `in_flight`: bytes that
    a multiprocessor waits for at once, with as many threads as it has room for (dynamic shared
    memory left out)."""

    kernel: str
    registers_80: int
    registers_90: int
    shared: int
    instructions: int
    path: int
    read: int
    written: int
    in_flight: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--renew", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument(
        "--arch", nargs="+", metavar="NN", help="compile kernels for these architectures alone"
    )
    options = parser.parse_args()
    cuda_home, missing = build_config.find_cuda_home()
    if cuda_home is None:
        print(f"cuda-check: skipped, {missing}.")
        return
    kernels = sorted(ROOT.glob("csrc/**/*.cu"))
    if options.arch is not None:
        check_archs(cuda_home, kernels, options.arch)
        return
    disassembler = find_disassembler(cuda_home)
    bindings = sorted(ROOT.glob("csrc/**/cuda.cpp"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = pool.map(lambda path: compile_kernels(cuda_home, path, disassembler), kernels)
        checked = pool.map(lambda path: run(binding_command(cuda_home, path)), bindings)
        compiled, checked = list(compiled), list(checked)

    problems = 0
    rows: list[Row] = []
    for path, (output, of_source) in zip(kernels, compiled, strict=True):
        if of_source is None:
            problems += 1
            print(f"{path.relative_to(ROOT)} does not compile:\n{output}")
            continue
        for name, arch, spilled in spills(output):
            problems += 1
            print(f"{name} ({arch}) spills {spilled} bytes")
        rows += of_source
    for path, (right, output) in zip(bindings, checked, strict=True):
        problems += not right
        print(f"{path.relative_to(ROOT)}: {'compiles' if right else 'does not compile'}")
        print(output, end="")
    if problems:
        sys.exit(f"cuda-check: {problems} sources that do not compile or kernels that spill.")
    release = f"nvcc {build_config.nvcc_release(cuda_home)}"
    rows.sort()
    if options.renew:
        if disassembler is None:
            sys.exit("cuda-check: --renew needs nvdisasm (pip install nvidia-cuda-nvdisasm)")
        write_table(release, rows)
    compare(release, rows, disassembler is not None)


def check_archs(cuda_home: str, kernels: list[Path], archs: list[str]) -> None:
    """Says of each architecture what does not compile or spills, and how long it takes to compile:
    what it adds to a build."""
    problems = 0
    for arch in archs:
        commands = [arch_command(cuda_home, path, arch) for path in kernels]
        before = os.times()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = list(pool.map(run, commands))
        after = os.times()
        seconds = after.children_user - before.children_user
        seconds += after.children_system - before.children_system
        for path, (right, output) in zip(kernels, compiled, strict=True):
            if not right:
                problems += 1
                print(f"{path.relative_to(ROOT)} does not compile for sm_{arch}:\n{output}")
        found = [spill for right, output in compiled if right for spill in spills(output)]
        problems += len(found)
        for name, of_arch, spilled in found:
            print(f"{name} ({of_arch}) spills {spilled} bytes")
        print(f"sm_{arch}: {len(kernels)} sources, {seconds:.0f} s of a core", flush=True)
    if problems:
        sys.exit(f"cuda-check: {problems} sources that do not compile or kernels that spill.")


def compile_kernels(
    cuda_home: str, path: Path, disassembler: str | None
) -> tuple[str, list[Row] | None]:
    """What nvcc prints, and the source's kernels; None where it does not compile."""
    kept = ROOT / "build" / "cuda-check" / path.relative_to(ROOT).with_suffix("")
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    right, output = run(kernel_command(cuda_home, path, kept))
    if not right:
        return output, None
    stem = kept / f"{path.stem}.compute_{ARCHS[-1]}"
    speeds: dict[str, sass.Speed] = {}
    if disassembler is not None:
        listed, listing = run([disassembler, "-c", f"{stem}.cubin"])
        if not listed:
            sys.exit(f"cuda-check: nvdisasm: {listing}")
        speeds = dict(sass.kernels(listing))
    ptx = Path(f"{stem}.ptx").read_text()
    threads = dict(re.findall(r"\.entry (\w+)\([^{]*?\.maxntid (\d+)", ptx))
    figures: dict[str, dict[str, tuple[int, int]]] = {}
    for name, arch, registers, shared in parse_ptxas(output):
        figures.setdefault(name, {})[arch] = (registers, shared)
    rows = []
    for name, of_arch in figures.items():
        (registers_80, _), (registers, shared) = (of_arch[f"sm_{arch}"] for arch in ARCHS)
        speed = speeds.get(name)
        resident = resident_threads(int(threads.get(name, 1024)), registers, shared)
        found = (-1,) * 5 if speed is None else (*speed[:4], speed.in_flight * resident)
        rows.append(Row(demangle(name), registers_80, registers, shared, *found))
    shutil.rmtree(kept)
    return output, rows


def resident_threads(threads: int, registers: int, shared: int) -> int:
    """How many a multiprocessor has room for: a warp takes registers in units of 256, a block
    shared memory of which 1 KiB is the system's."""
    warps = -(-threads // 32)
    of_block = warps * -(-registers * 32 // 256) * 256
    blocks = min(THREADS // (warps * 32), BLOCKS, REGISTERS // of_block, SHARED // (shared + 1024))
    return blocks * threads


def find_disassembler(cuda_home: str) -> str | None:
    """The toolkit's nvdisasm, or that of the package nvidia-cuda-nvdisasm."""
    places = [f"{cuda_home}/bin", *(f"{path}/nvidia/cu13/bin" for path in sys.path)]
    return shutil.which("nvdisasm", path=os.pathsep.join(places))


def write_table(release: str, rows: list[Row]) -> None:
    lines = [f"# {release}; python tools/cuda_check.py --renew", "\t".join(Row._fields)]
    lines += ["\t".join(map(str, row)) for row in rows]
    TABLE.write_text("\n".join(lines) + "\n")


def read_table() -> tuple[str, list[Row]]:
    """The nvcc that the table is of, and its rows."""
    release, _, *lines = TABLE.read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    return release[2:].partition(";")[0], [Row(name, *map(int, rest)) for name, *rest in rows]


def compare(release: str, rows: list[Row], disassembled: bool) -> None:
    of_table, expected = read_table()
    if of_table != release:
        print(f"cuda-check: not compared with {TABLE.name}, which is of {of_table}, not {release}.")
        return
    fields = Row._fields
    if not disassembled:
        fields = fields[: fields.index("instructions")]
        print("cuda-check: instructions were not compared: there is no nvdisasm.")
    before = {row.kernel: row for row in expected}
    after = {row.kernel: row for row in rows}
    differences = [f"not in the table: {name}" for name in after.keys() - before.keys()]
    differences += [f"not compiled: {name}" for name in before.keys() - after.keys()]
    for name in sorted(before.keys() & after.keys()):
        pairs = [(f, getattr(before[name], f), getattr(after[name], f)) for f in fields]
        changed = [f"{field} {old} -> {new}" for field, old, new in pairs if old != new]
        if changed:
            differences.append(f"{name}: {', '.join(changed)}")
    print("\n".join(sorted(differences)))
    if differences:
        sys.exit(
            f"cuda-check: {len(differences)} kernels are not as in {TABLE.relative_to(ROOT)}. Where"
            " that is meant: `python tools/cuda_check.py --renew`, and commit the table."
        )
    print(f"cuda-check: {len(rows)} kernels, as in {TABLE.relative_to(ROOT)}.")


def kernel_command(cuda_home: str, path: Path, kept: Path) -> list[str]:
    command = [f"{cuda_home}/bin/nvcc", "-c", str(path), "-o", os.devnull]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    command += ["--keep", "--keep-dir", str(kept)]  # PTX and machine code, to look at
    return [*command, *kernel_flags(), "--compiler-options", "-fPIC"]


def arch_command(cuda_home: str, path: Path, arch: str) -> list[str]:
    """Without what is compiled for the host, which is the same for all."""
    command = [f"{cuda_home}/bin/nvcc", "-cubin", f"-arch=sm_{arch}", str(path), "-o", os.devnull]
    return [*command, *kernel_flags()]


def kernel_flags() -> list[str]:
    flags = ["-O3", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}", torch_std()]
    return flags + cpp_extension.COMMON_NVCC_FLAGS


def binding_command(cuda_home: str, path: Path) -> list[str]:
    # The first define keeps a CPU wheel's headers from including a file only CUDA wheels have.
    # C++17, as with the oldest torch, whatever the one that is here compiles extensions as.
    command = [os.environ.get("CXX", "c++"), "-fsyntax-only", "-std=c++17", str(path)]
    command += ["-pedantic-errors"]
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


def parse_ptxas(output: str) -> list[tuple[str, str, int, int]]:
    """(mangled name, arch, registers, static shared bytes) per entry of `-Xptxas -v`."""
    rows = []
    for name, arch, block in entries(output):
        registers = re.search(r"Used (\d+) registers", block)
        shared = re.search(r"(\d+) bytes smem", block)
        assert registers, block
        rows.append((name, arch, int(registers[1]), int(shared[1]) if shared else 0))
    return rows


def spills(output: str) -> list[tuple[str, str, int]]:
    """(kernel, arch, spill bytes) of those that spill."""
    found = []
    for name, arch, block in entries(output):
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", block)))
        if spilled:
            found.append((demangle(name), arch, spilled))
    return found


def entries(output: str) -> list[tuple[str, str, str]]:
    """(mangled name, arch, what follows) per entry of `-Xptxas -v`."""
    blocks = re.split(r"Compiling entry function '", output)[1:]
    return [(*re.match(r"([^']*)' for '([^']*)'", block).groups(), block) for block in blocks]


def demangle(name: str) -> str:
    if shutil.which("c++filt"):
        name = run(["c++filt", "-p", name])[1].strip()
    return name.replace("(anonymous namespace)::", "")


if __name__ == "__main__":
    main()
