"""Compile every CUDA source without a GPU and without a CUDA torch (`make cuda-check`).

    python tools/cuda_check.py [--renew | --anew]
    python tools/cuda_check.py --arch 75 86 89 100 120

Kernels (*.cu, free of torch headers) are compiled for sm_80 and sm_90, cuda.cpp files are checked
against the headers of the installed torch. What a kernel takes is compared with cuda_kernels.tsv:
registers, and of sm_90 shared memory and what sass.py reads from the machine code. Fails on an
error, a spill, and where a figure is not the table's; --renew writes the table anew. Kernels whose
sources and compiler are those that the table was written of are not compiled again, but with
--anew. With --arch kernels are compiled for other architectures, which have no table: fails on an
error and a spill.
"""

from __future__ import annotations

import argparse
import hashlib
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
CSRC = ROOT / "csrc"
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
    parser.add_argument("--anew", action="store_true", help="compile kernels that are known, too")
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
    check_bindings(cuda_home)
    origin = f"nvcc {build_config.nvcc_release(cuda_home)}; sources {digest(kernels)}"
    if options.renew or options.anew or origin != read_table()[0]:
        check_kernels(cuda_home, kernels, origin, options.renew)
    else:
        print(f"cuda-check: {len(kernels)} sources of kernels are those of {TABLE.name}.")


def check_bindings(cuda_home: str) -> None:
    """As one file: most of the time is for the headers."""
    bindings = sorted(ROOT.glob("csrc/**/cuda.cpp"))
    text = "".join(f'#include "{path.relative_to(CSRC)}"\n' for path in bindings)
    right, output = run(binding_command(cuda_home), text)
    print(output, end="")
    if not right:
        sys.exit("cuda-check: a cuda.cpp file does not compile.")
    print(f"cuda-check: {len(bindings)} files cuda.cpp compile.")


def check_kernels(cuda_home: str, kernels: list[Path], origin: str, renew: bool) -> None:
    """Compares them with the table, or writes it first. ``origin``: what it is to be written of."""
    disassembler = find_disassembler(cuda_home)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = list(pool.map(lambda p: compile_kernels(cuda_home, p, disassembler), kernels))
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
    if problems:
        sys.exit(f"cuda-check: {problems} sources that do not compile or kernels that spill.")
    rows.sort()
    if renew:
        if disassembler is None:
            sys.exit("cuda-check: --renew needs nvdisasm (pip install nvidia-cuda-nvdisasm)")
        write_table(origin, rows)
    compare(origin, rows, disassembler is not None)


def digest(kernels: list[Path]) -> str:
    """Of what nvcc reads and is told: the sources, all of ours that they include, and the flags."""
    found = hashlib.sha256("\n".join([*ARCHS, *kernel_flags()]).encode())
    read = [path.resolve() for path in kernels]
    for path in read:  # it grows
        text = path.read_bytes()
        found.update(b"\0%b\0%b" % (path.relative_to(ROOT).as_posix().encode(), text))
        names = re.findall(rb'^#include "(.+)"', text, re.MULTILINE)
        places = [(at / name.decode()).resolve() for name in names for at in (path.parent, CSRC)]
        read += [p for p in dict.fromkeys(places) if p.is_file() and p not in read]
    return found.hexdigest()[:16]


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


def write_table(origin: str, rows: list[Row]) -> None:
    lines = [f"# {origin}; python tools/cuda_check.py --renew", "\t".join(Row._fields)]
    lines += ["\t".join(map(str, row)) for row in rows]
    TABLE.write_text("\n".join(lines) + "\n")


def read_table() -> tuple[str, list[Row]]:
    """What the table was written of, and its rows."""
    origin, _, *lines = TABLE.read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    return origin[2:].rpartition(";")[0], [Row(name, *map(int, rest)) for name, *rest in rows]


def compare(origin: str, rows: list[Row], disassembled: bool) -> None:
    of_table, expected = read_table()
    release, before = origin.partition(";")[0], of_table.partition(";")[0]
    if release != before:
        print(f"cuda-check: not compared with {TABLE.name}, which is of {before}, not {release}.")
        return
    fields = Row._fields
    if not disassembled:
        fields = fields[: fields.index("instructions")]
        print("cuda-check: instructions were not compared: there is no nvdisasm.")
    old = {row.kernel: row for row in expected}
    new = {row.kernel: row for row in rows}
    differences = [f"not in the table: {name}" for name in new.keys() - old.keys()]
    differences += [f"not compiled: {name}" for name in old.keys() - new.keys()]
    for name in sorted(old.keys() & new.keys()):
        pairs = [(f, getattr(old[name], f), getattr(new[name], f)) for f in fields]
        changed = [f"{field} {was} -> {now}" for field, was, now in pairs if was != now]
        if changed:
            differences.append(f"{name}: {', '.join(changed)}")
    print("\n".join(sorted(differences)))
    if differences:
        sys.exit(
            f"cuda-check: {len(differences)} kernels are not as in {TABLE.relative_to(ROOT)}. Where"
            " that is meant: `python tools/cuda_check.py --renew`, and commit the table."
        )
    print(f"cuda-check: {len(rows)} kernels, as in {TABLE.relative_to(ROOT)}.")
    if origin != of_table and disassembled:
        print("cuda-check: it was written of other sources; --renew notes that of these, too.")


def kernel_command(cuda_home: str, path: Path, kept: Path) -> list[str]:
    command = [f"{cuda_home}/bin/nvcc", "-c", str(path), "-o", os.devnull]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    command += ["--keep", "--keep-dir", str(kept)]  # PTX and machine code, to look at
    return [*command, f"-I{CSRC}", *kernel_flags(), "--compiler-options", "-fPIC"]


def arch_command(cuda_home: str, path: Path, arch: str) -> list[str]:
    """Without what is compiled for the host, which is the same for all."""
    command = [f"{cuda_home}/bin/nvcc", "-cubin", f"-arch=sm_{arch}", str(path), "-o", os.devnull]
    return [*command, f"-I{CSRC}", *kernel_flags()]


def kernel_flags() -> list[str]:
    return ["-O3", "-Xptxas", "-v", torch_std(), *cpp_extension.COMMON_NVCC_FLAGS]


def binding_command(cuda_home: str) -> list[str]:
    # The first define keeps a CPU wheel's headers from including a file only CUDA wheels have.
    # C++17, as with the oldest torch, whatever the one that is here compiles extensions as.
    command = [os.environ.get("CXX", "c++"), "-fsyntax-only", "-std=c++17", "-x", "c++", "-"]
    command += ["-pedantic-errors"]
    command += ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", "-DMEMSAVE_EXT_WITH_CUDA=1"]
    command += [*build_config.WARNINGS, f"-I{CSRC}", "-isystem", f"{cuda_home}/include"]
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    return command + [f for path in includes for f in ("-isystem", path)]


def torch_std() -> str:
    """The -std that torch builds extensions with. It has no public name, so its source is read."""
    match = re.search(r"-std=c\+\+\d+", inspect.getsource(cpp_extension))
    assert match, "torch.utils.cpp_extension names no -std"
    return match.group()


def run(command: list[str], given: str | None = None) -> tuple[bool, str]:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
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
