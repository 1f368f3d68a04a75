"""What setup.py builds: the CPU-or-CUDA decision, the source list and the compiler flags.

No torch import here: setup.py hands over torch's versions, and the tests other versions.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Cards since 2018, where none is visible; newer ones compile the last one's PTX.
ARCHS = ("7.5", "8.0", "8.6", "8.9", "9.0")
ARCHS_SINCE_12_8 = ("10.0", "12.0")  # nvcc 12.8 is the first that knows them
OLDEST = (7, 5)
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]


@dataclass(frozen=True)
class Decision:
    cuda: bool
    sentence: str
    cuda_home: str | None = None
    archs: str | None = None


def check_torch(version: str, root: Path) -> None:
    """Exits with one sentence where torch is none of those that pyproject.toml asks for: without
    build isolation pip would replace it once it has been built with."""
    project = (root / "pyproject.toml").read_text()
    found = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', project)
    assert found is not None
    major, least, other_major, above = map(int, found.groups())
    assert major == other_major
    if not (major, least) <= tuple(map(int, version.split(".")[:2])) < (major, above):
        sys.exit(
            f"memsave_ext needs torch {major}.{least} to {major}.{above - 1}, found {version}: "
            "install one of these first."
        )


def decide(
    torch_version: str,
    torch_cuda: str | None,
    torch_hip: str | None = None,
    cards: Iterable[tuple[int, int]] = (),
) -> Decision:
    """Choose the build from MEMSAVE_EXT_CUDA, what torch was built with, and the toolkit.

    Exits with one sentence when the variable is invalid, or is 1 and something is missing.

    Args:
        torch_version: torch's.
        torch_cuda: the CUDA that torch was built with; None: none.
        torch_hip: the ROCm that it was built with; None: none.
        cards: compute capabilities of the visible ones.
    """
    choice = os.environ.get("MEMSAVE_EXT_CUDA") or "auto"
    if choice not in ("auto", "0", "1"):
        sys.exit(f"MEMSAVE_EXT_CUDA must be auto, 0 or 1, got {choice!r}.")
    if choice == "0":
        return Decision(False, "memsave_ext: C++ build without CUDA (MEMSAVE_EXT_CUDA=0).")

    cuda_home, missing = find_cuda_home()
    release = nvcc_release(cuda_home) if cuda_home else None
    reasons = [missing] if missing else []
    if torch_hip is not None:
        reasons = [f"torch {torch_version} is a ROCm build, for which there are no kernels"]
    elif torch_cuda is None:
        reasons.insert(0, f"torch {torch_version} is a CPU build")
    elif release and release.split(".")[0] != torch_cuda.split(".")[0]:
        reasons.append(f"nvcc is CUDA {release} while torch {torch_version} is CUDA {torch_cuda}")
    if reasons:
        why = " and ".join(reasons)
        if choice == "1":
            sys.exit(f"MEMSAVE_EXT_CUDA=1 cannot be met: {why}.")
        return Decision(False, f"memsave_ext: C++ build without CUDA ({why}).")

    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_archs(release or "", cards)
    sentence = f"memsave_ext: C++ and CUDA build for {archs} (nvcc {release} in {cuda_home})."
    return Decision(True, sentence, cuda_home, archs)


def default_archs(release: str, cards: Iterable[tuple[int, int]]) -> str:
    """The architectures of the visible cards, as torch's own builds of extensions; else of all."""
    visible = sorted({card for card in cards if card >= OLDEST})
    here = [f"{major}.{minor}" for major, minor in visible]
    is_new = bool(release) and tuple(map(int, release.split("."))) >= (12, 8)
    return ";".join(here or ARCHS + ARCHS_SINCE_12_8 * is_new) + "+PTX"


def find_cuda_home() -> tuple[str | None, str | None]:
    """Return (toolkit, None), or (None, what is missing).

    torch takes the folder above nvcc, which is wrong for a wrapper script outside the toolkit: the
    link then fails on -lcudart. nvcc itself knows where it lives, so it is asked.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            return (home, None) if _has_nvcc(home) else (None, f"{variable}={home} has no bin/nvcc")
    nvcc = shutil.which("nvcc")
    candidates = [_reported_home(nvcc), str(Path(nvcc).resolve().parents[1])] if nvcc else []
    for candidate in [*candidates, "/usr/local/cuda"]:
        # lib, too: the folder above a wrapper script has bin/nvcc, but not the runtime library.
        if candidate and _has_nvcc(candidate) and _has_cudart(candidate):
            return candidate, None
    if nvcc:
        return None, f"{nvcc} does not lead to a CUDA toolkit (set CUDA_HOME)"
    return None, "nvcc was not found (set CUDA_HOME, or put nvcc on PATH)"


def nvcc_release(cuda_home: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", _output([f"{cuda_home}/bin/nvcc", "--version"]))
    return match.group(1) if match else None


def _reported_home(nvcc: str) -> str | None:
    output = _output([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    match = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return os.path.realpath(match.group(1).strip()) if match else None


def _has_nvcc(home: str) -> bool:
    return os.access(Path(home, "bin", "nvcc"), os.X_OK)


def _has_cudart(home: str) -> bool:
    return any(next(Path(home).glob(f"{lib}/libcudart*"), None) for lib in ("lib64", "lib"))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout + done.stderr


def sources(root: Path, cuda: bool) -> list[str]:
    """Sources relative to root: setuptools accepts nothing else. cuda.cpp and *.cu need CUDA."""
    found = [p for p in root.glob("csrc/**/*.cpp") if cuda or p.name != "cuda.cpp"]
    if cuda:
        found += root.glob("csrc/**/*.cu")
    return sorted(p.relative_to(root).as_posix() for p in found)


def headers(root: Path) -> list[str]:
    found = [p for end in ("h", "cuh") for p in root.glob(f"csrc/**/*.{end}")]
    return sorted(p.relative_to(root).as_posix() for p in found)


def compile_flags(torch_includes: list[str], cuda: bool) -> dict[str, list[str]]:
    """Flags per compiler. No -std: torch knows which standard its headers need."""
    # NDEBUG as in torch's own builds: headers that check what only debug builds keep would raise.
    common = ["-O3", "-DNDEBUG", "-fvisibility=hidden"]
    # Python's own flags have -g, which nobody asked for.
    asked = shlex.split(f"{os.environ.get('CFLAGS', '')} {os.environ.get('CXXFLAGS', '')}")
    common += [] if any(flag.startswith("-g") for flag in asked) else ["-g0"]
    # As system headers, torch's own code stays out of our warnings.
    system = [flag for path in torch_includes for flag in ("-isystem", path)]
    # For at::parallel_for. Only to compile: the symbols are those of torch's own runtime.
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    flags = {"cxx": [*common, *openmp, *WARNINGS, *system]}
    if cuda:
        flags["nvcc"] = ["-O3", "-Xcompiler=-g0,-fvisibility=hidden"]
    return flags


def local_version(torch_version: str, cuda: str | None) -> str:
    """The local part of a wheel's version: the minor version of torch that its compiled file fits,
    and the CUDA of its kernels, as other extensions of torch have it."""
    major, minor = torch_version.split("+")[0].split(".")[:2]
    return f"pt{major}{minor}{'cu' + cuda.replace('.', '') if cuda else 'cpu'}"


def compiler_version(cxx: list[str]) -> str:
    lines = _output([*cxx, "--version"]).splitlines()
    return lines[0] if lines else " ".join(cxx)
